"""The fleet's router as a process, over gates that publish in a real Redis, and what may befall them all."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest

from loadtests.simunit.process import SimUnit
from tests.real.asking import steadily
from tests.real.redis_server import RedisServer
from tests.wire.process import GateProcess, eventually
from tests.wire.stage import PROCESSES_S, live_for

BODY = orjson.dumps(
    {"model": "sim", "stream": True, "max_tokens": 4, "messages": [{"role": "user", "content": "Why?"}]}
)
RPS = 40
STOPS_SOON = {"timeouts": {"drain_delay_s": 1.5}}


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
        # All of them have the same, so that gates believe the router.
        (token := self._folder / "token").write_text("s3cret")
        urls = {unit.name: unit.url for unit in units.values()}
        keys = {
            "redis": self.redis.url,
            "admin_token_file": str(token),
            **({} if units else {"discovery": "redis"}),
            **STOPS_SOON,
            **keys,
        }
        return self._stack.enter_context(GateProcess(folder, urls, **keys))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path, stack)


def ways(router: GateProcess) -> dict[str, str]:
    """Where the router sends what is for each unit."""
    return {name: unit["url"] for name, unit in router.units().items()}


def stream(gate: GateProcess, prompt: str, *, tokens: int = 2) -> tuple[str, list[bytes]]:
    """The unit that answers, and the events."""
    ask = {
        "model": "sim",
        "stream": True,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": prompt}],
    }
    connection = gate.connect()
    connection.request("POST", "/v1/chat/completions", orjson.dumps(ask))
    try:
        reply = connection.getresponse()
        return reply.headers["x-cellgate-unit"], [line for line in reply.read().split(b"\n\n") if line]
    finally:
        connection.close()


def verdicts(gate: GateProcess) -> dict[str, str]:
    return {name: unit["verdict"] for name, unit in gate.units().items()}


async def asked(router: GateProcess, seconds: float) -> Counter[int]:
    """What becomes of a steady stream of requests."""
    return Counter(await steadily(router.port, rps=RPS, seconds=seconds, body=BODY))


async def until(is_so: Callable[[], object], said: Callable[[], object]) -> None:
    """Wait for what must come to be, beside requests under way."""
    assert await asyncio.to_thread(eventually, is_so), said()


@live_for(PROCESSES_S)
async def test_all_units_answer_through_their_gates(world: World) -> None:
    units = world.units("a1", "a2", "b1")
    east = world.gate("east", {name: units[name] for name in ("a1", "a2")})
    west = world.gate("west", {"b1": units["b1"]})
    router = world.gate("router", {}, cells=[{"name": "c", "weight": 3, "units": []}])
    router.until_up("a1", "a2", "b1")
    assert ways(router) == {"a1": east.url, "a2": east.url, "b1": west.url}
    assert {unit["weight"] for unit in router.units().values()} == {3.0}
    assert await asked(router, 1.0) == {200: RPS}
    assert {unit["in_flight"] for unit in router.units().values()} == {0}
    # It sees them by what is told: no gate was asked for the health of a unit.
    reasons = [seen["reason"] for unit in router.units().values() for seen in unit["evidence"]]
    assert reasons
    assert not [reason for reason in reasons if "/healthz/unit/" in reason]


@live_for(PROCESSES_S)
async def test_a_gate_killed_or_stopping_leaves_its_units_to_the_other(world: World) -> None:
    units = world.units("u1", "u2", "u3", "u4")
    gates = [world.gate(name, units) for name in ("one", "other")]
    router = world.gate("router", {})
    router.until_up(*units)
    assert set(ways(router).values()) <= {gate.url for gate in gates}
    asking = asyncio.create_task(asked(router, 6.0))
    await asyncio.sleep(1.0)
    gates[0].signal(signal.SIGKILL)
    await until(lambda: set(ways(router).values()) == {gates[1].url}, lambda: router.log)
    await until(lambda: set(verdicts(router).values()) == {"up"}, lambda: router.log)
    # Another takes its place, and then the one that had them all goes in good order.
    third = world.gate("third", units)
    await until(lambda: set(verdicts(third).values()) == {"up"}, lambda: third.log)
    gates[1].signal(signal.SIGTERM)
    await until(lambda: set(ways(router).values()) == {third.url}, lambda: router.log)
    assert await asking == {200: 6 * RPS}, router.log
    assert await asked(router, 1.0) == {200: RPS}


@live_for(PROCESSES_S)
async def test_a_killed_gate_that_had_all_units_is_left_at_once(world: World) -> None:
    units = world.units("u1", "u2", "u3", "u4")
    first = world.gate("first", units)
    router = world.gate("router", {})
    router.until_up(*units)
    # Known to the router, which gives it units a while after it has come.
    other = world.gate("other", units)
    await until(lambda: set(verdicts(other).values()) == {"up"}, lambda: other.log)
    assert set(ways(router).values()) == {first.url}
    asking = asyncio.create_task(asked(router, 3.0))
    await asyncio.sleep(1.0)
    first.signal(signal.SIGKILL)
    assert await asking == {200: 3 * RPS}, router.log
    assert set(ways(router).values()) == {other.url}


@live_for(PROCESSES_S)
async def test_a_unit_that_dies_or_is_drained_at_its_gate_gets_nothing(world: World) -> None:
    units = world.units("a", "b")
    gates = {name: world.gate(name, {name: units[name]}) for name in units}
    router = world.gate("router", {})
    router.until_up("a", "b")
    asking = asyncio.create_task(asked(router, 4.0))
    await asyncio.sleep(0.5)
    units["a"].kill()
    await until(lambda: verdicts(router) == {"a": "down", "b": "up"}, lambda: router.log)
    await until(lambda: "unit a (cell c) up -> " in router.log, lambda: router.log)
    units["a"].restart()
    await until(lambda: verdicts(router) == {"a": "up", "b": "up"}, lambda: router.log)
    gates["b"].admin("POST", "/units/b/drain")
    await until(lambda: router.units()["b"]["drained"], lambda: router.log)
    assert await asking == {200: 4 * RPS}
    assert router.units()["b"]["in_flight"] == 0
    gates["b"].admin("POST", "/units/b/undrain")
    await until(lambda: not router.units()["b"]["drained"], lambda: router.log)


@live_for(PROCESSES_S)
async def test_a_long_prompt_comes_back_to_the_unit_that_holds_it(world: World) -> None:
    units = world.units("a1", "a2", "b1")
    world.gate("east", {name: units[name] for name in ("a1", "a2")})
    world.gate("west", {"b1": units["b1"]})
    router = world.gate("router", {})
    router.until_up(*units)
    went = [[stream(router, f"{number} {'Why? ' * 2000}")[0] for _ in range(5)] for number in range(4)]
    assert all(len(set(to)) == 1 for to in went), went


@live_for(PROCESSES_S)
async def test_a_stream_is_continued_by_way_of_another_gate(world: World) -> None:
    units = world.units("a", "b")
    gates = {name: world.gate(name, {name: units[name]}) for name in units}
    router = world.gate("router", {})
    router.until_up("a", "b")
    whole = stream(router, "Why?", tokens=100)
    streaming = asyncio.create_task(asyncio.to_thread(stream, router, "Why?", tokens=400))
    await until(lambda: any(unit["in_flight"] for unit in router.units().values()), lambda: router.log)
    await asyncio.sleep(0.5)
    (used,) = [name for name, unit in router.units().items() if unit["in_flight"]]
    gates[used].signal(signal.SIGKILL)
    unit, events = await streaming
    assert unit == used
    assert len(events) == len(whole[1]) + 300
    assert events[-1] == b"data: [DONE]"


@live_for(PROCESSES_S)
async def test_without_redis_the_last_view_holds_and_the_gates_are_asked(world: World) -> None:
    units = world.units("a", "b")
    gates = {name: world.gate(name, {name: units[name]}) for name in units}
    router = world.gate("router", {})
    router.until_up("a", "b")
    world.redis.kill()
    assert await asked(router, 1.0) == {200: RPS}
    gates["a"].signal(signal.SIGKILL)
    assert await asked(router, 1.0) == {200: RPS}
    await until(lambda: verdicts(router) == {"a": "down", "b": "up"}, lambda: router.log)
    await until(lambda: "at its gate: HTTP 200" in router.units()["b"]["reason"], lambda: router.log)
    world.redis.start()
    for _ in range(8):
        await asyncio.sleep(0.25)
        assert verdicts(router).keys() == {"a", "b"}
        assert verdicts(router)["b"] == "up"
    assert await asked(router, 0.5) == {200: RPS // 2}


@live_for(PROCESSES_S)
async def test_a_frozen_gate_is_missed_and_asked_and_then_its_units_are_down(world: World) -> None:
    units = world.units("a", "b")
    gates = {name: world.gate(name, {name: units[name]}) for name in units}
    router = world.gate("router", {})
    router.until_up("a", "b")
    asking = asyncio.create_task(asked(router, 4.0))
    await asyncio.sleep(0.5)
    gates["a"].signal(signal.SIGSTOP)
    await until(lambda: verdicts(router) == {"a": "down", "b": "up"}, lambda: router.log)
    gates["a"].signal(signal.SIGCONT)
    await until(lambda: verdicts(router) == {"a": "up", "b": "up"}, lambda: router.log)
    assert await asking == {200: 4 * RPS}
