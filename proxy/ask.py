"""From a request to an Ask: the body is parsed once, here, and nowhere else."""

from __future__ import annotations

from math import inf
from typing import Any

import orjson

from proxy.failure import Failure, Kind
from proxy.prompt import read_prompt
from proxy.stream.eligible import why_not
from router.nouns import Ask

LARGE_BYTES = 1 << 20
"""Bodies above this are parsed off the loop: a parse of a megabyte stalls every stream by a millisecond."""

_BYTES_PER_TOKEN = 4
_new = tuple.__new__
"""What a named tuple's own constructor calls, in a third of the time."""


def read_ask(body: bytes) -> Ask | Failure:
    """What a JSON body asks for, or what is wrong with it (the position is named where there is one)."""
    try:
        data: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno} (char {error.pos})"
        return Failure(Kind.BAD_JSON, f"the body is not valid JSON: {error.msg} at {where}")
    if not isinstance(data, dict):
        return Failure(Kind.BAD_JSON, f"the body must be a JSON object, not {_kind_of(data)}")
    model = data.get("model")
    if model is not None and not isinstance(model, str):
        return Failure(Kind.BAD_JSON, f"`model` must be a string, not {_kind_of(model)}", param="model")
    follows, user, priority = data.get("previous_response_id"), data.get("user"), data.get("priority")
    blocks, size, fingerprint = read_prompt(data)
    stream = data.get("stream") is True
    ask = (
        model,
        stream,
        size // _BYTES_PER_TOKEN,
        None,
        follows if isinstance(follows, str) else None,
        size,
        blocks,
        user if isinstance(user, str) else "",
        "",
        # Whether it is one that the engine understands is for the engine to say.
        priority if isinstance(priority, int) else 0,
        inf,
        stream and not why_not(data, chat="messages" in data),
        fingerprint,
    )
    return _new(Ask, ask)


def _kind_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"
