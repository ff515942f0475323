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

from loadtests.bench.engine_pages import PAGES, Counters
from loadtests.kit.gate import Named
from loadtests.wire.messages import whole
from loadtests.wire.scripted import Request, listen, port_of

MODEL = "evil"
_MISDEED = re.compile(rb"evil:([a-z0-9-]+)")
_MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm"}]}
_TOKEN = {
    "id": "1",
    "object": "chat.completion",
    "model": MODEL,
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "a"}, "text": "a", "finish_reason": "length"}
    ],
}


Misdeed = Callable[[Request], Awaitable[None]]


class EvilUnits:
    """Some of them, that share what they do. `targets` counts what they were asked, `pages` holds replies in
    the place of those that probes get, `done` counts the misdeeds.
    """

    def __init__(self, misdeeds: dict[bytes, Misdeed]) -> None:
        self.units: list[Named] = []
        self.targets: Counter[bytes] = Counter()
        self.done: Counter[str] = Counter()
        self.pages: dict[bytes, bytes] = {}
        self._misdeeds = misdeeds
        self._servers: list[asyncio.Server] = []

    async def open(self, names: Sequence[str]) -> None:
        """Listen, each on a port of its own."""
        for name in names:
            server = await listen(self._answer)
            self.units.append(Named(name, f"http://127.0.0.1:{port_of(server)}"))
            self._servers.append(server)

    def close(self) -> None:
        """Listen no more."""
        for server in self._servers:
            server.close()

    async def _answer(self, asked: Request) -> None:
        self.targets[asked.target] += 1
        misdeed = _MISDEED.search(asked.body) if asked.target.startswith(b"/v1/") else None
        if misdeed:
            self.done[misdeed[1].decode()] += 1
            await self._misdeeds[misdeed[1]](asked)
        elif asked.target in self.pages:
            await asked.send(self.pages[asked.target])
        elif asked.target == b"/v1/models":
            await asked.send(whole(json.dumps(_MODELS).encode()))
        elif page := PAGES.get(asked.target):
            kind, body = page(Counters(), asked.body)
            await asked.send(whole(body, kind=kind))
        elif asked.target.startswith(b"/v1/") and asked.body:
            await asked.send(whole(json.dumps(_TOKEN).encode()))
        else:
            await asked.send(whole(b"{}", status=b"404 Not Found"))


def prompt(misdeed: str, number: int = 0, **more: object) -> bytes:
    """The body of a request for it. Each `number` is another prompt."""
    messages = [{"role": "user", "content": f"evil:{misdeed} {number}"}]
    return json.dumps({"model": MODEL, "messages": messages, **more}).encode()
