"""Reads a few fields of one JSON object of any size while its bytes pass, and keeps nothing else. Pure.

The object may be cut anywhere. Only what leads to one of `_FIELDS` is walked by name; all else is
skipped by counting brackets outside of strings, a block of bytes at a time. So a name that a client has put
into a text, a tool or a schema that its answer repeats is never taken for the engine's.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

ANY = "*"
"""In a place: each element of an array."""
FieldPath = tuple[str, ...]

_FIELDS: frozenset[FieldPath] = frozenset(
    (
        ("type",),
        ("error",),
        ("usage",),
        ("meta_info",),
        ("response", "usage"),
        ("message", "usage"),
        ("choices", ANY, "finish_reason"),
    )
)
"""What is read, unless it is null or a number: where OpenAI's and Anthropic's APIs say what an event is and
how an answer ends, and where they and SGLang tell what it took."""
_SPINE = frozenset(field[:length] for field in _FIELDS for length in range(len(field)))
VALUE_BYTES = 8192
"""A longer value is not read."""
_MARK = re.compile(rb'["{}\[\],]')
_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NO_MARKS = bytes(set(range(256)) - set(b'"{}[]'))
_BRACES = bytes.maketrans(b"[]", b"{}")
_PAIRS = tuple(b"{" * width + b"}" * width for width in (256, 64, 16, 4, 1))
"""What opens and closes within a block is taken out from the inside: in few rounds, even if it is nested a
thousand deep."""
_BLOCKS = (64, 512, 4096, 32768)
"""How much is skipped at once: more as long as the end is not in it, then less until it is found."""


class JsonSkim:
    """One object's. `fields` has what was found, by place; `is_over`: the object has ended, or is none."""

    def __init__(self) -> None:
        self._open: list[tuple[FieldPath, bool]] = []
        """The objects and arrays that are walked, and which of them are arrays."""
        self._depth = 0
        """How many are open in what is skipped."""
        self._in_string = self._escaped = self._is_key = False
        self._key = ""
        self._value: bytearray | None = None
        """What has come of a name or a value that is read."""
        self.fields: dict[FieldPath, Any] = {}
        self.is_over = False

    def feed(self, data: bytes) -> None:
        """The next bytes."""
        at, size = 0, len(data)
        while at < size and not self.is_over:
            if self._depth:
                at = self._skip(data, at)
            elif self._in_string:
                at = self._read_string(data, at)
            else:
                at = self._step(data, at)

    def document(self) -> dict[str, Any]:
        """The object with what was read of it."""
        found: dict[str, Any] = {}
        for (name, *rest), value in self.fields.items():
            if not rest:
                found[name] = value
            elif rest[0] == ANY:
                found[name] = [{rest[1]: value}]
            else:
                found[name] = {rest[0]: value}
        return found

    # -- what is walked ------------------------------------------------------------------------------------

    def _step(self, data: bytes, at: int) -> int:
        """Go on to the next mark: where behind it."""
        found = _MARK.search(data, at)
        if found is None:
            return len(data)
        mark = found[0]
        if not self._open:
            self.is_over = mark != b"{" or bool(data[at : found.start()].strip())
            self._enter((), is_array=False)
        elif mark == b'"':
            self._in_string = True
            self._value = bytearray(b'"') if self._is_key or self._place in _FIELDS else None
        elif mark == b",":
            self._is_key = not self._open[-1][1]
        elif mark in (b"{", b"["):
            place = self._place
            if place in _SPINE:
                self._enter(place, is_array=mark == b"[")
            else:
                self._depth = 1
                self._value = bytearray(mark) if place in _FIELDS else None
        else:
            self._open.pop()
            self.is_over = not self._open
        return found.end()

    @property
    def _place(self) -> FieldPath:
        """That of the next value."""
        place, is_array = self._open[-1]
        return (*place, ANY if is_array else self._key)

    def _enter(self, place: FieldPath, *, is_array: bool) -> None:
        self._open.append((place, is_array))
        self._is_key = not is_array

    def _read_string(self, data: bytes, at: int) -> int:
        """Go on to the end of a string: where behind it."""
        end = self._end_of_string(data, at)
        self._keep(data[at:end])
        if not self._in_string:
            text = self._taken()
            if self._is_key:
                self._key, self._is_key = text if isinstance(text, str) else "", False
            elif text is not None:
                self.fields[self._place] = text
        return end

    def _end_of_string(self, data: bytes, at: int) -> int:
        begin = at + self._escaped
        self._escaped = False
        if (found := _STRING.match(data, begin)) is not None:
            self._in_string = False
            return found.end()
        rest = data[begin:]
        self._escaped = bool((len(rest) - len(rest.rstrip(b"\\"))) % 2)
        return len(data)

    def _keep(self, part: bytes) -> None:
        if self._value is not None:
            self._value += part
            if len(self._value) > VALUE_BYTES:
                self._value = None

    def _taken(self) -> Any:
        """The value that was read; None: it is none, or too long."""
        value, self._value = self._value, None
        if value is None:
            return None
        try:
            # An event may have its object in several lines of data; a string has no line ends.
            return orjson.loads(value.replace(b"\ndata:", b"\n"))
        except orjson.JSONDecodeError:
            return None

    # -- what is skipped -----------------------------------------------------------------------------------

    def _skip(self, data: bytes, at: int) -> int:
        """Go on to the end of what is skipped: where behind it."""
        begin, level, is_found = at, 0, False
        while at < len(data) and self._depth:
            block = data[at : at + _BLOCKS[level]]
            ups, downs, *quotes = _brackets(block, self._in_string, self._escaped)
            if downs < self._depth:
                self._depth += ups - downs
                self._in_string, self._escaped = quotes
                at += len(block)
                level = level if is_found else min(level + 1, len(_BLOCKS) - 1)
            elif level:
                level, is_found = level - 1, True
            else:
                at = self._skip_marks(data, at)
        self._keep(data[begin:at])
        if not self._depth and (value := self._taken()) is not None:
            self.fields[self._place] = value
        return at

    def _skip_marks(self, data: bytes, at: int) -> int:
        """The same, in which the end is near."""
        while self._depth and at < len(data):
            if self._in_string:
                at = self._end_of_string(data, at)
                continue
            found = _MARK.search(data, at)
            if found is None:
                return len(data)
            self._in_string = found[0] == b'"'
            self._depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(found[0], 0)
            at = found.end()
        return at


def _brackets(block: bytes, in_string: bool, escaped: bool) -> tuple[int, int, bool, bool]:
    """How many levels a block opens that it does not close, and closes that it has not opened; and whether it
    ends in a string, behind a backslash. It begins in one if `in_string`.
    """
    block, escaped = block[escaped:], False
    if b"\\" in block:
        block = block.replace(rb"\\", b"")
        escaped = block.endswith(b"\\")
        block = block.replace(rb"\"", b"")
    # Two quotes with no bracket between them change nothing for any bracket.
    marks = block.translate(_BRACES, _NO_MARKS).replace(b'""', b"")
    parts = marks.split(b'"')
    braces = b"".join(parts[in_string::2])
    while b"{}" in braces:
        for pair in _PAIRS:
            braces = braces.replace(pair, b"")
    downs = braces.count(b"}")
    ups = len(braces) - downs
    return ups, downs, bool((len(parts) - 1 + in_string) % 2), escaped
