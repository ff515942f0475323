"""Units that are whole to every probe, and answer a request that names a misdeed with that misdeed.

A prompt that holds `evil:NAME` gets what `MISDEEDS[NAME]` does (misdeeds.py); others get one token. Pages
that probes read can be replaced. They run in the suite's own process.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from loadtests.bench.engine_pages import PAGES, Counters

MODEL = "evil"
_MISDEED = re.compile(rb"evil:([a-z0-9-]+)")
_BODY_LIMIT = 1 << 30
_MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm"}]}
_TOKEN = {
    "id": "1",
    "object": "chat.completion",
    "model": MODEL,
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "a"}, "text": "a", "finish_reason": "length"}
    ],
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as an evil unit has it, and where its answer goes."""

    target: bytes
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        """Send, and wait until there is room for more. Raises OSError when the gate has gone."""
        self.writer.write(data)
        await self.writer.drain()
        if self.writer.is_closing():
            raise ConnectionResetError


Misdeed = Callable[[Asked], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class EvilUnit:
    """Where one of them listens."""

    name: str
    url: str


class EvilUnits:
    """Some of them, that share what they do. `targets` counts what they were asked, `pages` holds replies in
    the place of those that probes get, `done` counts the misdeeds.
    """

    def __init__(self, misdeeds: dict[bytes, Misdeed]) -> None:
        self.units: list[EvilUnit] = []
        self.targets: Counter[bytes] = Counter()
        self.done: Counter[str] = Counter()
        self.pages: dict[bytes, bytes] = {}
        self._misdeeds = misdeeds
        self._servers: list[asyncio.Server] = []

    async def open(self, names: Sequence[str]) -> None:
        """Listen, each on a port of its own."""
        for name in names:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20, backlog=1024)
            port = server.sockets[0].getsockname()[1]
            self.units.append(EvilUnit(name, f"http://127.0.0.1:{port}"))
            self._servers.append(server)

    def close(self) -> None:
        """Listen no more."""
        for server in self._servers:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Cancelled: the suite is over, and asyncio's streams would complain of it.
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length:")[2]
                body = await reader.readexactly(int(length.split(b"\r\n")[0])) if length else b""
                await self._answer(Asked(head.split(b" ", 2)[1], body, reader, writer))
        writer.close()

    async def _answer(self, asked: Asked) -> None:
        self.targets[asked.target] += 1
        misdeed = _MISDEED.search(asked.body) if asked.target.startswith(b"/v1/") else None
        if misdeed:
            self.done[misdeed[1].decode()] += 1
            await self._misdeeds[misdeed[1]](asked)
        elif asked.target in self.pages:
            await asked.send(self.pages[asked.target])
        elif asked.target == b"/v1/models":
            await asked.send(reply(json.dumps(_MODELS).encode()))
        elif page := PAGES.get(asked.target):
            kind, body = page(Counters(), asked.body)
            await asked.send(reply(body, kind=kind))
        elif asked.target.startswith(b"/v1/") and asked.body:
            await asked.send(reply(json.dumps(_TOKEN).encode()))
        else:
            await asked.send(reply(b"{}", status=b"404 Not Found"))


def reply(
    body: bytes, *, status: bytes = b"200 OK", kind: bytes = b"application/json", lines: bytes = b""
) -> bytes:
    """A whole reply. `lines`: more header lines, each with its end."""
    head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n" % (
        status,
        kind,
        len(body),
        lines,
    )
    return head + body


def prompt(misdeed: str, number: int = 0, **more: object) -> bytes:
    """The body of a request for it. Each `number` is another prompt."""
    messages = [{"role": "user", "content": f"evil:{misdeed} {number}"}]
    return json.dumps({"model": MODEL, "messages": messages, **more}).encode()
