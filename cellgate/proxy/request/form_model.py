"""The model in a form (multipart/form-data, RFC 7578), and another one in its place. Pure.

Its delimiters are searched for, and what stands between them is not looked at, so the audio in a form costs
next to nothing. A form that programs may read differently (two models, a name that is written in an
unusual way) has no model here: any unit may get it, but not for a key that is for some models only.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from cellgate.proxy.config.limits import LIMITS, reached

_CONTENT_TYPE = b"content-type: "
_FORM = re.compile(rb"multipart/form-data[ \t]*;", re.IGNORECASE)
_BOUNDARY = re.compile(rb';[ \t]*boundary=(?:"([^"\\]{1,70})"|([^";, \t]{1,70}))', re.IGNORECASE)
_DISPOSITION = re.compile(rb"content-disposition[ \t]*:[ \t]*form-data[ \t]*(.*)", re.IGNORECASE)
_PARAMETER = re.compile(rb';[ \t]*([^=;"\s]+)[ \t]*=[ \t]*("(?:[^"\\]|\\.)*"|[^;"]*)')
_LENGTH = re.compile(rb"(?<=\r\n)content-length:[^\r\n]*\r\n", re.IGNORECASE)
_HEAD_BYTES = 8192
"""No longer head of a part is read."""
_ODD = b"?"
"""The name of a part that is written in an unusual way."""


class ModelField(NamedTuple):
    """The model of a form: its name, where the head of its part begins, and where the name stands."""

    name: str
    head_at: int
    begin: int
    end: int


def content_type(lines: list[bytes]) -> bytes:
    """What the head of a request says of its body; empty: nothing, or more than one thing."""
    said = [line[len(_CONTENT_TYPE) :].strip() for line in lines if line.startswith(_CONTENT_TYPE)]
    return said[0] if len(said) == 1 else b""


def find_model(lines: list[bytes], body: bytes) -> ModelField | None:
    """The model of the form that a request is. None: it is no form, has no model, or is not sure."""
    kind = content_type(lines)
    boundary = _BOUNDARY.search(kind) if _FORM.match(kind) else None
    if boundary is None:
        return None
    mark = b"--" + (boundary[1] or boundary[2])
    at = 0 if body.startswith(mark) else body.find(b"\r\n" + mark) + 2
    if not body.startswith(mark, at):
        return None
    found: ModelField | None = None
    for _ in range(LIMITS.form_parts):
        line_end = body.find(b"\r\n", at)
        rest = body[at + len(mark) : line_end]
        if body.startswith(b"--", at + len(mark)):
            return found
        head_end = body.find(b"\r\n\r\n", line_end, line_end + _HEAD_BYTES)
        name = _name(body[line_end + 2 : head_end]) if head_end >= 0 and not rest.strip(b" \t") else _ODD
        if name == _ODD:
            return None
        end = body.find(b"\r\n" + mark, head_end + 2)
        if name == b"model":
            value = _text(body[head_end + 4 : end]) if end >= 0 else None
            if value is None or (found is not None and found.name != value):
                return None
            found = found or ModelField(value, line_end + 2, head_end + 4, end)
        if end < 0:
            return found
        at = end + 2
    reached("form_parts")
    return None


def with_form_model(lines: list[bytes], body: bytes, new: str) -> bytes | None:
    """The form with the model `new`. None: its model was not found."""
    field = find_model(lines, body)
    if field is None:
        return None
    # A part may declare its own length, which is of no use to anybody.
    head = _LENGTH.sub(b"", b"\r\n" + body[field.head_at : field.begin])[2:]
    return b"".join((body[: field.head_at], head, new.encode(), body[field.end :]))


def _name(head: bytes) -> bytes:
    """The name of a part; empty: it has none, _ODD: it is not sure."""
    names: list[bytes] = []
    lines = head.split(b"\r\n")
    if head.count(b"\n") >= len(lines) or any(line.startswith((b" ", b"\t")) for line in lines):
        return _ODD
    for line in lines:
        if (said := _DISPOSITION.fullmatch(line)) is None:
            continue
        for parameter, value in _PARAMETER.findall(said[1]):
            if parameter.lower() == b"name":
                is_quoted = value.startswith(b'"')
                names.append(re.sub(rb"\\(.)", rb"\1", value[1:-1]) if is_quoted else value.strip())
            elif parameter.lower().startswith(b"name*"):
                # As in mails (RFC 2231), which RFC 7578 forbids and some programs read.
                return _ODD
    return (names[0] if len(names) == 1 else _ODD) if names else b""


def _text(value: bytes) -> str | None:
    """A name as text; None: it cannot be one."""
    try:
        name = value.decode()
    except UnicodeDecodeError:
        return None
    return name if len(name) <= LIMITS.name_chars else None
