"""A client that sends whatever bytes it is given, and says in a few words what came back."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Iterable

from loadtests.abuse.nouns import Got

PATIENCE_S = 20.0
"""Whoever gets no end of an answer for so long counts as hung."""
_BODY_KEPT = 4 << 20
_CODE = re.compile(rb'"code":\s?"(\w+)"')
_NO_LINGER = struct.pack("ii", 1, 0)


def post(body: bytes, *, path: str = "/v1/chat/completions", lines: str = "") -> bytes:
    """A POST of JSON. `lines`: more header lines, each with its end."""
    head = f"POST {path} HTTP/1.1\r\nhost: gate\r\ncontent-type: application/json\r\n{lines}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode("latin-1") + body


def get(path: str, lines: str = "") -> bytes:
    """A GET."""
    return f"GET {path} HTTP/1.1\r\nhost: gate\r\n{lines}\r\n".encode("latin-1")


class Client:
    """One connection. `body` is that of the last answer, up to `_BODY_KEPT`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.body = bytearray()

    @classmethod
    async def open(cls, port: int) -> Client:
        """Connect to this machine's `port`."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 20))

    async def send(self, data: bytes) -> None:
        """Send; harmless when the other side has closed."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError:
            pass

    async def answer(self, patience_s: float = PATIENCE_S) -> str:
        """The next answer: its status and error code; "closed", "reset" or "hang" if there is none; "cut"
        with its status if it has no proper end.
        """
        self.body = bytearray()
        try:
            return await asyncio.wait_for(self._answer(), patience_s)
        except asyncio.IncompleteReadError:
            return "closed"
        except asyncio.LimitOverrunError:
            return "no answer but endless bytes"
        except OSError as error:
            return "hang" if isinstance(error, TimeoutError) else "reset"

    async def close(self) -> None:
        """Leave in good order."""
        self._writer.close()

    async def _answer(self) -> str:
        while True:
            head = await self._reader.readuntil(b"\r\n\r\n")
            status = head.split(b" ", 2)[1].decode()
            if status[0] != "1":
                break
        try:
            await self._read_body(head.lower())
        except (asyncio.IncompleteReadError, ConnectionError):
            return f"cut {status}"
        code = _CODE.search(self.body)
        return f"{status} {code[1].decode()}" if code else status

    async def _read_body(self, head: bytes) -> None:
        if b"transfer-encoding: chunked" in head:
            while size := int(await self._reader.readuntil(b"\r\n"), 16):
                piece = await self._reader.readexactly(size + 2)
                if len(self.body) < _BODY_KEPT:
                    self.body += piece[:-2]
            await self._reader.readuntil(b"\r\n")
        elif (length := head.partition(b"content-length:")[2]) and b"\r\n" in length:
            self.body += await self._reader.readexactly(int(length.split(b"\r\n")[0]))


async def ask(port: int, data: bytes, *, patience_s: float = PATIENCE_S) -> str:
    """What came of sending `data` on a connection of its own. It is sent while the answer is awaited."""
    try:
        client = await Client.open(port)
    except OSError:
        return "refused"
    sending = asyncio.create_task(client.send(data))
    try:
        return await client.answer(patience_s)
    finally:
        sending.cancel()
        await client.close()


async def ask_all(port: int, each: Iterable[bytes], *, at_once: int = 32) -> Got:
    """What came of all of them, so many at once, each on a connection of its own."""
    rest = iter(each)
    got: Got = Counter()

    async def some() -> None:
        for data in rest:
            got[await ask(port, data)] += 1

    await asyncio.gather(*(some() for _ in range(at_once)))
    return got


async def ask_on(port: int, each: Iterable[bytes], *, at_once: int = 32) -> Got:
    """The same over few kept-alive connections: many requests at little cost to the client."""
    rest = iter(each)
    got: Got = Counter()

    async def some() -> None:
        client = await Client.open(port)
        for data in rest:
            await client.send(data)
            got[outcome := await client.answer()] += 1
            if not outcome[0].isdigit():
                client = await Client.open(port)
        await client.close()

    await asyncio.gather(*(some() for _ in range(at_once)))
    return got


def dial(port: int, data: bytes = b"") -> socket.socket:
    """A connection that has sent `data` and is read by nobody; it has the smallest receive buffer."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(PATIENCE_S)
    raw.connect(("127.0.0.1", port))
    if data:
        raw.sendall(data)
    raw.setblocking(False)
    return raw


def reset(raw: socket.socket) -> None:
    """Leave with a reset."""
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    raw.close()


async def held(connections: Iterable[socket.socket], seconds: float, *, resets: bool = False) -> Got:
    """Leave them all after some seconds. What they were told meanwhile is not read."""
    kept = list(connections)
    await asyncio.sleep(seconds)
    for raw in kept:
        if resets:
            reset(raw)
        else:
            raw.close()
    return Counter(left=len(kept))


async def one(outcome: Awaitable[str]) -> Got:
    """A single outcome, counted."""
    return Counter([await outcome])
