"""The failure table: for each kind of failure whose fault it is, what it proves, and what the client gets.

Every response of the gate that is not a unit's own is a row of this table. Rules:
1. Only `Fault.UNIT` rows carry evidence; a client's or the gate's own failures never change a verdict.
2. What follows before the commit is the rule that a row names, of router/retry.py.
3. Bodies have OpenAI's error shape: {"error": {"message", "type", "param", "code"}}.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import orjson

from cellgate.router.nouns import Outcome, Strength
from cellgate.router.retry import ANSWERED, BUSY, ENDED, FINAL, LOST, NOT_CONNECTED, RetryRule


class Fault(Enum):
    """Whose fault a failure is."""

    CLIENT = "client"
    GATE = "gate"
    UNIT = "unit"


@dataclass(frozen=True, slots=True)
class FailureRow:
    """One row. `strength` None means neutral; `retry` is what follows before the commit.

    `is_final`: a retry would get the same answer, and the client is told not to retry.
    """

    fault: Fault
    status: int
    type: str
    outcome: Outcome
    strength: Strength | None = None
    retry: RetryRule = FINAL
    closes: bool = False
    retry_after_s: int | None = None
    is_final: bool = False


_INVALID_REQUEST = "invalid_request_error"
_DOWN = "service_unavailable_error"


def _client(status: int, *, closes: bool = False, kind: str = _INVALID_REQUEST) -> FailureRow:
    return FailureRow(Fault.CLIENT, status, kind, Outcome.CLIENT_ERROR, closes=closes)


def _gate(status: int, retry: RetryRule = FINAL) -> FailureRow:
    kind = "rate_limit_error" if status == 429 else _DOWN
    return FailureRow(Fault.GATE, status, kind, Outcome.GATE_ERROR, retry=retry, retry_after_s=1)


def _unit(status: int, outcome: Outcome, strength: Strength | None, retry: RetryRule = LOST) -> FailureRow:
    return FailureRow(Fault.UNIT, status, _DOWN, outcome, strength, retry, retry_after_s=1)


class FailureKind(Enum):
    """Every way in which a request can fail. The value is the error code clients and metrics see."""

    # The client's.
    BAD_REQUEST = "bad_request"
    BAD_JSON = "bad_json"
    BAD_HEADER = "bad_header"
    DENIED = "denied"
    UNKNOWN_PATH = "unknown_path"
    UNKNOWN_MODEL = "unknown_model"
    NOT_SERVED = "not_served"
    RESPONSE_GONE = "response_gone"
    RESPONSE_AWAY = "response_away"
    RESPONSE_TAKEN = "response_taken"
    NOT_TRUSTED = "not_trusted"
    BAD_KEY = "invalid_api_key"
    KEY_EXPIRED = "key_expired"
    KEY_REVOKED = "key_revoked"
    MODEL_NOT_ALLOWED = "model_not_allowed"
    PRIORITY_NOT_ALLOWED = "priority_not_allowed"
    GUARDRAIL_DENIED = "guardrail_denied"
    GUARDRAIL_TOO_LARGE = "guardrail_too_large"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    METHOD_NOT_SUPPORTED = "method_not_supported"
    HEAD_TIMEOUT = "head_timeout"
    BODY_TIMEOUT = "body_timeout"
    SLOW_READER = "slow_reader"
    BODY_TOO_LARGE = "body_too_large"
    UNSUPPORTED_ENCODING = "unsupported_encoding"
    BAD_EXPECTATION = "bad_expectation"
    HEAD_TOO_LARGE = "head_too_large"
    # The gate's.
    FULL = "full"
    LATE = "late"
    LIMITED = "rate_limit_exceeded"
    OVER_BUDGET = "insufficient_quota"
    NO_UNIT = "no_unit"
    NO_MEMORY = "no_memory"
    NO_RESOURCES = "no_resources"
    UNKNOWN_NAME = "unknown_name"
    NO_CONTROL_PROCESS = "no_control_process"
    GUARDRAIL_FAILED = "guardrail_failed"
    EVICTED = "evicted"
    INTERNAL = "internal"
    POISON_SUSPECTED = "poison_suspected"
    # The unit's, before the commit.
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    CONNECT_TIMEOUT = "connect_timeout"
    STALE_CONNECTION = "stale_connection"
    CLOSED_EARLY = "closed_early"
    GARBAGE = "garbage"
    ANSWER_TIMEOUT = "answer_timeout"
    BUSY = "busy"
    MODEL_GONE = "model_gone"
    NOT_HERE = "not_here"
    FALSE_BUSY = "busy_without_work"
    UNIT_ERROR = "unit_error"
    FIRST_EVENT_ERROR = "first_event_error"
    TRANSFER_FAILED = "transfer_failed"
    PREFILL_LOST = "prefill_lost"
    # The unit's, after the commit.
    TRUNCATED = "truncated"
    STREAM_ERROR = "stream_error"
    ABORTED = "aborted"
    CUT = "cut"
    NOT_RESUMED = "not_continued"

    @property
    def row(self) -> FailureRow:
        return TABLE[self]


TABLE: dict[FailureKind, FailureRow] = {
    # The client's.
    FailureKind.BAD_REQUEST: _client(400, closes=True),
    FailureKind.BAD_JSON: _client(400),
    FailureKind.BAD_HEADER: _client(400),
    FailureKind.DENIED: _client(403, kind="permission_error"),
    FailureKind.UNKNOWN_PATH: _client(404, kind="not_found_error"),
    FailureKind.UNKNOWN_MODEL: _client(404, kind="not_found_error"),
    FailureKind.NOT_SERVED: _client(404, kind="not_found_error"),
    # What a request follows is on a unit that has left, or is down: no other unit knows that conversation.
    FailureKind.RESPONSE_GONE: _client(404, kind="not_found_error"),
    FailureKind.RESPONSE_AWAY: _client(409, kind="conflict_error"),
    # A unit would write it over another client's.
    FailureKind.RESPONSE_TAKEN: _client(409, kind="conflict_error"),
    # The client's stream is kept no more, or by another gate: a new answer would be another one.
    FailureKind.NOT_TRUSTED: _client(403, kind="permission_error"),
    FailureKind.BAD_KEY: _client(401, kind="authentication_error"),
    FailureKind.KEY_EXPIRED: _client(401, kind="authentication_error"),
    FailureKind.KEY_REVOKED: _client(401, kind="authentication_error"),
    FailureKind.MODEL_NOT_ALLOWED: _client(403, kind="permission_error"),
    FailureKind.PRIORITY_NOT_ALLOWED: _client(403, kind="permission_error"),
    FailureKind.GUARDRAIL_DENIED: _client(400),
    FailureKind.GUARDRAIL_TOO_LARGE: _client(413),
    FailureKind.METHOD_NOT_ALLOWED: _client(405),
    FailureKind.METHOD_NOT_SUPPORTED: _client(501, closes=True),
    FailureKind.HEAD_TIMEOUT: _client(408, closes=True),
    FailureKind.BODY_TIMEOUT: _client(408, closes=True),
    FailureKind.SLOW_READER: _client(408, closes=True),
    FailureKind.BODY_TOO_LARGE: _client(413, closes=True),
    FailureKind.UNSUPPORTED_ENCODING: _client(415),
    FailureKind.BAD_EXPECTATION: _client(417, closes=True),
    FailureKind.HEAD_TOO_LARGE: _client(431, closes=True),
    # The gate's.
    FailureKind.FULL: _gate(429),
    FailureKind.LATE: _gate(429),
    FailureKind.LIMITED: _gate(429),
    # OpenAI's name. Clients that retry would wait for days.
    FailureKind.OVER_BUDGET: FailureRow(
        Fault.GATE, 429, "insufficient_quota", Outcome.GATE_ERROR, retry_after_s=1, is_final=True
    ),
    FailureKind.NO_UNIT: _gate(503),
    FailureKind.NO_MEMORY: FailureRow(
        Fault.GATE, 503, _DOWN, Outcome.GATE_ERROR, closes=True, retry_after_s=1
    ),
    FailureKind.NO_RESOURCES: _gate(503, NOT_CONNECTED),
    # Nobody can say whether the unit works: readiness makes it suspect, and never more (probes/readiness.py).
    FailureKind.UNKNOWN_NAME: _gate(503, NOT_CONNECTED),
    FailureKind.NO_CONTROL_PROCESS: _gate(503),
    FailureKind.GUARDRAIL_FAILED: _gate(503),
    FailureKind.EVICTED: FailureRow(Fault.GATE, 503, _DOWN, Outcome.EVICTED, retry=LOST, retry_after_s=1),
    FailureKind.INTERNAL: FailureRow(
        Fault.GATE, 500, "internal_server_error", Outcome.GATE_ERROR, closes=True
    ),
    FailureKind.POISON_SUSPECTED: FailureRow(Fault.GATE, 502, _DOWN, Outcome.GATE_ERROR, is_final=True),
    # The unit's, before the commit.
    FailureKind.REFUSED: _unit(503, Outcome.UNIT_ERROR, Strength.FATAL),
    FailureKind.UNREACHABLE: _unit(503, Outcome.UNIT_ERROR, Strength.STRONG),
    FailureKind.CONNECT_TIMEOUT: _unit(504, Outcome.UNIT_ERROR, Strength.STRONG),
    FailureKind.STALE_CONNECTION: _unit(502, Outcome.UNIT_ERROR, None),
    FailureKind.CLOSED_EARLY: _unit(502, Outcome.UNIT_ERROR, Strength.STRONG),
    FailureKind.GARBAGE: _unit(502, Outcome.UNIT_ERROR, Strength.WEAK, ANSWERED),
    # Another try would take as long.
    FailureKind.ANSWER_TIMEOUT: FailureRow(
        Fault.UNIT, 504, _DOWN, Outcome.UNIT_ERROR, Strength.STRONG, LOST, is_final=True
    ),
    FailureKind.BUSY: _unit(503, Outcome.BUSY, None, BUSY),
    # Without another unit the client gets the unit's own 404.
    FailureKind.MODEL_GONE: _unit(503, Outcome.CLIENT_ERROR, None, ANSWERED),
    # From the gate in front of the unit (see request/placement.py).
    FailureKind.NOT_HERE: _unit(503, Outcome.BUSY, Strength.STRONG),
    FailureKind.FALSE_BUSY: _unit(503, Outcome.UNIT_ERROR, Strength.STRONG, ANSWERED),
    FailureKind.UNIT_ERROR: _unit(502, Outcome.UNIT_ERROR, Strength.WEAK, ANSWERED),
    FailureKind.FIRST_EVENT_ERROR: _unit(502, Outcome.STREAM_ERROR, Strength.STRONG, ANSWERED),
    # Of a split request: the link has failed, or the unit that computes its prompt; not the decoder.
    FailureKind.TRANSFER_FAILED: _unit(503, Outcome.EVICTED, None, ENDED),
    FailureKind.PREFILL_LOST: _unit(503, Outcome.EVICTED, None, ENDED),
    # Before or after the commit: an engine that is paused may end its requests, and is not sick.
    FailureKind.ABORTED: _unit(503, Outcome.EVICTED, None, ENDED),
    # The unit's, after the commit.
    FailureKind.TRUNCATED: FailureRow(Fault.UNIT, 502, _DOWN, Outcome.TRUNCATED, Strength.STRONG),
    FailureKind.STREAM_ERROR: FailureRow(Fault.UNIT, 502, _DOWN, Outcome.STREAM_ERROR, Strength.STRONG),
    FailureKind.CUT: FailureRow(Fault.UNIT, 503, _DOWN, Outcome.EVICTED),
    FailureKind.NOT_RESUMED: FailureRow(Fault.UNIT, 502, _DOWN, Outcome.EVICTED),
}
UNCHARGED = (FailureKind.LIMITED, FailureKind.OVER_BUDGET, FailureKind.NO_CONTROL_PROCESS)
"""A request that fails like this was charged nothing, so nothing is given back."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure: its kind, and a sentence for the person who has to act.

    `retry_after_s` replaces the value of the row; `lines` are more header lines of the answer. `used_up`
    names a limit of which its key, or the tenant of that, has nothing left at all. `taken`: of a stale
    connection, the unit may have had the request.
    """

    kind: FailureKind
    message: str
    param: str | None = None
    retry_after_s: int | None = None
    lines: bytes = b""
    used_up: str = ""
    taken: bool = False


def error_body(failure: Failure) -> bytes:
    """The JSON body for a failure, in OpenAI's error shape."""
    error = {
        "message": failure.message,
        "type": failure.kind.row.type,
        "param": failure.param,
        "code": failure.kind.value,
    }
    return orjson.dumps({"error": error})


def for_client(failure: Failure, unit: str, *, committed: bool) -> Failure:
    """A unit's failure for the client: which unit, in which phase, where to read more; but no address."""
    phase = "in the middle of its answer" if committed else "before it answered"
    message = (
        f"unit {unit} failed {phase} ({failure.kind.value}); see /units and /events on the gate's admin port"
    )
    return Failure(failure.kind, message)


# How each API spells an error: as the body of a response, and as the event that ends a stream. Pure.
#
# OpenAI's shape is above; it is the shape of every path that is not here.
# https://docs.anthropic.com/en/api/errors, https://platform.openai.com/docs/api-reference/responses-
# streaming/error


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """The errors of one API. An event gets the number that follows that of the last event of its stream."""

    body: Callable[[Failure], bytes]
    event: Callable[[Failure, int], bytes]


def _messages_body(failure: Failure) -> bytes:
    kind = _ANTHROPIC_TYPES.get(failure.kind.row.status, "invalid_request_error")
    error = {"type": kind, "message": failure.message, "code": failure.kind.value}
    return orjson.dumps({"type": "error", "error": error})


def _messages_event(failure: Failure, _number: int) -> bytes:
    return b"event: error\ndata: %b\n\n" % _messages_body(failure)


def _responses_event(failure: Failure, number: int) -> bytes:
    code, message = failure.kind.value, failure.message
    error = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": number}
    # OpenAI's clients raise an exception only if there is an object of this name.
    error |= orjson.loads(error_body(failure))
    return b"event: error\ndata: %b\n\n" % orjson.dumps(error)


def error_event(failure: Failure, _number: int = 0) -> bytes:
    """The SSE event that ends a stream with an error after the commit."""
    return b"data: " + error_body(failure) + b"\n\n"


OPENAI = ErrorShape(error_body, error_event)
_ERROR_SHAPES = {
    "messages": ErrorShape(_messages_body, _messages_event),
    "responses": ErrorShape(error_body, _responses_event),
}


def shape_of(route: str) -> ErrorShape:
    """The errors of a route (request/routes.py)."""
    return _ERROR_SHAPES.get(route, OPENAI)
