"""Writes another model into a body of JSON that was parsed before. Pure.

Only the bytes of the name are replaced: to write the whole body anew would cost as much as the request, and
might change what its prompt cache knows.
"""

from __future__ import annotations

import re

import orjson

from cellgate.proxy.config.limits import LIMITS

_MODEL = re.compile(rb'"model"[ \t\r\n]*:[ \t\r\n]*("(?:[^"\\]|\\.)*")', re.DOTALL)
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]]', re.DOTALL)
_OPENS, _CLOSES = b"{[", b"}]"
_BACKSLASH = ord("\\")

Span = tuple[int, int]


def with_model(body: bytes, old: str, new: str) -> bytes | None:
    """`body`, a JSON object, with the model `new` instead of `old`. None: it was not found, because it stands
    in the middle of a large body, or its key is written in an unusual way.
    """
    window = LIMITS.model_search_bytes
    spans = _spans(body, 0, window, old)
    if len(spans) > 1 or len(body) > window:
        spans = [span for span in spans if _is_outermost(body, span[0])]
    if not spans and len(body) > window:
        spans = _spans(body, max(window, len(body) - window), len(body), old)
        if len(spans) > 1:
            return None
    if not spans:
        return None
    parts, at = [], 0
    for begin, end in spans:
        parts += [body[at:begin], orjson.dumps(new)]
        at = end
    return b"".join([*parts, body[at:]])


def _spans(body: bytes, begin: int, end: int, name: str) -> list[Span]:
    """Where the name stands as the value of a key `model`, at whatever depth."""
    found = []
    for match in _MODEL.finditer(body, begin, end):
        # After a backslash the quote is part of a string that ends in `model`.
        if body[match.start() - 1] != _BACKSLASH and orjson.loads(match[1]) == name:
            found.append(match.span(1))
    return found


def _is_outermost(body: bytes, at: int) -> bool:
    """Whether what stands there belongs to the outermost object."""
    depth = 0
    for match in _TOKEN.finditer(body, 0, at):
        mark = match[0]
        depth += (mark in _OPENS) - (mark in _CLOSES) if len(mark) == 1 else 0
    return depth == 1
