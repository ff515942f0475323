"""Server-sent events as bytes: where they end, which carry data, which are errors. Pure.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html. Engines end events with an empty line,
LF or CRLF; a lone CR as line end is legal, seen nowhere, and only delays the commit of such a stream.
"""

from __future__ import annotations

import re

_DATA = re.compile(rb"(?:^|\n)data:")
# Engines report a failure under status 200 as an event whose object begins with a non-null "error".
_ERROR = re.compile(rb'(?:^|\n)data:\s*\{\s*"error"\s*:(?!\s*null\b)|(?:^|\n)event:\s*error\b')
_CLIENTS = re.compile(rb'"code"\s*:\s*"?4(?!29)\d\d\b')
_EVENT_END = re.compile(rb"\r?\n\r?\n")


def end_of_events(data: bytes) -> int:
    """The offset behind the last complete event in `data`; 0 when none is complete."""
    lf, crlf = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
    return max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)


def carries_data(data: bytes) -> bool:
    """True when any line of `data` is a data line: work was done, unlike for a `:` comment."""
    return data.startswith(b"data:") or _DATA.search(data) is not None


def is_error(data: bytes) -> bool:
    """True when an event in `data` reports an engine's failure.

    False for an error whose `code` is 4xx: that one says that the request is at fault.
    """
    if b"error" not in data:
        return False
    match = _ERROR.search(data)
    return match is not None and _CLIENTS.search(data, match.start()) is None


def split(data: bytes) -> tuple[list[bytes], bytes]:
    """The complete events in `data`, each with the empty line that ends it, and what follows the last."""
    if b"\r" not in data:
        *events, tail = data.split(b"\n\n")
        return [event + b"\n\n" for event in events], tail
    events, start = [], 0
    for match in _EVENT_END.finditer(data):
        events.append(data[start : match.end()])
        start = match.end()
    return events, data[start:]


def payload(event: bytes) -> bytes | None:
    """What the data lines of one event carry; None when it has none (a comment)."""
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def before_error(data: bytes) -> bytes:
    """What comes before the first event that reports an engine's failure; all of `data` when none does."""
    if b"error" not in data:
        return data
    events, tail = split(data)
    end = 0
    for event in [*events, tail]:
        if is_error(event):
            return data[:end]
        end += len(event)
    return data


def without_comments(data: bytes) -> bytes:
    """`data` from its first event that carries data on; complete events before it (comments) are dropped."""
    start = 0
    for match in _EVENT_END.finditer(data):
        if carries_data(data[start : match.end()]):
            return data[start:]
        start = match.end()
    return data[start:]


def message_of(data: bytes) -> str:
    """The first line of an error event, shortened, for a person to read."""
    match = _ERROR.search(data)
    line = data[match.start() :].strip().partition(b"\n")[0] if match else data[:200]
    return line[:200].decode("utf-8", "replace")
