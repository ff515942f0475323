"""Server-sent events as bytes: where they end, which carry data, which are errors. Pure.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html. A line ends with LF, CRLF or CR, an
event with an empty line. Where CR is the last byte that has come, its line has ended: an LF that follows
still belongs to it, and stands in front of the next event like an empty line, which means nothing there.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from cellgate.probes.engines import object_of, parsed

WORKING = b": the unit is still working\n\n"
"""A comment that keeps a client's connection warm."""
BOM = b"\xef\xbb\xbf"
"""May precede the first event, and is not a part of it."""

_DATA = re.compile(rb"(?:^|[\r\n])data[:\r\n]")
# Engines report a failure under status 200 as an event whose object begins with a non-null "error".
_EVENT_ERROR = re.compile(rb'\s*\{\s*"error"\s*:(?!\s*null\b)')
_ERRORS = (b"error", b"response.failed")
"""Names of events that report a failure."""
_CLIENTS = re.compile(rb'"code"\s*:\s*"?4(?!29)\d\d\b')
_PREAMBLE = re.compile(
    rb"event: ?(?:message_start|ping|response\.(?:created|queued|in_progress))\s*$", re.MULTILINE
)
"""Events that engines send before they have computed anything."""
NO_STOP = b'{"stop_reason":null'
"""How vLLM's `/v1/messages` spells, at the end of a stream, that the answer was aborted."""
ABORT = b'"abort"'
"""Data without these bytes ends no answer that way. In a text the quotes would be escaped."""
_LINE_END = rb"(?:\n|\r\n?+)"
_EMPTY_LINES = re.compile(_LINE_END + _LINE_END + rb"+")
# Two line ends in a row have one of these in them; CR and LF are one.
_PAIRS_WITH_CR = (b"\n\r", b"\r\r")
_LINE_ENDS = (b"\n", b"\r")


def end_of_events(data: bytes, before: bytes = b"\n") -> int:
    """The offset behind the last complete event in `data`; 0 when none is complete.

    `before` is the byte before `data`: a line end where an event may begin.
    """
    end = data.rfind(b"\n\n") + 2
    if b"\r" in data:
        for pair in _PAIRS_WITH_CR:
            at = data.rfind(pair) + 2
            if at > 1:
                end = max(end, at + data.startswith(b"\n", at))
    if end > 1:
        return end
    # There may be an empty line at the very beginning.
    if before in _LINE_ENDS and data.startswith(_LINE_ENDS) and before + data[:1] != b"\r\n":
        return 1 + data.startswith(b"\r\n")
    return 0


def first_end(data: bytes, before: bytes) -> int:
    """The offset behind the event that `data`, behind the byte `before`, goes on with; 0: it has no end."""
    whole = before + data
    pairs = (b"\n\n", *_PAIRS_WITH_CR) if b"\r" in whole else (b"\n\n",)
    found = [at for pair in pairs if (at := whole.find(pair)) >= 0]
    if not found:
        return 0
    # Bytes are found much faster than the pattern, which has to see only where it matches: from the line end
    # of two bytes on whose second one is found.
    match = _EMPTY_LINES.search(whole, max(0, min(found) - 1))
    return match.end() - 1 if match else 0


def split(data: bytes) -> tuple[list[bytes], bytes]:
    """The complete events in `data`, each with the empty line that ends it, and what follows the last."""
    if b"\r" not in data and b"\n\n\n" not in data and not data.startswith(b"\n"):
        *events, tail = data.split(b"\n\n")
        return [event + b"\n\n" for event in events], tail
    end = end_of_events(data)
    if not end:
        return [], data
    start = len(data) - len(data.lstrip(b"\r\n")) if data.startswith(_LINE_ENDS) else 0
    ends = [match.end() for match in _EMPTY_LINES.finditer(data, start, end)] or [end]
    return [data[one:other] for one, other in pairwise([0, *ends])], data[end:]


def payload(event: bytes) -> bytes | None:
    """The data of one event; None when it has none (a comment)."""
    if event.startswith(b"data: ") and b"\n" not in event and b"\r" not in event:
        # Most have one line.
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line[:5] in (b"data:", b"data")]
    return b"\n".join(lines) if lines else None


def extra_field(event: bytes) -> str:
    """The name of a field beside `data` that changes the meaning of an event; empty when there is none."""
    for line in event.splitlines():
        name, _, value = line.partition(b":")
        if name == b"id" or (name == b"event" and value.strip() not in (b"", b"message")):
            return name.decode()
    return ""


def carries_data(data: bytes) -> bool:
    """True when `data` has a data line, which shows progress; comments (`:`) do not."""
    if data.startswith(b"data:"):
        return True
    # Finding bytes costs a tenth of the pattern, and most of what has no such line has neither of these.
    may = b"\ndata" in data or b"\rdata" in data or data.startswith(b"data")
    return may and _DATA.search(data) is not None


def is_preamble(data: bytes) -> bool:
    """Whether `data` has only events that engines send before they have computed anything."""
    return data.startswith(b"event:") and all(
        _PREAMBLE.search(event) is not None for event in split(data)[0] if carries_data(event)
    )


def repeats_request(event: bytes) -> bool:
    """Whether an event, a large one, begins as those that repeat what a client has sent."""
    return _PREAMBLE.match(event) is not None


def is_error(data: bytes) -> bool:
    """True when an event in `data` reports an engine's failure.

    False for an error whose `code` is 4xx: then the request is at fault.
    """
    return len(before_error(data)) < len(data)


def is_aborted(data: bytes) -> bool:
    """True when the engine has ended an answer on its own, such as for a pause: `data` is one event or a JSON
    body. What it repeats of the request says nothing.
    """
    if ABORT not in data and NO_STOP not in data:
        return False
    said = object_of(data if data.lstrip().startswith(b"{") else payload(data) or b"")
    if said is None:
        return False
    delta, choices = said.get("delta"), said.get("choices")
    if isinstance(delta, dict) and delta.get("stop_reason", "") is None:
        return True
    # OpenAI's API; engines' own ones.
    ends = [*(choices if isinstance(choices, list) else ()), said, said.get("details")]
    return any(isinstance(end, dict) and end.get("finish_reason") == "abort" for end in ends)


def before_error(data: bytes) -> bytes:
    """What comes before the first event that reports an engine's failure, or an answer that it aborted; all
    of `data` when none does.
    """
    if b"error" not in data and ABORT not in data and NO_STOP not in data:
        return data
    events, tail = split(data)
    end = 0
    for event in [*events, tail]:
        if _reports_error(event):
            return data[:end]
        end += len(event)
    return data


def tells_error(event: bytes) -> bool:
    """Whether one event tells an error, whoever's mistake it is."""
    if b"error" not in event:
        return False
    is_named = any(line[:6] == b"event:" and line[6:].strip() in _ERRORS for line in event.splitlines())
    return is_named or _EVENT_ERROR.match(payload(event) or b"") is not None


def _reports_error(event: bytes) -> bool:
    return is_aborted(event) or (tells_error(event) and _CLIENTS.search(payload(event) or b"") is None)


def without_comments(data: bytes) -> bytes:
    """`data` from its first event that carries data on, without the comments and empty lines before it."""
    if data.startswith(b"data:"):
        return data
    events, _ = split(data)
    start = 0
    for event in events:
        if carries_data(event):
            break
        start += len(event)
    return data[start:].lstrip(b"\r\n")


def message_of(data: bytes) -> str:
    """The first line of the first error event in `data`, shortened, for a person to read."""
    line = data[len(before_error(data)) :].strip().splitlines()[:1] or [data]
    return line[0][:200].decode("utf-8", "replace")


# Reads a few fields of one JSON object of any size while its bytes pass, and keeps nothing else. Pure.
#
# The object may be cut anywhere. Only what leads to one of `_EVENT_FIELDS` is walked by name; all else is
# skipped by counting brackets outside of strings, a block of bytes at a time. So a name that a client has put
# into a text, a tool or a schema that its answer repeats is never taken for the engine's.


ANY_FIELD = "*"
"""In a place: each element of an array."""
FieldPath = tuple[str, ...]

_EVENT_FIELDS: frozenset[FieldPath] = frozenset(
    (
        ("type",),
        ("error",),
        ("usage",),
        ("meta_info",),
        ("response", "usage"),
        ("message", "usage"),
        ("choices", ANY_FIELD, "finish_reason"),
    )
)
"""What is read, unless it is null or a number: where OpenAI's and Anthropic's APIs say what an event is and
how an answer ends, and where they and SGLang tell what it took."""
_SPINE = frozenset(field[:length] for field in _EVENT_FIELDS for length in range(len(field)))
VALUE_BYTES = 8192
"""A longer value is not read."""
_EVENT_MARK = re.compile(rb'["{}\[\],]')
_EVENT_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NO_MARKS = bytes(set(range(256)) - set(b'"{}[]'))
_BRACES = bytes.maketrans(b"[]", b"{}")
_EVENT_PAIRS = tuple(b"{" * width + b"}" * width for width in (256, 64, 16, 4, 1))
"""What opens and closes within a block is taken out from the inside: in few rounds, even if it is nested a
thousand deep."""
_EVENT_BLOCKS = (64, 512, 4096, 32768)
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
            elif rest[0] == ANY_FIELD:
                found[name] = [{rest[1]: value}]
            else:
                found[name] = {rest[0]: value}
        return found

    # -- what is walked ------------------------------------------------------------------------------------

    def _step(self, data: bytes, at: int) -> int:
        """Go on to the next mark: where behind it."""
        found = _EVENT_MARK.search(data, at)
        if found is None:
            return len(data)
        mark = found[0]
        if not self._open:
            self.is_over = mark != b"{" or bool(data[at : found.start()].strip())
            self._enter((), is_array=False)
        elif mark == b'"':
            self._in_string = True
            self._value = bytearray(b'"') if self._is_key or self._place in _EVENT_FIELDS else None
        elif mark == b",":
            self._is_key = not self._open[-1][1]
        elif mark in (b"{", b"["):
            place = self._place
            if place in _SPINE:
                self._enter(place, is_array=mark == b"[")
            else:
                self._depth = 1
                self._value = bytearray(mark) if place in _EVENT_FIELDS else None
        else:
            self._open.pop()
            self.is_over = not self._open
        return found.end()

    @property
    def _place(self) -> FieldPath:
        """That of the next value."""
        place, is_array = self._open[-1]
        return (*place, ANY_FIELD if is_array else self._key)

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
        if (found := _EVENT_STRING.match(data, begin)) is not None:
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
        # An event may have its object in several lines of data; a string has no line ends.
        return None if value is None else parsed(value.replace(b"\ndata:", b"\n"))

    # -- what is skipped -----------------------------------------------------------------------------------

    def _skip(self, data: bytes, at: int) -> int:
        """Go on to the end of what is skipped: where behind it."""
        begin, level, is_found = at, 0, False
        while at < len(data) and self._depth:
            block = data[at : at + _EVENT_BLOCKS[level]]
            ups, downs, *quotes = _brackets(block, self._in_string, self._escaped)
            if downs < self._depth:
                self._depth += ups - downs
                self._in_string, self._escaped = quotes
                at += len(block)
                level = level if is_found else min(level + 1, len(_EVENT_BLOCKS) - 1)
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
            found = _EVENT_MARK.search(data, at)
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
        for pair in _EVENT_PAIRS:
            braces = braces.replace(pair, b"")
    downs = braces.count(b"}")
    ups = len(braces) - downs
    return ups, downs, bool((len(parts) - 1 + in_string) % 2), escaped
