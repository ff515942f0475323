"""Units that are whole to every probe, and answer a request that names a misdeed with that misdeed.

A prompt that holds `evil:NAME` gets what `MISDEEDS[NAME]` does (misdeeds.py); others get one token, as a
stream or as a whole. Pages that probes read can be replaced. They run in the suite's own process.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from loadtests.bench.engine_pages import PAGES, Counters
from loadtests.kit.gate import Named
from loadtests.wire.messages import LAST_CHUNK, SSE_HEAD, chunk, whole
from loadtests.wire.scripted import Request, listen, port_of

MODEL = "evil"
FOREIGN = b"foreign.example"
"""An address that only a client would name."""
_STATE = b'{"cellgate_agent":1,"state":"ok","reason":"it runs","epoch":"a"}\n'
_BEAT = b'{"cellgate_agent":1}\n'
_FLOOD_BEATS = 4000
_SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
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


_STREAMS = re.compile(rb'"stream":\s*true')
_CHOICES = ({"delta": {"content": "a"}, "finish_reason": None}, {"delta": {}, "finish_reason": "stop"})
_EVENTS = (json.dumps({"id": "1", "model": MODEL, "choices": [{"index": 0, **each}]}) for each in _CHOICES)
_STREAM = (
    SSE_HEAD + b"".join(chunk(f"data: {each}\n\n".encode()) for each in (*_EVENTS, "[DONE]")) + LAST_CHUNK
)


Misdeed = Callable[[Request], Awaitable[None]]


class EvilUnits:
    """Some of them, that share what they do. `targets` counts what they were asked, `pages` holds replies in
    the place of those that probes get, `done` counts the misdeeds, and requests with `FOREIGN` in their body.
    Each is the agent of a unit as well, which `floods` its gate or not.
    """

    def __init__(self, misdeeds: dict[bytes, Misdeed]) -> None:
        self.units: list[Named] = []
        self.targets: Counter[bytes] = Counter()
        self.done: Counter[str] = Counter()
        self.pages: dict[bytes, bytes] = {}
        self.floods = False
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
        self.done["foreign"] += FOREIGN in asked.body
        misdeed = _MISDEED.search(asked.body) if asked.target.startswith(b"/v1/") else None
        if misdeed:
            self.done[misdeed[1].decode()] += 1
            await self._misdeeds[misdeed[1]](asked)
        elif asked.target in self.pages:
            await asked.send(self.pages[asked.target])
        elif asked.target == b"/watch":
            await self._beat(asked)
        elif asked.target.startswith(b"/v1/realtime"):
            await asked.send(_SWITCHED)
            await asked.until_gone()
        elif asked.target == b"/v1/models":
            await asked.send(whole(json.dumps(_MODELS).encode()))
        elif page := PAGES.get(asked.target):
            kind, body = page(Counters(), asked.body)
            await asked.send(whole(body, kind=kind))
        elif asked.target.startswith(b"/v1/") and _STREAMS.search(asked.body):
            await asked.send(_STREAM)
        elif asked.target.startswith(b"/v1/") and asked.body:
            await asked.send(whole(json.dumps(_TOKEN).encode()))
        else:
            await asked.send(whole(b"{}", status=b"404 Not Found"))

    async def _beat(self, asked: Request) -> None:
        await asked.send(SSE_HEAD + chunk(_STATE))
        while not asked.is_gone:
            await asked.send(chunk(_BEAT * (_FLOOD_BEATS if self.floods else 1)))
            await asyncio.sleep(0.001 if self.floods else 0.1)


def prompt(misdeed: str, number: int = 0, **more: object) -> bytes:
    """The body of a request for it. Each `number` is another prompt."""
    messages = [{"role": "user", "content": f"evil:{misdeed} {number}"}]
    return json.dumps({"model": MODEL, "messages": messages, **more}).encode()
