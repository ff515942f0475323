"""The fleet's router as a process: over gates that publish their units in a real Redis, and what may befall them."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest

from loadtests.simunit.process import SimUnit
from tests.real.asking import steadily
from tests.real.redis_server import RedisServer
from tests.wire.process import GateProcess, eventually
from tests.wire.stage import live

BODY = orjson.dumps(
    {"model": "sim", "stream": True, "max_tokens": 4, "messages": [{"role": "user", "content": "Why?"}]}
)
STOPS_AT_ONCE = {"timeouts": {"drain_delay_s": 1.5}}


class World:
    """A Redis, simulated units, gates before them and a router before those, for one test."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self.redis = stack.enter_context(RedisServer(folder))

    def units(self, *names: str) -> dict[str, SimUnit]:
        units = SimUnit.start_all(names, step_ms=5)
        for unit in units:
            self._stack.callback(unit.stop)
        return {unit.name: unit for unit in units}

    def gate(self, name: str, units: Mapping[str, SimUnit], **keys: Any) -> GateProcess:
        """A gate of these units; without any it is the router."""
        (folder := self._folder / name).mkdir(exist_ok=True)
        urls = {unit.name: unit.url for unit in units.values()}
        keys = {"redis": self.redis.url, **({} if units else {"discovery": "redis"}), **STOPS_AT_ONCE, **keys}
        return self._stack.enter_context(GateProcess(folder, urls, **keys))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path, stack)


def ways(router: GateProcess) -> dict[str, str]:
    """Where the router sends what is for each unit."""
    return {name: unit["url"] for name, unit in router.units().items()}


def verdicts(gate: GateProcess) -> dict[str, str]:
    return {name: unit["verdict"] for name, unit in gate.units().items()}


@live
async def test_the_router_has_all_units_and_each_answers_through_its_gate(world: World) -> None:
    units = world.units("a1", "a2", "b1")
    east = world.gate("east", {name: units[name] for name in ("a1", "a2")})
    west = world.gate("west", {"b1": units["b1"]})
    router = world.gate("router", {})
    router.until_up("a1", "a2", "b1")
    assert ways(router) == {"a1": east.url, "a2": east.url, "b1": west.url}
    statuses = Counter(await steadily(router.port, rps=60.0, seconds=1.0, body=BODY))
    assert statuses == {200: 60}
