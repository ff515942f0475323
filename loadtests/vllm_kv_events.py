"""Real vLLM units publish their KV events: does the index hold what the engine finds in its cache?

`python -m loadtests.vllm_kv_events` starts two leader/follower units on this machine's CPU (8 GB), two gates
before them, of which one has two workers, and an index beside the gates whose connection can be cut. Each of
200 requests with shared beginnings has its tokens looked for in that index, and both gates are asked what
they expect to be cached; then the engine tells. Meanwhile blocks are evicted, a cache is cleared, the
connection is cut and a unit is restarted. The exit code is 1 when the index is more than one block off.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from array import array
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import orjson
import zmq

from cellgate.extras.kv_events.follow import RankFollower
from cellgate.extras.kv_events.wire import KvDecoder, Publisher, ZmqLink
from cellgate.router.kv_index import TOKEN_BYTES, Lessons, following, root
from cellgate.router.prefix import KnownPrefixes, PrefixCache
from loadtests.kit import progress
from loadtests.kit.gate import TOKEN, GateProcess, Named
from loadtests.kit.processes import free_port
from loadtests.vllm import processes, unit
from loadtests.vllm.install import set_up
from loadtests.vllm.prompts import some_words
from loadtests.wire.blocking import fetch

REQUESTS = 200
BLOCK_TOKENS = 32
BLOCKS = 96
"""Of a unit's KV cache: a few prompts fill it."""
CLEARED_AT, CUT_AT, MENDED_AT, RESTARTED_AT = 60, 90, 105, 140
SETTLED_S = 0.4
START_TIMEOUT_S = 300.0
SILENCE_S = 120.0


@dataclass(slots=True)
class Watched:
    """One unit, its ports, and the index that follows it through a connection that can be cut."""

    name: str
    port: int = field(default_factory=free_port)
    events: int = field(default_factory=free_port)
    replay: int = field(default_factory=free_port)
    cut: Cut | None = None
    process: unit.Unit | None = None
    known: KnownPrefixes = field(default_factory=lambda: KnownPrefixes(PrefixCache(1), Lessons()))
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def url(self) -> str:
        """Its API."""
        return f"http://{unit.HOST}:{self.port}"

    def start(self) -> None:
        """Start its processes."""
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://*:{self.replay}",
        }
        options = ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS)]
        options += ["--max-model-len", "2048", "--enable-prompt-tokens-details"]
        options += ["--kv-events-config", orjson.dumps(events).decode()]
        self.process = unit.start(self.port, options)

    async def ready(self) -> None:
        """Until it answers."""
        assert self.process is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await asyncio.to_thread(self.process.healthy):
                if self.process.lost():
                    raise RuntimeError(f"{self.name} ended: see {unit.log_of(self.port, 'leader')}")
                await asyncio.sleep(1.0)
        await asyncio.to_thread(self.process.warmed_up)

    async def close(self) -> None:
        """Close what can be cut."""
        if self.cut is not None:
            await self.cut.cut()

    def stop(self) -> None:
        """End its processes."""
        if self.process is not None:
            processes.stop({self.process.leader, self.process.follower})

    def cell(self) -> dict[str, object]:
        """The unit in a gate's file."""
        endpoints = {name: f"tcp://{unit.HOST}:{port}" for name, port in self._endpoints().items()}
        return {"name": self.name, "url": self.url, "kv_events": {"from": "vllm", **endpoints}}

    def _endpoints(self) -> dict[str, int]:
        return {"endpoint": self.events, "replay_endpoint": self.replay}

    def held(self, tokens: list[int]) -> int:
        """How many blocks of a prompt are in the index; vLLM never uses the last token."""
        index, chain = self.known.rank(0, 1 << 20), root(BLOCK_TOKENS, b"")
        data, size = array("I", tokens).tobytes(), BLOCK_TOKENS * TOKEN_BYTES
        for number in range((len(tokens) - 1) // BLOCK_TOKENS):
            chain = following(chain, data[number * size : (number + 1) * size])
            if chain not in index.held:
                return number
        return (len(tokens) - 1) // BLOCK_TOKENS


class Cut:
    """A relay of TCP that can be cut: what comes meanwhile is lost."""

    def __init__(self, port: int) -> None:
        self._to_port = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = free_port()

    async def mend(self) -> None:
        """Accept."""
        self._server = await asyncio.start_server(self._relay, unit.HOST, self.port)

    async def cut(self) -> None:
        """Break every connection, and refuse new ones."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0.1)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(unit.HOST, self._to_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        await asyncio.gather(_copy(reader, back), _copy(there, writer), return_exceptions=True)
        self._writers -= {writer, back}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.transport.abort()


@dataclass(frozen=True, slots=True)
class Seen:
    """One request: blocks of its prompt that the index had, that the gates expected, that were found."""

    number: int
    indexed: int
    expected: tuple[float, ...]
    by_events: tuple[bool, ...]
    found: int
    prompt: int


async def main() -> int:
    """Everything; 1 when the index was not exact."""
    await asyncio.to_thread(set_up)
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    units, context = [Watched("a"), Watched("b")], zmq.Context()
    followers: list[asyncio.Task[None]] = []
    with ExitStack() as stack:
        for one in units:
            one.start()
            stack.callback(one.stop)
        for one in units:
            await one.ready()
            one.cut = Cut(one.events)
            await one.cut.mend()
            followers.append(asyncio.create_task(_follower(one, context).run()))
        cells = [{"name": "c", "units": [one.cell() for one in units]}]
        named = [Named(one.name, one.url) for one in units]
        gates = [
            stack.enter_context(GateProcess(named, settings={"cells": cells, "workers": workers}))
            for workers in (1, 2)
        ]
        seen = await _play(units, gates)
        for gate in gates:
            print("\n".join(line for line in gate.metrics().splitlines() if line.startswith("cellgate_kv")))
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        for one in units:
            await one.close()
        context.destroy(linger=0)
    return _report(seen, units)


def _follower(one: Watched, context: zmq.Context[zmq.Socket[bytes]]) -> RankFollower:
    assert one.cut is not None
    publisher = Publisher(f"tcp://{unit.HOST}:{one.cut.port}", f"tcp://{unit.HOST}:{one.replay}")
    now = asyncio.get_running_loop().time
    return RankFollower(
        one.name, 0, one.known, lambda: ZmqLink(context, publisher), now, one.counts, KvDecoder()
    )


async def _play(units: list[Watched], gates: list[GateProcess]) -> list[Seen]:
    rng, seen = random.Random(7), []
    documents = [some_words(rng, rng.randrange(150, 500)) for _ in range(6)]
    for number in range(REQUESTS):
        await _happens(number, units, gates)
        one = rng.choice(units)
        content = f"{rng.choice(documents)} {some_words(rng, rng.randrange(5, 120))}"
        if CUT_AT <= number < MENDED_AT and one is units[0]:
            # Its index hears nothing now: the gates' events have another connection.
            await asyncio.to_thread(_ask, gates[number % 2], one, content)
            continue
        seen.append(await _one(number, one, gates, content))
        print(seen[-1], flush=True)
    return seen


async def _happens(number: int, units: list[Watched], gates: list[GateProcess]) -> None:
    """What happens to the units and connections before this request."""
    first, cut = units[0], units[0].cut
    assert cut is not None
    if number == CLEARED_AT:
        await asyncio.to_thread(_post, f"{first.url}/reset_prefix_cache", {})
        # The engine publishes it with its next step.
        await asyncio.to_thread(_post, f"{first.url}/v1/chat/completions", _chat("Hello"))
    elif number == CUT_AT:
        await cut.cut()
    elif number == MENDED_AT:
        await cut.mend()
        await asyncio.sleep(3.0)
    elif number == RESTARTED_AT:
        await asyncio.to_thread(first.stop)
        first.start()
        await first.ready()
        for gate in gates:
            await asyncio.to_thread(gate.wait_up)
        await asyncio.sleep(3.0)


async def _one(number: int, one: Watched, gates: list[GateProcess], content: str) -> Seen:
    await asyncio.sleep(SETTLED_S)
    tokens = orjson.loads(await asyncio.to_thread(_post, f"{one.url}/tokenize", _chat(content)))["tokens"]
    rows = [await asyncio.to_thread(_explained, gate, one, content) for gate in gates]
    indexed = one.held(tokens)
    found = await asyncio.to_thread(_ask, gates[number % 2], one, content)
    expected = tuple(round(row["cached_tokens"] / BLOCK_TOKENS, 1) for row in rows)
    by_events = tuple(row["cached_by"] == "events" for row in rows)
    return Seen(number, indexed, expected, by_events, found // BLOCK_TOKENS, len(tokens) // BLOCK_TOKENS)


def _ask(gate: GateProcess, one: Watched, content: str) -> int:
    """The cached tokens of a request that goes to this unit."""
    lines = f"x-cellgate-unit: {one.name}\r\nx-cellgate-token: {TOKEN}\r\n"
    answer = orjson.loads(_post(f"{gate.url}/v1/chat/completions", _chat(content), lines))
    return int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _explained(gate: GateProcess, one: Watched, content: str) -> dict[str, Any]:
    answer = orjson.loads(_post(f"http://{unit.HOST}:{gate.admin_port}/explain", _chat(content)))
    row: dict[str, Any] = next(row for row in answer["units"] if row["unit"] == one.name)
    return row


def _post(url: str, body: dict[str, object], lines: str = "") -> bytes:
    reply = fetch(url, orjson.dumps(body), lines=lines, silence_s=SILENCE_S)
    if reply.status != 200:
        raise RuntimeError(f"{url}: {reply.status} {reply.body[:200]!r}")
    return reply.body


def _chat(content: str) -> dict[str, object]:
    messages = [{"role": "user", "content": content}]
    return {"model": unit.MODEL_NAME, "messages": messages, "max_tokens": 4, "temperature": 0}


def _report(seen: list[Seen], units: list[Watched]) -> int:
    off = [abs(row.indexed - row.found) for row in seen]
    print(f"\n{len(seen)} requests; {sum(row.found > 0 for row in seen)} found something cached")
    print(f"index: {sum(one == 0 for one in off)} exact, {sum(one == 1 for one in off)} off by one block")
    for gate in range(2):
        known = [row for row in seen if row.by_events[gate]]
        errors = sorted(abs(row.expected[gate] - row.found) for row in known) or [0.0]
        print(
            f"gate {gate}: by events {len(known)}, mean error {fmean(errors):.2f} blocks, "
            f"half within {errors[len(errors) // 2]:.1f}, 9 of 10 within {errors[len(errors) * 9 // 10]:.1f}"
        )
    for one in units:
        print(f"unit {one.name}: {dict(one.counts)}")
    worst = [row for row, error in zip(seen, off, strict=True) if error > 1]
    print("\n".join(map(str, worst)))
    return 1 if worst else 0


if __name__ == "__main__":
    with progress.shown("vllm-kv-events"):
        sys.exit(asyncio.run(main()))
