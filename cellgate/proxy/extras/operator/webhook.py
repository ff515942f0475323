"""Calls a webhook for a unit: one signed POST, limited in time and in the size of the answer.

`X-Cellgate-Signature` is `sha256=` and the hex HMAC-SHA256, with the secret, over the value of
`X-Cellgate-Timestamp` (seconds since 1970), a full stop, and the body.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
import time
from collections.abc import Awaitable, Callable

import aiohttp
import orjson

from cellgate.proxy.config.action_settings import CallWebhook
from cellgate.proxy.extras.operator.plan import Incident, RecoveryReport, RecoveryResult

ANSWER_KEPT = 4096
TIMESTAMP, SIGNATURE = "X-Cellgate-Timestamp", "X-Cellgate-Signature"


def sign(secret: str, timestamp: str, body: bytes) -> str:
    """The signature of a body that is sent at `timestamp`."""
    return "sha256=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


WebhookCall = Callable[[CallWebhook, Incident, float], Awaitable[RecoveryReport]]
"""Calls a webhook, which may take so many seconds."""


def caller(tls: ssl.SSLContext, wall: Callable[[], float] = time.time) -> WebhookCall:
    """Calls webhooks, verified by `tls`."""

    async def call(action: CallWebhook, about: Incident, timeout_s: float) -> RecoveryReport:
        body, timestamp = orjson.dumps(about), str(int(wall()))
        headers = {
            "Content-Type": "application/json",
            TIMESTAMP: timestamp,
            SIGNATURE: sign(action.secret, timestamp, body),
        }
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(action.url, data=body, headers=headers, ssl=tls, allow_redirects=False) as reply,
            ):
                text = (await reply.content.read(ANSWER_KEPT)).decode("utf-8", "replace")
                result = RecoveryResult.OK if 200 <= reply.status < 300 else RecoveryResult.FAILED
                return RecoveryReport(result, f"it answered {reply.status}", text)
        except TimeoutError:
            return RecoveryReport(RecoveryResult.TIMEOUT, f"no answer within {timeout_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return RecoveryReport(
                RecoveryResult.FAILED, f"it could not be called: {error or type(error).__name__}"
            )

    return call
