"""The fleet's router as a process, over gates that publish in a real Redis, and what may befall them all."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest

from loadtests.simunit.process import SimUnit
from tests.real.asking import asked_on, post, steadily
from tests.real.redis_server import RedisServer
from tests.wire.process import GateProcess, eventually, metrics
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


def exchanges(gate: GateProcess) -> float:
    """How often it has told Redis what it knows, and read there what others do."""
    [told] = re.findall(r'^cellgate_redis_messages_total{kind="beats",way="sent"} (\S+)', metrics(gate), re.M)
    return float(told)


async def until_known(gate: GateProcess, router: GateProcess) -> None:
    """Wait until all units of a gate are UP there, and the router has read that."""
    await until(lambda: set(verdicts(gate).values()) == {"up"}, gate)
    for each in (gate, router):
        beats = await asyncio.to_thread(exchanges, each)
        await until(lambda: exchanges(each) > beats + 1, each)  # noqa: B023 - it is over by then.


async def until(is_so: Callable[[], object], of: GateProcess) -> None:
    """Wait for what must come to be, beside requests under way."""
    assert await asyncio.to_thread(eventually, is_so), of.log


@live_for(PROCESSES_S)
async def test_all_units_answer_through_their_gates_and_a_long_prompt_comes_back(world: World) -> None:
    units = world.units("a1", "a2", "b1")
    east = world.gate("east", {name: units[name] for name in ("a1", "a2")})
    west = world.gate("west", {"b1": units["b1"]})
    router = world.gate("router", {}, cells=[{"name": "c", "weight": 3, "units": []}])
    router.until_up("a1", "a2", "b1")
    assert ways(router) == {"a1": east.url, "a2": east.url, "b1": west.url}
    assert {unit["weight"] for unit in router.units().values()} == {3.0}
    assert set(await steadily(router.port, rps=RPS, seconds=1.0, body=BODY)) == {200}
    assert {unit["in_flight"] for unit in router.units().values()} == {0}
    # It sees them by what is told: no gate was asked for the health of a unit.
    reasons = [seen["reason"] for unit in router.units().values() for seen in unit["evidence"]]
    assert reasons
    assert not [reason for reason in reasons if "/healthz/unit/" in reason]
    # So long that to compute it again takes longer than a busy machine may be late.
    went = [[stream(router, f"{number} {'Why? ' * 10_000}")[0] for _ in range(5)] for number in range(4)]
    assert all(len(set(to)) == 1 for to in went), went


@live_for(PROCESSES_S)
async def test_a_gate_killed_or_stopping_leaves_its_units_to_the_other(world: World) -> None:
    units = world.units("u1", "u2", "u3", "u4")
    gates = [world.gate(name, units) for name in ("one", "other")]
    router = world.gate("router", {})
    router.until_up(*units)
    assert set(ways(router).values()) <= {gate.url for gate in gates}
    async with asked_on(router.port, rps=RPS, body=BODY) as statuses:
        await steadily(router.port, rps=RPS, seconds=1.0, body=BODY)
        gates[0].signal(signal.SIGKILL)
        await until(lambda: set(ways(router).values()) == {gates[1].url}, router)
        await until(lambda: set(verdicts(router).values()) == {"up"}, router)
        # Another takes its place, and then the one that had them all goes in good order.
        third = world.gate("third", units)
        await until_known(third, router)
        gates[1].signal(signal.SIGTERM)
        await until(lambda: set(ways(router).values()) == {third.url}, router)
        await steadily(router.port, rps=RPS, seconds=1.0, body=BODY)
    assert statuses.keys() == {200}, router.log


@live_for(PROCESSES_S)
async def test_a_killed_gate_that_had_all_units_is_left_at_once(world: World) -> None:
    units = world.units("u1", "u2", "u3", "u4")
    first = world.gate("first", units)
    router = world.gate("router", {})
    router.until_up(*units)
    # Known to the router, which gives it units a while after it has come.
    other = world.gate("other", units)
    await until_known(other, router)
    assert set(ways(router).values()) == {first.url}
    async with asked_on(router.port, rps=RPS, body=BODY) as statuses:
        await steadily(router.port, rps=RPS, seconds=1.0, body=BODY)
        first.signal(signal.SIGKILL)
        await until(lambda: set(ways(router).values()) == {other.url}, router)
        await steadily(router.port, rps=RPS, seconds=1.0, body=BODY)
    assert statuses.keys() == {200}, router.log


@live_for(PROCESSES_S)
async def test_what_befalls_a_unit_or_its_only_gate_is_seen_and_a_stream_goes_on_by_way_of_another(
    world: World,
) -> None:
    units = world.units("a", "b")
    gates = {name: world.gate(name, {name: units[name]}) for name in units}
    router = world.gate("router", {})
    router.until_up("a", "b")
    async with asked_on(router.port, rps=RPS, body=BODY) as statuses:
        units["a"].kill()
        await until(lambda: verdicts(router) == {"a": "down", "b": "up"}, router)
        await until(lambda: "unit a (cell c) up -> " in router.log, router)
        units["a"].restart()
        await until(lambda: verdicts(router) == {"a": "up", "b": "up"}, router)
        gates["b"].admin("POST", "/units/b/drain")
        await until(lambda: router.units()["b"]["drained"] and not router.units()["b"]["in_flight"], router)
        gates["b"].admin("POST", "/units/b/undrain")
        await until(lambda: not router.units()["b"]["drained"], router)
        # Frozen, it is missed and asked, and then its units are down.
        gates["a"].signal(signal.SIGSTOP)
        await until(lambda: verdicts(router) == {"a": "down", "b": "up"}, router)
        gates["a"].signal(signal.SIGCONT)
        await until(lambda: verdicts(router) == {"a": "up", "b": "up"}, router)
    assert statuses.keys() == {200}, router.log

    whole = stream(router, "Why?", tokens=100)
    for unit in units.values():
        unit.fault("slow", factor=4.0)
    streaming = asyncio.create_task(asyncio.to_thread(stream, router, "Why?", tokens=400))
    await until(lambda: any(unit["in_flight"] for unit in router.units().values()), router)
    (used,) = [name for name, unit in router.units().items() if unit["in_flight"]]
    generated = units[used].state()["counts"]["generation_tokens"]
    await until(lambda: units[used].state()["counts"]["generation_tokens"] > generated + 20, router)
    gates[used].signal(signal.SIGKILL)
    answered_by, events = await streaming
    assert answered_by == used
    assert len(events) == len(whole[1]) + 300
    assert events[-1] == b"data: [DONE]"


@live_for(PROCESSES_S)
async def test_without_redis_the_last_view_holds_and_the_gates_are_asked(world: World) -> None:
    units = world.units("a", "b")
    gates = {name: world.gate(name, {name: units[name]}) for name in units}
    router = world.gate("router", {})
    router.until_up("a", "b")
    async with asked_on(router.port, rps=RPS, body=BODY) as statuses:
        world.redis.kill()
        await until(lambda: "does not answer (ConnectionError" in router.log, router)
        gates["a"].signal(signal.SIGKILL)
        await until(lambda: verdicts(router) == {"a": "down", "b": "up"}, router)
    assert statuses.keys() == {200}, router.log
    # Without requests, that it is well is known by asking alone.
    await until(lambda: "at its gate: HTTP 200" in router.units()["b"]["reason"], router)
    answered = router.log.count("Redis answers")
    world.redis.start()

    def is_shared_again() -> bool:
        assert verdicts(router).keys() == {"a", "b"}
        assert verdicts(router)["b"] == "up"
        return router.log.count("Redis answers") > answered

    await until(is_shared_again, router)
    assert await post(router.port, BODY) == 200
