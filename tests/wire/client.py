"""A client that writes bytes as they are and reads replies strictly."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import cast

import orjson

from tests.wire.replies import HEAD_LIMIT, Reply, read_reply

PATIENCE_S = 10.0


def chat(*, stream: bool = True, head: str = "", **fields: object) -> bytes:
    """A chat request, whole. `head` are more header lines."""
    return post(orjson.dumps({"model": "tiny", "messages": [], "stream": stream, **fields}), head)


def post(body: bytes, head: str = "", path: str = "/v1/chat/completions") -> bytes:
    """A POST of `body`. `head` are more header lines."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: gate\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{head}\r\n"
    ).encode() + body


def get(path: str, head: str = "", method: str = "GET") -> bytes:
    """A request without a body. `head` are more header lines."""
    return f"{method} {path} HTTP/1.1\r\nHost: gate\r\n{head}\r\n".encode()


class Client:
    """One connection. Whatever it waits for must come within PATIENCE_S."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        """Write bytes."""
        self.writer.write(data)

    async def reply(self, method: str = "GET") -> Reply:
        """The next reply."""
        async with asyncio.timeout(PATIENCE_S):
            reply = await read_reply(self.reader, method)
        assert reply.version == "1.1"
        return reply

    async def ask(self, data: bytes, method: str = "GET") -> Reply:
        """Send bytes and take the reply."""
        self.send(data)
        return await self.reply(method)

    async def event(self) -> bytes:
        """Whatever comes up to the end of the next server-sent event."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.readuntil(b"\n\n")

    async def rest(self) -> bytes:
        """All that comes until the gate closes. Raises ConnectionResetError."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read()

    def stop_reading(self) -> None:
        """Read nothing from now on."""
        self._transport.pause_reading()

    def read_on(self) -> None:
        """Read again."""
        self._transport.resume_reading()

    def abort(self) -> None:
        """Leave at once."""
        self.writer.transport.abort()

    def reset(self) -> None:
        """Leave at once by a reset, which overtakes what was sent."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()

    @property
    def _transport(self) -> asyncio.Transport:
        return cast(asyncio.Transport, self.writer.transport)


@asynccontextmanager
async def connected(port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[Client]:
    """A connection to the gate."""
    name = None if tls is None else "localhost"
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, limit=HEAD_LIMIT, ssl=tls, server_hostname=name
    )
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()
