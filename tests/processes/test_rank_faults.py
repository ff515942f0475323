"""A rank of an engine fails while `/health` says 200: out, named, retried, back, and no request is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from loadtests.kit.ranked_engine import RankedEngine
from loadtests.simunit.process import SimUnit
from tests.wire.process import GateProcess, eventually, metrics

TOKENS = 60
CLIENTS = 6
LOOK_S = 1.0
"""How often a unit in use is asked for its fault status."""
STANDS_STILL = 15
SLACK_S = 1.5
"""A busy machine."""


class Load:
    """Clients that ask one thing after the other, every second one for streams, or `all_stream`."""

    def __init__(self, gate: GateProcess, *, all_stream: bool = False) -> None:
        self._all_stream = all_stream
        self._url = f"{gate.url}/v1/chat/completions"
        self.whole = 0
        self.wrong: list[str] = []
        self._ends = False

    async def __aenter__(self) -> Load:
        self._session = aiohttp.ClientSession()
        self._clients = [asyncio.create_task(self._client(number)) for number in range(CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ends = True
        await asyncio.gather(*self._clients)
        await self._session.close()

    async def _client(self, number: int) -> None:
        stream = self._all_stream or number % 2 == 0
        body = {"model": "sim", "max_tokens": TOKENS, "stream": stream}
        while not self._ends:
            self.whole += 1
            asked = body | {"messages": [{"role": "user", "content": f"{number} {self.whole}"}]}
            async with self._session.post(self._url, json=asked) as reply:
                told = (await reply.read()).decode()
            is_whole = reply.status == 200 and '"finish_reason":"length"' in told and '"error"' not in told
            if not is_whole or (stream and not told.endswith("data: [DONE]\n\n")):
                self.wrong.append(f"{number}: {reply.status} {told[-300:]}")


async def until(is_so: Callable[[], object]) -> None:
    """Return once it is so; asked in a thread, since this loop serves the engine."""
    assert await asyncio.to_thread(eventually, is_so)


def cells(engine: RankedEngine, other: SimUnit) -> list[dict[str, Any]]:
    """A unit of two ranks on two nodes, and another one."""
    follower = {
        "name": "a-1",
        "role": "follower",
        "probes": [{"probe": "http", "url": f"{engine.urls[1]}/health"}],
    }
    nodes = [{"name": "a-0", "role": "leader"}, follower]
    units = [{"name": "a", "url": engine.urls[0], "nodes": nodes}, {"name": "b", "url": other.url}]
    return [{"name": "c", "units": units}]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("path", "is_late"),
    [
        ("/fault_tolerance/status", True),
        ("/fault_tolerance/status", False),
        ("/v1/fault_tolerance/status", False),
    ],
)
async def test_a_unit_with_a_faulty_rank_is_out_within_a_look_retried_and_back_and_nothing_is_lost(
    path: str, is_late: bool, tmp_path: Path
) -> None:
    restarted = tmp_path / "restarted"
    remedy = {"cell": "c", "command": ["touch", str(restarted)], "after_s": 0.5, "backoff_s": 0.5}
    remedy["audit"] = str(tmp_path / "audit")
    two = await asyncio.to_thread(SimUnit.start_all, ["a", "b"], followers=0, step_ms=10)
    try:
        async with RankedEngine(two[0].url, path=path) as engine:
            with GateProcess(
                tmp_path, {}, cells=cells(engine, two[1]), operator={"recovery": [remedy]}
            ) as gate:
                await asyncio.to_thread(gate.until_up, "a", "b")
                async with Load(gate) as load:
                    await until(lambda: load.whole > 2 * CLIENTS)
                    engine.fail(is_late=is_late)
                    failed_at = time.monotonic()
                    await until(lambda: gate.units()["a"]["verdict"] == "down")
                    assert time.monotonic() - failed_at < LOOK_S + SLACK_S
                    rank = 0 if is_late else 1
                    await assert_named(gate, f"rank {rank} is unhealthy (RuntimeError)", rank)
                    await until(lambda: gate.units()["a"]["verdict"] == "up")
                    assert engine.healed_at > 0
        assert load.wrong == []
        # One round: each rank once, with one name, and the canary comes behind it.
        assert [rank for rank, _, _ in engine.retries] == [0, 1]
        assert len({name for _, name, _ in engine.retries}) == 1
        assert not restarted.exists()
    finally:
        for unit in two:
            unit.stop()


async def assert_named(gate: GateProcess, fault: str, rank: int) -> None:
    """In the unit's reason, as a metric and in an event."""
    assert fault in gate.units()["a"]["reason"]
    page = await asyncio.to_thread(metrics, gate)
    events = (await asyncio.to_thread(gate.admin, "GET", "/events"))[1]
    assert any(
        line.startswith("cellgate_unit_rank_fault{") and f'rank="{rank}"' in line and line.endswith(" 1.0")
        for line in page.splitlines()
    ), [line for line in page.splitlines() if "rank_fault" in line]
    assert any(fault in str(event) for event in events)


async def test_while_an_engine_recovers_with_its_requests_they_stay_and_none_is_asked_twice(
    tmp_path: Path,
) -> None:
    """It stands still for longer than any stall may last. How long it may: `hold_limit_s`."""
    two = await asyncio.to_thread(SimUnit.start_all, ["a", "b"], followers=0, step_ms=10)
    try:
        async with RankedEngine(two[0].url, path="/v1/fault_tolerance/status") as engine:
            with GateProcess(tmp_path, {}, cells=cells(engine, two[1])) as gate:
                await asyncio.to_thread(gate.until_up, "a", "b")
                async with Load(gate, all_stream=True) as load:
                    await until(lambda: load.whole > 2 * CLIENTS)
                    engine.stand_still()
                    await until(lambda: (gate.units()["a"]["hold"] or {}).get("kind") == "recovering")
                    # So many at the other unit take longer than any stall may last.
                    asked = load.whole
                    await until(lambda: load.whole > asked + STANDS_STILL)
                    assert gate.units()["a"]["verdict"] == "up"
                    streams = gate.units()["a"]["in_flight"]
                    engine.heal()
                    await until(lambda: gate.units()["a"]["usable"])
                page = await asyncio.to_thread(metrics, gate)
    finally:
        for unit in two:
            unit.stop()
    assert load.wrong == []
    assert streams > 0
    continued = [line for line in page.splitlines() if line.startswith("cellgate_continuations_total{")]
    assert all(line.endswith(" 0.0") for line in continued), continued
