"""The faults, and which alerts each of them must fire. A fault is a context: it begins, and ends with it."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from loadtests.alerts.world import FILES, Scene, write_units
from loadtests.kit.agents import IMAGE
from loadtests.kit.asking import asking
from loadtests.kit.waiting import wait_until
from loadtests.poison import keeping, send_prompt
from loadtests.simunit.process import SimUnit
from loadtests.wire.client import Connections

FLAPS = 3
BACK_S = 30.0
LAG_S = 0.5
"""How long the gate is stopped at once: longer than a lag that counts, shorter than a scrape may take."""
CROWD, CROWD_EVERY_S = 60, 0.5

Begin = Callable[[Scene], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `alerts` must fire while it lasts, `besides` may; `inhibited` are those of them that
    Alertmanager keeps back; `users` ask meanwhile.
    """

    name: str
    begin: Begin
    alerts: frozenset[str]
    besides: frozenset[str] = frozenset()
    inhibited: frozenset[str] = frozenset()
    users: int = 4


def _names(text: str) -> frozenset[str]:
    return frozenset(f"Cellgate{name}" for name in text.split())


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _wedge(scene: Scene) -> AbstractContextManager[object]:
    return _stopped(scene.units[0].follower_pids[0])


@contextmanager
def _flaps(scene: Scene) -> Iterator[None]:
    unit = scene.units[0]
    for _ in range(FLAPS):
        with _wedge(scene):
            _until_verdict(scene, unit, "down")
        _until_verdict(scene, unit, "up")
    yield


@contextmanager
def _hurt(unit: SimUnit, fault: str, **parameters: float) -> Iterator[None]:
    unit.fault(fault, **parameters)
    try:
        yield
    finally:
        unit.fault("heal")


def _slow(scene: Scene) -> AbstractContextManager[object]:
    return _hurt(scene.units[1], "slow", factor=4)


@contextmanager
def _no_redis(scene: Scene) -> Iterator[None]:
    assert scene.redis is not None
    scene.redis.kill()
    try:
        yield
    finally:
        scene.redis.start()


@contextmanager
def _lag(scene: Scene) -> Iterator[None]:
    with _stopped(scene.gate.pid):
        time.sleep(LAG_S)
    yield


def _lost_agent(scene: Scene) -> AbstractContextManager[object]:
    assert scene.agents is not None
    return _stopped(scene.agents.pid(f"{scene.units[0].name}-1"))


@contextmanager
def _other_image(scene: Scene) -> Iterator[None]:
    assert scene.agents is not None
    follower = f"{scene.units[0].name}-1"
    scene.agents.restart(follower, "sha256:other")
    try:
        yield
    finally:
        scene.agents.restart(follower, IMAGE)


def _refusing(scene: Scene) -> AbstractContextManager[object]:
    return _hurt(scene.units[0], "answers", spare_canaries=1)


@contextmanager
def _strangers(scene: Scene) -> Iterator[None]:
    """Somebody asks again and again for a model that nobody serves."""
    with asking(scene.gate.url, 1, model="none"):
        yield


def _broken_streams(scene: Scene) -> AbstractContextManager[object]:
    return _hurt(scene.units[0], "in_stream_error", after_tokens=4)


@contextmanager
def _killed(scene: Scene) -> Iterator[None]:
    unit = scene.units[0]
    unit.kill()
    try:
        yield
    finally:
        unit.restart()
        if scene.agents is not None:
            scene.agents.follow(unit)


def _crowd(scene: Scene) -> AbstractContextManager[object]:
    return asking(scene.gate.url, CROWD, spread_s=CROWD_EVERY_S)


@contextmanager
def _no_descriptors(scene: Scene) -> Iterator[None]:
    """More connections than the gate has descriptors for."""
    with ExitStack() as stack:
        for _ in range(2 * FILES):
            stack.enter_context(socket.create_connection(("127.0.0.1", scene.gate.port), timeout=5.0))
        yield


@contextmanager
def _poison(scene: Scene) -> Iterator[None]:
    with keeping(scene.units):
        asyncio.run(_send_poison(scene.gate.url))
        yield
        # Who has died comes back only while somebody keeps them.
        for unit in scene.units:
            _until_verdict(scene, unit, "up")


async def _send_poison(url: str) -> None:
    async with Connections(url) as way:
        await send_prompt(way)


@contextmanager
def _cut_off(scene: Scene) -> Iterator[None]:
    """No unit answers at all, as when the gate has lost its network."""
    with ExitStack() as stack:
        for unit in scene.units:
            stack.enter_context(_stopped(unit.pid))
        yield


@contextmanager
def _broken_file(scene: Scene) -> Iterator[None]:
    assert scene.units_file is not None
    scene.units_file.write_text("units: 3\n")
    try:
        yield
    finally:
        write_units(scene.units_file, scene.units)


def gate_stopped(scene: Scene) -> AbstractContextManager[object]:
    """The gate stands still: nothing of it answers."""
    return _stopped(scene.gate.pid)


def _until_verdict(scene: Scene, unit: SimUnit, verdict: str) -> None:
    def has_it() -> bool:
        return any(one["name"] == unit.name and one["verdict"] == verdict for one in scene.gate.units())

    if not wait_until(has_it, BACK_S):
        raise RuntimeError(f"unit {unit.name} is not {verdict} after {BACK_S:g} s")


SHARED = (
    Fault("a follower of one of three units is frozen", _wedge, _names("WedgeFound UnitDown Continuations")),
    Fault("a unit goes down and back three times", _flaps, _names("UnitFlapping"), _names("WedgeFound")),
    Fault(
        "a unit refuses what others serve",
        _refusing,
        _names("UnitRefuses"),
        _names("UnitDown UnitFlapping WedgeFound"),
    ),
    Fault("a unit is much slower than its cell", _slow, _names("UnitSlow"), _names("UnitFlapping"), users=9),
)
ALONE = (
    Fault("an agent stands still", _lost_agent, _names("AgentMissing")),
    Fault("a node runs another image", _other_image, _names("StackDrift"), _names("AgentMissing")),
    Fault("streams break, and no other unit can resume them", _broken_streams, _names("StreamsLost")),
    Fault(
        "the only unit is killed, and its recovery fails",
        _killed,
        _names("NoCapacity CellEmpty UnitDown RecoveryGaveUp"),
        _names("StreamsLost AgentMissing"),
        inhibited=_names("UnitDown"),
    ),
)
CROWDED = (
    Fault("Redis is killed", _no_redis, _names("RedisLost")),
    Fault("the gate stands still for half a second", _lag, _names("Lagging")),
    Fault(
        "users come faster than they are served",
        _crowd,
        _names("QueueGrowing"),
        _names("NoCapacity"),
    ),
    Fault("a client asks for what there is not", _strangers, _names("ClientErrors")),
    Fault("the gate runs out of descriptors", _no_descriptors, _names("OwnTrouble"), users=0),
)
POISONED = (
    Fault(
        "a prompt kills the units it comes to",
        _poison,
        _names("Poison"),
        _names("NoCapacity CellEmpty UnitFlapping"),
    ),
    Fault("the file of units is broken", _broken_file, _names("DiscoveryLost")),
    Fault(
        "no unit answers at all", _cut_off, _names("Panic"), _names("NoCapacity CellEmpty UnitDown UnitSlow")
    ),
    Fault("the gate stands still", gate_stopped, _names("Down"), users=0),
)
