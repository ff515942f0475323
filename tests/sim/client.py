"""A client of the program in the simulated world: sends, reads (or not), leaves, and remembers what it saw.

It parses with its own parser, so that what the program sends is judged by somebody else.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from tests.sim.conversation import Conversation, End, Reply

if TYPE_CHECKING:
    from tests.sim.world import World

HOST = "client"
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client behaves. `read_every_s`: pauses so long after each read; infinite: never reads."""

    leave_after_events: int | None = None
    leave_after_s: float | None = None
    read_every_s: float = 0.0
    timeout_s: float = PATIENCE_S


ORDINARY = Manner()


class Client:
    """Clients of one address, each request on a connection of its own unless said otherwise."""

    def __init__(self, world: World, address: str, host: str = HOST) -> None:
        self._world = world
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._source = world.net.canonical(host)

    async def chat(
        self,
        prompt: str,
        *,
        stream: bool = True,
        max_tokens: int = 8,
        headers: dict[str, str] | None = None,
        manner: Manner = ORDINARY,
        **fields: Any,
    ) -> Reply:
        """Ask for a chat completion; `fields` go into the body."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], "stream": stream}
        body |= {"max_tokens": max_tokens} | fields
        return await self.request("POST", "/v1/chat/completions", orjson.dumps(body), headers, manner)

    async def get(self, path: str, manner: Manner = ORDINARY) -> Reply:
        return await self.request("GET", path, manner=manner)

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        manner: Manner = ORDINARY,
    ) -> Reply:
        """One request on a fresh connection, which is then closed."""
        replies = await self.exchange([self.encode(method, path, body, headers)], manner, methods=[method])
        return replies[0]

    async def exchange(
        self, requests: list[bytes], manner: Manner = ORDINARY, methods: list[str] | None = None
    ) -> list[Reply]:
        """Send raw requests back to back on one connection (pipelined); their replies in order."""
        begun_s = self._world.loop.time()
        try:
            async with asyncio.timeout(manner.timeout_s):
                conversation = await self.connect(manner)
        except OSError as error:
            end = End.TIMEOUT if isinstance(error, TimeoutError) else End.REFUSED
            return [Reply(begun_s, end=end, ended_s=self._world.loop.time()) for _ in requests]
        replies = [conversation.expect(method) for method in methods or ["GET"] * len(requests)]
        conversation.transport.write(b"".join(requests))
        try:
            async with asyncio.timeout(manner.timeout_s):
                await conversation.all_ended
        except TimeoutError:
            conversation.finish(End.TIMEOUT)
        conversation.transport.abort()
        return replies

    async def connect(self, manner: Manner = ORDINARY) -> Conversation:
        """A connection to talk on. Raises OSError."""
        transport, conversation = await self._world.net.connect(
            lambda: Conversation(self._world.loop, manner.leave_after_events, manner.read_every_s),
            self._host,
            self._port,
            source=self._source,
            is_outside=True,
        )
        if manner.leave_after_s is not None:
            self._world.loop.outside(manner.leave_after_s, conversation.leave)
        if manner.read_every_s == float("inf"):
            transport.pause_reading()
        assert isinstance(conversation, Conversation)
        return conversation

    def encode(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> bytes:
        """The bytes of a request."""
        fields = {"host": f"{self._host}:{self._port}"}
        if body:
            fields |= {"content-type": "application/json", "content-length": str(len(body))}
        lines = [f"{name}: {value}\r\n" for name, value in (fields | (headers or {})).items()]
        return f"{method} {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode() + body
