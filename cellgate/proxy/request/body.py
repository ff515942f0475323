"""Makes an Ask from a request. The body is parsed once, here and nowhere else."""

from __future__ import annotations

import codecs
import json
import re
from math import inf
from typing import Any

import orjson
from xxhash import xxh3_64_intdigest

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.request.answer_limits import limits_of
from cellgate.proxy.request.body_shape import BodyShape, new_shape, shapes
from cellgate.proxy.request.one_meaning import ONCE, models_beside, weighty_in, why_repeated, why_twofold
from cellgate.proxy.request.prompt import prompt_in
from cellgate.proxy.request.stored_objects import named_object
from cellgate.proxy.resume.streams import WAYS
from cellgate.router.nouns import Ask

BYTES_PER_TOKEN = 4
SPLIT_ROUTES = ("chat", "completions")
"""Paths of which engines take a prompt that another one has computed."""
_LOOKED_AT_BYTES = 1 << 20
_MARKS = b",[{"
"""One of these precedes each value except the first: parsing takes time and memory in proportion to them."""
_COUNTED_BYTES = 65536
_FEW_STRINGS = 32
_BODY_NAME_CHARS = LIMITS.name_chars
_NO_PARTS: tuple[str | None, str, int, str | None, tuple[str, ...]] = (None, "", 0, None, ())
_BYTE_ORDER_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_NO_NUMBERS = (b"NaN", b"Infinity")
_HALVES = re.compile(r"\\u[dD][89a-fA-F]")
_NOT_READ = object()
_BACKSLASH = ord("\\")
_BODY_NO_MARKS = bytes(set(range(256)) - set(_MARKS + b'"'))
_new = tuple.__new__
"""What the constructor of a named tuple calls, in a third of the time."""


def is_large(body: bytes) -> bool:
    """Whether it must be parsed in another process, because parsing would block all streams."""
    if len(body) <= LIMITS.json_nodes_on_loop:
        return False
    return len(body) > LIMITS.json_bytes_on_loop or has_more_nodes(body, LIMITS.json_nodes_on_loop)


def has_more_nodes(body: bytes, limit: int) -> bool:
    """Whether JSON has more than `limit` values, known without parsing it."""
    if len(body) <= _COUNTED_BYTES:
        # Most are told by this, in a few microseconds.
        if body.count(b",") + body.count(b"[") + body.count(b"{") <= limit:
            return False
    elif _is_text(body, limit) or _marks(body) <= limit:
        return False
    # Marks inside strings do not count, so strings are removed first.
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _BODY_NO_MARKS)
    # A value has at most one key, so there are at most two strings for each value.
    if bare.count(b'"') > 4 * (limit + 1):
        return True
    return sum(map(len, bare.split(b'"')[::2])) > limit


def read_large_ask(body: bytes, route: str = "") -> Ask | Failure:
    """`read_ask` for a body of any size, off the loop. A body with too many values is refused unparsed. In
    place of a route, ONCE only asks whether a field is there twice.
    """
    if route == ONCE:
        return why_repeated(body) or Ask()
    if has_more_nodes(body, LIMITS.json_nodes):
        reached("json_nodes")
        return Failure(FailureKind.BAD_JSON, f"the body has more than {LIMITS.json_nodes} values")
    return read_ask(body, route)


def read_ask(body: bytes, route: str = "", payer: str = "") -> Ask | Failure:
    """What a JSON body asks for, or what is wrong with it (the position is named where there is one).

    Only streams of a known `route` can be resumed. `payer` is who pays for it, if that is known.
    """
    try:
        data: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        data = _as_python(body)
        if data is _NOT_READ:
            return _unreadable(error)
        if isinstance(data, dict):
            text = body.decode(json.detect_encoding(body)).encode("utf-8", "surrogatepass")
            if (failure := why_twofold(tuple(data), text)) is not None:
                return failure
    if not isinstance(data, dict):
        return Failure(FailureKind.BAD_JSON, f"the body must be a JSON object, not {_kind_of(data)}")
    model = data.get("model")
    if (type(model) is not str or len(model) > _BODY_NAME_CHARS) and model is not None:
        return _no_model(model)
    names = tuple(data)
    shape = shapes.get(names) or new_shape(names)
    # More of a kind than stand at its top, or one in other letters: it is looked at again.
    if len(weighty_in(body)) > shape.weighty:
        failure = why_twofold(names, body)
        if failure is not None:
            return failure
    return ask_of(model, data, shape, prompt_in(data, shape, body), route, payer)


def ask_of(
    model: str | None,
    data: dict[str, Any],
    shape: BodyShape,
    prompt: tuple[tuple[int, ...], int, int],
    route: str,
    payer: str,
) -> Ask:
    """What a parsed body asks for, whose prompt is known."""
    blocks, size, fingerprint = prompt
    follows, session, priority, wanted_id, beside = _personal(data) if shape.is_personal else _NO_PARTS
    limit: Any = 0
    answers = 1
    if name := shape.limit:
        limit = data[name]
    if shape.multiplies or (limit and (type(limit) is not int or route not in shape.limit_routes)):
        limit, answers = limits_of(data, route)
    stream = data.get("stream") is True
    ask = (
        model,
        stream,
        size // BYTES_PER_TOKEN,
        None,
        follows,
        size,
        blocks,
        session,
        "",
        priority,
        inf,
        WAYS[route](data) if stream and route in WAYS else 0,
        fingerprint,
        limit if limit and limit > 0 else 0,
        None,
        route in SPLIT_ROUTES,
        answers,
        wanted_id,
        beside,
        route,
        payer,
    )
    return _new(Ask, ask)


def _as_python(body: bytes) -> Any:
    """JSON as Python's own parser takes it, which engines use: with a mark of its encoding, in UTF-16 or
    UTF-32, with numbers that are none. _NOT_READ: it is none of these.
    """
    if not (
        body.startswith(_BYTE_ORDER_MARKS) or b"\0" in body[:4] or any(name in body for name in _NO_NUMBERS)
    ):
        return _NOT_READ
    try:
        text = body.decode(json.detect_encoding(body))
        data = json.loads(text)
        # Half a character in an escape, which engines refuse as text, and which cannot be hashed.
        if _HALVES.search(text):
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return _NOT_READ
    return data


def _no_model(model: object) -> Failure:
    """Why this cannot be the name of a model."""
    reason = f"`model` must be a string, not {_kind_of(model)}"
    if isinstance(model, str):
        reached("name_chars")
        reason = f"`model` is longer than {LIMITS.name_chars} characters"
    return Failure(FailureKind.BAD_JSON, reason, param="model")


def _personal(data: dict[str, Any]) -> tuple[str | None, str, int, str | None, tuple[str, ...]]:
    """The response that it follows, its session, its priority, what its client calls it, and other models."""
    session, priority, wanted_id = data.get("prompt_cache_key"), data.get("priority"), data.get("request_id")
    if not (session and isinstance(session, str)):
        session = data.get("user")
    return (
        _followed(data),
        session[: LIMITS.name_chars] if isinstance(session, str) else "",
        0 if priority is None else priority if isinstance(priority, int) else _engines_integer(priority),
        wanted_id if isinstance(wanted_id, str) and len(wanted_id) <= LIMITS.name_chars else None,
        models_beside(data),
    )


def _followed(data: dict[str, Any]) -> str | None:
    """The response, conversation or file that it follows; None: none, or its name is too long for one."""
    follows = data.get("previous_response_id") or data.get("conversation") or data.get("input_file_id")
    if isinstance(follows, dict):
        follows = follows.get("id")
    return follows if isinstance(follows, str) and len(follows) <= LIMITS.name_chars else None


def _engines_integer(value: object) -> int:
    """What engines take this for where an integer belongs (pydantic reads "-1" and -1.0 as -1).

    0: they refuse it.
    """
    try:
        number = float(value) if isinstance(value, (str, float)) else 0.0
    except ValueError:
        return 0
    return int(number) if number.is_integer() else 0


def _is_text(body: bytes, limit: int) -> bool:
    """Whether all but `limit` bytes of a body are a few long strings, which is seen in a tenth of the time
    that counting marks takes. False if that is not sure.
    """
    at = 0
    for _ in range(_FEW_STRINGS):
        begin = body.find(b'"', at)
        if begin < 0:
            # Each value is a string, or takes a byte outside of strings.
            return limit >= _FEW_STRINGS + len(body) - at
        limit -= begin - at
        at = body.find(b'"', begin + 1) + 1
        if not at or body[at - 2] == _BACKSLASH:
            return False
    return False


def _marks(body: bytes) -> int:
    return len(body) - len(body.translate(None, _MARKS))


def _unreadable(error: orjson.JSONDecodeError) -> Failure:
    what, where = error.msg, f"line {error.lineno} column {error.colno} (char {error.pos})"
    if what.startswith("depth limit"):
        reached("json_depth")
        what = f"more than {LIMITS.json_depth} objects and arrays within each other"
    return Failure(FailureKind.BAD_JSON, f"the body is not valid JSON: {what} at {where}")


def plain_ask(target: bytes, body: bytes) -> Ask:
    """The ask of a request without JSON; only the beginning of its body is used."""
    return Ask(fingerprint=xxh3_64_intdigest(target + b"\0" + body[:_LOOKED_AT_BYTES], len(body)))


def stored_ask(path: bytes) -> Ask:
    """The ask of `/v1/responses/{id}` and the paths below it: bound to the unit that made that response."""
    return Ask(unit="", follows=named_object(path) or "")


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
