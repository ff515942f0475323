"""Kinds of nonsense: what a unit answers at once to each generation, whatever was asked.

Each kind is data: a status, a type, a body, for a whole answer and for a stream. A stream may go on with the
same event for ever. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

EVERY_S = 0.02
"""How often an event that is repeated for ever comes."""
JSON, EVENTS, HTML = "application/json", "text/event-stream; charset=utf-8", "text/html; charset=utf-8"
WHOLE_TOKENS = 400
"""How often a whole answer says the same token."""


@dataclass(frozen=True, slots=True)
class Nonsense:
    """One answer. `repeated`: what comes after the body again and again, and the answer never ends."""

    status: int = 200
    content_type: str = JSON
    body: bytes = b""
    repeated: bytes = b""


@dataclass(frozen=True, slots=True)
class Kind:
    """What it is to a request for a whole answer, and to one for a stream."""

    whole: Nonsense
    stream: Nonsense


_NONE: Mapping[str, object] = {}
_HEAD = {"id": "chatcmpl-1", "created": 1, "model": "tiny"}
_DONE = b"data: [DONE]\n\n"
_PAGE = b"<!DOCTYPE html><html><head><title>Welcome</title></head><body>It works!</body></html>"
_STATUSES = {
    400: "no chat template is set",
    401: "Unauthorized",
    402: "payment required",
    403: "forbidden",
    404: "The model `tiny` does not exist.",
    405: "Method Not Allowed",
    410: "gone",
    413: "the request is too large",
    415: "unsupported media type",
    422: "validation error",
    451: "not for you",
}


def _event(data: object) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _said(
    text: str | None, finish: str | None = "stop", more: Mapping[str, object] = _NONE
) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "text": text or ""}
    return _HEAD | {"object": "chat.completion", "choices": [choice | {"finish_reason": finish}]} | dict(more)


def _delta(delta: dict[str, object], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "text": delta.get("content", ""), "finish_reason": finish}
    return _event(_HEAD | {"object": "chat.completion.chunk", "choices": [choice]})


def _same(status: int = 200, content_type: str = JSON, body: bytes = b"") -> Kind:
    answer = Nonsense(status, content_type, body)
    return Kind(answer, answer)


def _both(whole: object, stream: bytes, repeated: bytes = b"") -> Kind:
    return Kind(Nonsense(body=orjson.dumps(whole)), Nonsense(200, EVENTS, stream, repeated))


def _refused(status: int) -> Kind:
    error = {"message": _STATUSES[status], "type": "BadRequestError", "param": None, "code": status}
    return _same(status, JSON, orjson.dumps({"error": error}))


_ROLE = _delta({"role": "assistant", "content": ""})
_CUDA = {"error": "CUDA error: device-side assert triggered"}
_CODED = {"error": {"message": "CUDA error: out of memory", "type": "internal_error", "code": "cuda_error"}}
_USED: dict[str, object] = {"usage": {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4}}

KINDS: Mapping[str, Kind] = {
    **{f"status_{status}": _refused(status) for status in _STATUSES},
    "no_path": _same(404, JSON, b'{"detail":"Not Found"}'),
    "error_json": _same(200, JSON, orjson.dumps(_CUDA)),
    "error_event": _both(_CODED, _event(_CODED)),
    "html": _same(200, HTML, _PAGE),
    "html_as_json": _same(200, JSON, _PAGE),
    "plain_text": _same(200, "text/plain", b"OK"),
    "empty_body": _same(200, JSON, b""),
    "binary": _same(200, "application/octet-stream", bytes(range(256))),
    "null": _same(200, JSON, b"null"),
    "empty_array": _same(200, JSON, b"[]"),
    "empty_object": _same(200, JSON, b"{}"),
    "cut_json": _same(200, JSON, orjson.dumps(_said("Hello there"))[:-40]),
    "no_choices": _both(_HEAD | {"choices": []}, _event(_HEAD | {"choices": []}) + _DONE),
    "null_content": _both(_said(None), _delta({"role": "assistant", "content": None}, "stop") + _DONE),
    "nothing_said": _both(_said("", more=_USED), _ROLE + _delta({}, "stop") + _DONE),
    "done_at_once": _both(_said("", more=_USED), _DONE),
    "other_object": _same(200, JSON, orjson.dumps({"object": "list", "data": [{"id": "tiny"}]})),
    "whole_for_stream": _same(200, JSON, orjson.dumps(_said(""))),
    "stream_for_whole": _same(200, EVENTS, _ROLE + _delta({}, "stop") + _DONE),
    "empty_deltas": _both(_said(""), _ROLE, _delta({"content": ""})),
    "comments_only": _both(_said(""), b"", b": ping\n\n"),
    "same_token": _both(_said("the " * WHOLE_TOKENS), _ROLE, _delta({"content": "the "})),
}
"""Every kind by its name."""


def answer_of(kind: str, *, stream: bool) -> Nonsense:
    """What a kind answers. Raises KeyError."""
    return KINDS[kind].stream if stream else KINDS[kind].whole
