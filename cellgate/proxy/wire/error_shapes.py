"""How each API spells an error: as the body of a response, and as the event that ends a stream. Pure.

OpenAI's shape is in failure.py; it is the shape of every path that is not here.
https://docs.anthropic.com/en/api/errors, https://platform.openai.com/docs/api-reference/responses-streaming/error
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import orjson

from cellgate.proxy.wire.failure import Failure, error_body, error_event

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


def _plain_event(failure: Failure, _number: int) -> bytes:
    return error_event(failure)


OPENAI = ErrorShape(error_body, _plain_event)
_SHAPES = {
    "messages": ErrorShape(_messages_body, _messages_event),
    "responses": ErrorShape(error_body, _responses_event),
}


def shape_of(route: str) -> ErrorShape:
    """The errors of a route (request/routes.py)."""
    return _SHAPES.get(route, OPENAI)
