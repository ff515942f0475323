"""What a load wants to know of the API that it asks: its model, and how often the gate had to move a
request.
"""

from __future__ import annotations

import orjson

from loadtests.kit.gate import metric_sum
from loadtests.load.seen import RESUMED
from loadtests.wire.blocking import fetch
from loadtests.wire.messages import bearer


class TargetError(Exception):
    """The API cannot be asked: why, and what to do, in one line."""


def first_model(url: str, api_key: str) -> str:
    """The first of `/v1/models`. Raises TargetError."""
    try:
        reply = fetch(f"{url.rstrip('/')}/v1/models", lines=bearer(api_key))
    except OSError as error:
        raise TargetError(
            f"{url} does not answer ({error}): is it the address of an OpenAI-compatible API?"
        ) from error
    if reply.status in (401, 403):
        raise TargetError(f"{url}/v1/models is refused with {reply.status}: give --api-key")
    try:
        return str(orjson.loads(reply.body)["data"][0]["id"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        found = f"status {reply.status}: {reply.body[:80]!r}"
        raise TargetError(f"{url}/v1/models names no model ({found}): give --model") from None


def failovers(admin: str) -> int | None:
    """Requests that the gate has moved to another unit so far, and streams that it has resumed; None: there
    is no admin port, or it does not answer.
    """
    if not admin:
        return None
    try:
        reply = fetch(f"{admin.rstrip('/')}/metrics")
    except OSError:
        return None
    text = reply.body.decode()
    resumed = sum(metric_sum(text, "cellgate_continuations_total", f'result="{how}"') for how in RESUMED)
    return int(metric_sum(text, "cellgate_retries_total") + resumed) if reply.status == 200 else None
