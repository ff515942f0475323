"""Classifies a unit's reply by its status: an answer for the client, or a failure that is retried first."""

from __future__ import annotations

from re import compile as pattern
from typing import NamedTuple

from cellgate.proxy.request.placement import gate_refusal, is_final
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.proxy.wire.reply_reader import ReplyHead
from cellgate.router.nouns import Outcome
from cellgate.router.unit_state import UnitState

_OK = Outcome.OK
_BUSY = (429, 503)
_RESPONSE_ID = pattern(rb'"id"\s*:\s*"(resp_[^"]{1,200})"')
# The body of engines on FastAPI for an unknown path; clients get OpenAI's error shape with a reason instead.
NO_SUCH_PATH = b'{"detail":"Not Found"}'
NO_PATH = "404, it does not serve this path"
"""What is wrong with that answer. Units of a mixed fleet give it: that is no fault of a unit."""


class Doubt(NamedTuple):
    """What one unit has answered, to be shown where no other has a better answer. `head` None: that was
    nothing that could be shown.
    """

    unit: str
    what: str
    head: ReplyHead | None
    own_lines: bytes
    body: bytes
    status: int


def failure_of(head: ReplyHead, state: UnitState, now: float) -> Failure | None:
    """The failure of a busy or failing unit; None: the reply is for the client."""
    status = head.status
    if (status < 500 and status != 429) or is_final(status, head.fields):
        return None
    kind = gate_refusal(status, head.fields)
    if kind is None:
        kind = FailureKind.BUSY if status in _BUSY else FailureKind.UNIT_ERROR
        if status == 503 and state.is_falsely_busy(now):
            kind = FailureKind.FALSE_BUSY
    return Failure(kind, f"unit {state.unit.name} answered {status}")


def outcome_of(status: int) -> Outcome:
    """The outcome of a complete reply."""
    if status < 400:
        return _OK
    if status in _BUSY:
        return Outcome.BUSY
    return Outcome.CLIENT_ERROR if status < 500 else Outcome.UNIT_ERROR


def response_id(body: bytes) -> str:
    """The id of the stored response that begins like this; empty: it has none."""
    found = _RESPONSE_ID.search(body)
    return found[1].decode("latin-1") if found is not None else ""
