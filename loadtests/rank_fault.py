"""Drill: a rank of one engine fails while `/health` says 200. What do clients get, behind four routers?

`python -m loadtests.rank_fault`: twelve clients before two units for eight seconds each. After two seconds
one engine says, as vLLM 0.32 does, that a rank is unhealthy: what is in flight ends without its text, and
new requests hang until somebody asks all ranks to `retry`. No other router reads that page: for them it is
healed after four seconds, as by an operator. The exit code is 1 when a request behind the gate is not
whole.
"""

import asyncio
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import aiohttp

from loadtests.drill.routers import ROUTERS, running
from loadtests.kit.gate import GateProcess, Named
from loadtests.kit.ranked_engine import RankedEngine
from loadtests.kit.report import columns, machine, print_problems
from loadtests.simunit.process import SimUnit

CLIENTS, TOKENS = 12, 60
FAILS_AT_S, HEALED_AT_S, ENDS_AT_S = 2.0, 6.0, 8.0
PATIENCE_S = 4.0
"""A client gives up on an answer after this: then it hung."""
GATE = "cellgate"
PEERS = ("haproxy", "smg", "vllm-router", "sglang-router")
ENDS = ("whole", "no text", "error", "hung")


async def main() -> int:
    # What leaves a hanging request, the engine's server would tell of at length.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    rows: list[tuple[str, ...]] = [("router", *ENDS)]
    problems = []
    for name in (GATE, *PEERS):
        ends = await _play(name)
        rows.append((name, *(str(ends[end]) for end in ENDS)))
        if name == GATE and ends.total() != ends["whole"]:
            problems.append(f"behind the gate {ends.total() - ends['whole']} requests are not whole")
    print(machine())
    print(columns(rows))
    print_problems(problems)
    return int(bool(problems))


async def _play(name: str) -> Counter[str]:
    """What became of all requests."""
    units = await asyncio.to_thread(SimUnit.start_all, ["a", "b"], followers=0, step_ms=10)
    try:
        async with RankedEngine(units[0].url) as engine:
            urls = [engine.urls[0], units[1].url]
            starts = _before(name, urls, engine.urls[1])
            url = await asyncio.to_thread(starts.__enter__)
            try:
                return await _ask(url, engine, heals=name != GATE)
            finally:
                await asyncio.to_thread(starts.__exit__, None, None, None)
    finally:
        for unit in units:
            unit.stop()


@contextmanager
def _before(name: str, urls: Sequence[str], follower: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="rank-fault-") as folder:
        if (command := ROUTERS[name]) is not None:
            with running(command(urls, Path(folder)), Path(folder) / "log") as url:
                yield url
            return
        probe = {"probe": "http", "url": f"{follower}/health"}
        ranks: list[dict[str, object]] = [{"name": "a-0", "role": "leader"}]
        ranks.append({"name": "a-1", "role": "follower", "probes": [probe]})
        remedy = {"cell": "drill", "command": ["false"], "after_s": 0.5, "audit": f"{folder}/audit"}
        with GateProcess(
            [Named("a", urls[0]), Named("b", urls[1])],
            nodes=lambda unit: ranks if unit == "a" else (),
            operator={"recovery": [remedy]},
        ) as gate:
            yield gate.url


async def _ask(url: str, engine: RankedEngine, *, heals: bool) -> Counter[str]:
    ends, began = Counter[str](), time.monotonic()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        clients = [
            asyncio.create_task(_client(session, url, number, ends, began)) for number in range(CLIENTS)
        ]
        await asyncio.sleep(FAILS_AT_S)
        engine.fail()
        await asyncio.sleep(HEALED_AT_S - FAILS_AT_S)
        if heals:
            engine.heal()
        await asyncio.gather(*clients)
    return ends


async def _client(
    session: aiohttp.ClientSession, url: str, number: int, ends: Counter[str], began: float
) -> None:
    """One request after the other, every second client's streamed."""
    body = {"model": "sim", "max_tokens": TOKENS, "stream": number % 2 == 0}
    while time.monotonic() < began + ENDS_AT_S:
        asked = body | {"messages": [{"role": "user", "content": f"{time.monotonic() % 1} {number}"}]}
        try:
            async with (
                asyncio.timeout(PATIENCE_S),
                session.post(f"{url}/v1/chat/completions", json=asked) as reply,
            ):
                ends[_end(reply.status, (await reply.read()).decode())] += 1
        except TimeoutError:
            ends["hung"] += 1
        except aiohttp.ClientError:
            ends["error"] += 1


def _end(status: int, told: str) -> str:
    if status != 200 or '"error"' in told:
        return "error"
    return "whole" if '"finish_reason":"length"' in told else "no text"


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
