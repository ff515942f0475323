"""Server-sent events as bytes: where they end, which carry data, which are errors. Pure.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html. A line ends with LF, CRLF or CR, an
event with an empty line. Where CR is the last byte that has come, its line has ended: an LF that follows
still belongs to it, and stands in front of the next event like an empty line, which means nothing there.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import orjson

WORKING = b": the unit is still working\n\n"
"""A comment that keeps a client's connection warm."""
BOM = b"\xef\xbb\xbf"
"""May precede the first event, and is not a part of it."""

_DATA = re.compile(rb"(?:^|[\r\n])data[:\r\n]")
# Engines report a failure under status 200 as an event whose object begins with a non-null "error".
_ERROR = re.compile(rb'\s*\{\s*"error"\s*:(?!\s*null\b)')
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
    try:
        said: Any = orjson.loads(data if data.lstrip().startswith(b"{") else payload(data) or b"")
    except orjson.JSONDecodeError:
        return False
    if not isinstance(said, dict):
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


def _reports_error(event: bytes) -> bool:
    if is_aborted(event):
        return True
    if b"error" not in event:
        return False
    data = payload(event) or b""
    is_named = any(line[:6] == b"event:" and line[6:].strip() in _ERRORS for line in event.splitlines())
    return (is_named or _ERROR.match(data) is not None) and _CLIENTS.search(data) is None


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
