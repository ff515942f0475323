"""Reads HTTP/1.1 replies strictly, and tells a reply that is whole from one that was cut.

It shares nothing with the parser of the gate, so that what the gate sends is judged by somebody else.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import orjson

HEAD_LIMIT = 1 << 20
_STATUS = re.compile(rb"HTTP/(1\.[01]) (\d{3})(?: [^\r\n]*)?")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\x00-\x08\x0a-\x1f\x7f]*)")
_SIZE = re.compile(rb"([0-9a-fA-F]{1,16})(?:;[^\x00-\x1f]*)?")


class MalformedError(Exception):
    """What came is no HTTP/1.1 reply."""


class Fields:
    """What a head has in its lines."""

    fields: list[tuple[str, str]]

    def all(self, name: str) -> list[str]:
        """All values of a field."""
        return [value for key, value in self.fields if key.lower() == name]

    def get(self, name: str) -> str | None:
        """The value of a field that must not stand twice."""
        values = self.all(name)
        assert len(values) <= 1, f"{name} stands {len(values)} times"
        return values[0] if values else None


@dataclass
class Reply(Fields):
    """One reply as a client saw it. `whole` is False when it was cut, and the client could tell.

    `chunks` are the sizes of the chunks it came in, None where it was not chunked.
    """

    version: str = ""
    status: int = 0
    fields: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    chunks: list[int] | None = None
    trailers: list[tuple[str, str]] = field(default_factory=list)
    interim: list[int] = field(default_factory=list)
    whole: bool = False

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object; fails where the body has not exactly OpenAI's shape."""
        body = self.json
        assert list(body) == ["error"], body
        assert set(body["error"]) == {"message", "type", "param", "code"}, body
        assert isinstance(body["error"]["message"], str)
        error: dict[str, Any] = body["error"]
        return error


async def read_reply(reader: asyncio.StreamReader, method: str = "GET", *, of_unit: bool = False) -> Reply:
    """The next reply. Raises EOFError when the connection ends before it, MalformedError for bad HTTP."""
    reply = Reply()
    while True:
        reply.version, reply.status, reply.fields = await _head(reader, of_unit)
        if reply.status >= 200:
            break
        if reply.status == 101:
            raise MalformedError("it switches protocols")
        reply.interim.append(reply.status)
    try:
        await _body(reader, reply, method)
        reply.whole = True
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        reply.body += getattr(error, "partial", b"")
    return reply


def replies(data: bytes, methods: Iterable[str], *, of_unit: bool = False) -> list[Reply]:
    """The replies in all that a connection has brought, to requests of these methods: as many as began.

    Raises MalformedError, also when something follows the last of them. With `of_unit`, what the gate
    forgives a unit is forgiven: that something follows, and empty lines before a head.
    """

    async def read() -> list[Reply]:
        found = []
        with suppress(EOFError):
            for method in methods:
                found.append(await read_reply(reader, method, of_unit=of_unit))
            if not of_unit:
                raise MalformedError(f"more than was asked for: {await reader.readexactly(1)!r}")
        return found

    # What has come is all there is, so nothing here ever waits, and no loop is needed.
    reader = asyncio.StreamReader(HEAD_LIMIT, cast(asyncio.AbstractEventLoop, _NoLoop()))
    reader.feed_data(data)
    reader.feed_eof()
    try:
        read().send(None)
    except StopIteration as end:
        return cast(list[Reply], end.value)
    raise AssertionError("a reader at its end has waited")


class _NoLoop:
    def get_debug(self) -> bool:
        return False


async def _head(reader: asyncio.StreamReader, of_unit: bool) -> tuple[str, int, list[tuple[str, str]]]:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        while of_unit and not (head := head.lstrip(b"\r\n")):
            head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise MalformedError(f"the head ends early: {error.partial!r}") from None
        raise EOFError("the connection ended before the reply") from None
    except asyncio.LimitOverrunError:
        raise MalformedError("no end of the head") from None
    first, *lines = head[:-4].split(b"\r\n")
    match = _STATUS.fullmatch(first)
    if match is None:
        raise MalformedError(f"status line {first!r}")
    return match[1].decode(), int(match[2]), _fields(lines)


def _fields(lines: list[bytes]) -> list[tuple[str, str]]:
    fields = []
    for line in lines:
        match = _FIELD.fullmatch(line)
        if match is None:
            raise MalformedError(f"header line {line!r}")
        fields.append((match[1].decode("latin-1"), match[2].strip(b" \t").decode("latin-1")))
    return fields


async def _body(reader: asyncio.StreamReader, reply: Reply, method: str) -> None:
    lengths, codings = reply.all("content-length"), reply.all("transfer-encoding")
    if len(lengths) + len(codings) > 1 or codings not in ([], ["chunked"]):
        raise MalformedError(f"framed by {lengths} and {codings}")
    if lengths and not re.fullmatch(r"\d+", lengths[0]):
        raise MalformedError(f"content-length {lengths[0]!r}")
    if method == "HEAD" or reply.status in (204, 304):
        return
    if codings:
        await _chunks(reader, reply)
    elif lengths:
        reply.body = await reader.readexactly(int(lengths[0]))
    else:
        while data := await reader.read(1 << 16):
            reply.body += data


async def _chunks(reader: asyncio.StreamReader, reply: Reply) -> None:
    reply.chunks = []
    parts = []
    try:
        while size := _size(await reader.readuntil(b"\r\n")):
            parts.append(await reader.readexactly(size))
            if await reader.readexactly(2) != b"\r\n":
                raise MalformedError("a chunk is longer than its size")
            reply.chunks.append(size)
        trailers = []
        while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
            trailers.append(line[:-2])
        reply.trailers = _fields(trailers)
    finally:
        reply.body = b"".join(parts)


def _size(line: bytes) -> int:
    match = _SIZE.fullmatch(line[:-2])
    if match is None:
        raise MalformedError(f"chunk size {line!r}")
    return int(match[1], 16)
