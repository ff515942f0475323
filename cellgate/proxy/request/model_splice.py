"""Writes another model into a body of JSON that was parsed before. Pure.

Only the bytes of the name are replaced: to write the whole body anew would cost as much as the request, and
might change what its prompt cache knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice

import orjson

from cellgate.proxy.config.limits import LIMITS

_MODEL = re.compile(rb'"model"[ \t\r\n]*:[ \t\r\n]*("[^"\\]*(?:\\.[^"\\]*)*")', re.DOTALL)
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)
_OPENS, _CLOSES = b"{[", b"}]"
_BACKSLASH = ord("\\")
_MENTIONS_MAX = 1000
"""So many models are looked at. A request has one; more are in what it quotes."""
_TOKENS_MAX = 20_000
"""So many strings and brackets are read to find the outermost one: about 5 ms."""

Span = tuple[int, int]


def with_model(body: bytes, old: str, new: str) -> bytes | None:
    """`body`, a JSON object, with the model `new` instead of `old`. None: it was not found, because it stands
    in the middle of a large body, behind too much else, or its key is written in an unusual way.
    """
    window = LIMITS.model_search_bytes
    spans, is_whole = _spans(body, 0, window, old)
    if len(spans) > 1 or not is_whole or len(body) > window:
        spans, is_read = _outermost(body, spans)
        is_whole = is_whole and is_read
    # What was not looked at may have it: then what stands at the end may be a mention of it.
    if not spans and is_whole and len(body) > window:
        spans, is_whole = _spans(body, max(window, len(body) - window), len(body), old)
        if len(spans) > 1 or not is_whole:
            return None
    if not spans:
        return None
    parts, at = [], 0
    for begin, end in spans:
        parts += [body[at:begin], orjson.dumps(new)]
        at = end
    return b"".join([*parts, body[at:]])


def _spans(body: bytes, begin: int, end: int, name: str) -> tuple[list[Span], bool]:
    """Where the name stands as the value of a key `model`, at whatever depth; and whether all were looked
    at.
    """
    found: list[Span] = []
    seen = 0
    for match in islice(_MODEL.finditer(body, begin, end), _MENTIONS_MAX):
        seen += 1
        # After a backslash the quote is part of a string that ends in `model`.
        if body[match.start() - 1] != _BACKSLASH and orjson.loads(match[1]) == name:
            found.append(match.span(1))
    return found, seen < _MENTIONS_MAX


def _outermost(body: bytes, spans: Iterable[Span]) -> tuple[list[Span], bool]:
    """Those that belong to the outermost object, as far as the body is read: once, whatever stands in it.
    And whether it was read as far as the last of them.
    """
    found: list[Span] = []
    depth, at, left = 0, 0, _TOKENS_MAX
    for span in spans:
        for match in islice(_TOKEN.finditer(body, at, span[0]), left):
            mark = match[0]
            depth += (mark in _OPENS) - (mark in _CLOSES) if len(mark) == 1 else 0
            left -= 1
        if not left:
            return found, False
        at = span[0]
        if depth == 1:
            found.append(span)
    return found, True
