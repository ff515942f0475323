"""What a guardrail is asked, and what it may answer. Pure.

A question is a JSON object: `phase` (`request` or `answer`), `id`, `route`, `model`, and `body` or `text`. An
answer is `{"action": "allow"}`, `{"action": "deny", "reason": "…"}`, or, to a request,
`{"action": "change", "body": {…}}`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import orjson

from cellgate.proxy.wire.failure import Failure, FailureKind

REASON_CHARS = 256


class GuardAction(Enum):
    """What a guardrail wants to be done."""

    ALLOW = "allow"
    DENY = "deny"
    CHANGE = "change"


class Opinion(NamedTuple):
    """The answer of a guardrail. `reason` is for the client, `body` replaces that of the request."""

    action: GuardAction
    reason: str = ""
    body: bytes = b""


ALLOWED = Opinion(GuardAction.ALLOW)


def denied(opinion: Opinion, what: str) -> Failure:
    """The failure for the client."""
    reason = opinion.reason or "no reason was given"
    return Failure(FailureKind.GUARDRAIL_DENIED, f"the guardrail of this gate denied the {what}: {reason}")


class NonsenseError(ValueError):
    """It answered what has no meaning; `str()` says what."""


def question(phase: str, about: dict[str, Any], name: str, content: bytes) -> bytes:
    """What is asked, as JSON. `content` is JSON already, and stands under `name`."""
    head = orjson.dumps({"phase": phase, **about})
    return b'%b,"%b":%b}' % (head[:-1], name.encode(), content)


def opinion_of(status: int, answer: bytes, *, may_change: bool) -> Opinion:
    """What was answered. Raises NonsenseError."""
    if status != 200:
        raise NonsenseError(f"it answered {status}")
    try:
        told = orjson.loads(answer)
        action = GuardAction(told["action"])
    except (ValueError, TypeError, KeyError):
        raise NonsenseError("its answer is no object with an action of allow, deny, change") from None
    reason, body = told.get("reason", ""), told.get("body")
    if action is not GuardAction.CHANGE:
        return Opinion(action, " ".join(reason.split())[:REASON_CHARS] if isinstance(reason, str) else "")
    if not may_change or not isinstance(body, dict):
        raise NonsenseError("it changes what it may not change, or into no object")
    return Opinion(action, body=orjson.dumps(body))
