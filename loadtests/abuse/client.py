"""What came back of the bytes that were sent, in a few words."""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter
from collections.abc import Awaitable, Iterable

from loadtests.abuse.nouns import Got
from loadtests.wire.client import Connection
from loadtests.wire.raw import reset
from loadtests.wire.reply import IncompleteReadError, MalformedError, Reply

PATIENCE_S = 20.0
"""Whoever gets no end of an answer for so long counts as hung."""
_BODY_KEPT = 4 << 20
_CODE = re.compile(rb'"code":\s?"(\w+)"')


class Client:
    """One connection. `body` is that of the last answer, up to `_BODY_KEPT`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.body = bytearray()

    @classmethod
    async def open(cls, port: int) -> Client:
        """Connect to this machine's `port`."""
        return cls(await Connection.open(port))

    async def send(self, data: bytes) -> None:
        """Send; harmless when the other side has closed."""
        await self._connection.send(data)

    async def answer(self, patience_s: float = PATIENCE_S) -> str:
        """The next answer: its status and error code; "closed", "reset" or "hang" if there is none; "cut"
        with its status if it has no proper end; "no HTTP".
        """
        self.body = bytearray()
        reply = Reply(self._take)
        try:
            async with asyncio.timeout(patience_s):
                await self._connection.read(reply)
        except OSError as error:
            return _in_words(error, reply.status)
        self.body += reply.body
        code = _CODE.search(self.body)
        return f"{reply.status} {code[1].decode()}" if code else str(reply.status)

    async def close(self) -> None:
        """Leave in good order."""
        self._connection.close()

    def _take(self, data: bytes) -> None:
        if len(self.body) < _BODY_KEPT:
            self.body += data


def _in_words(error: OSError, status: int) -> str:
    if isinstance(error, TimeoutError):
        return "hang"
    if status:
        return f"cut {status}"
    if isinstance(error, MalformedError):
        return "no HTTP"
    return "closed" if isinstance(error, IncompleteReadError) else "reset"


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
