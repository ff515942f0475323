"""The simulated world: its time, its network, and one seed that decides everything.

Its transports: tests/laws/test_transport_laws.py.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from tests.sim.chaos import STRIKES, Chaos
from tests.sim.engine import Engine
from tests.sim.loop import START_S, Deadlock
from tests.sim.world import World, played, run

UNIT = "10.9.0.1"
PORT = 80


@pytest.mark.alone
def test_an_hour_of_one_second_timers_takes_no_time_and_ends_on_the_second() -> None:
    world = World(1)

    async def main() -> None:
        for _ in range(3600):
            await asyncio.sleep(1.0)

    began = time.process_time()
    run(world, main())
    assert world.loop.time() == START_S + 3600 + 1  # and the moment of grace
    assert time.process_time() - began < 5.0


def test_timers_and_outside_events_happen_in_the_order_of_their_time() -> None:
    world = World(1)
    seen: list[tuple[str, float]] = []

    def note(what: str) -> None:
        seen.append((what, round(world.loop.time() - START_S, 6)))

    async def main() -> None:
        world.loop.call_later(0.2, note, "timer")
        world.loop.outside(0.1, note, "early")
        world.loop.outside(0.3, note, "late")
        world.loop.outside(0.25, note, "cancelled").cancel()
        await asyncio.sleep(1.0)

    run(world, main())
    assert seen == [("early", 0.1), ("timer", 0.2), ("late", 0.3)]


def test_waiting_for_what_cannot_happen_is_a_deadlock_that_names_the_task() -> None:
    async def hopeless() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="hopeless") as deadlock:
        run(World(77), hopeless())
    assert deadlock.value.__notes__ == ["replay with World(77)"]


def test_a_scenario_longer_than_its_limit_fails() -> None:
    with pytest.raises(Deadlock, match="time limit passed at 1060"):
        run(World(1, limit_s=60.0), asyncio.sleep(61.0))


def test_callbacks_that_call_each_other_for_ever_are_noticed() -> None:
    world = World(1)

    def again() -> None:
        world.loop.call_soon(again)

    async def main() -> None:
        again()
        await asyncio.sleep(1.0)

    with pytest.raises(Deadlock, match="time stands still"):
        run(world, main())


def test_an_exception_in_a_callback_fails_the_scenario() -> None:
    world = World(1)

    async def main() -> None:
        world.loop.call_soon(lambda: 1 / 0)

    with pytest.raises(ExceptionGroup, match="unhandled") as group:
        run(world, main())
    assert isinstance(group.value.exceptions[0], ZeroDivisionError)


def test_a_task_that_fails_unheard_fails_the_scenario_even_while_somebody_holds_it() -> None:
    world = World(1)

    async def fail() -> None:
        raise KeyError("lost")

    async def main() -> asyncio.Task[None]:
        return asyncio.ensure_future(fail())

    with pytest.raises(ExceptionGroup) as group:
        run(world, main())
    assert isinstance(group.value.exceptions[0], KeyError)


@pytest.mark.parametrize("kind", ["task", "timer", "listener", "transport"])
def test_what_the_program_leaves_behind_is_a_leak(kind: str) -> None:
    world = World(1)
    kept: list[object] = []

    async def main() -> None:
        loop = world.loop
        if kind == "task":
            kept.append(loop.create_task(asyncio.sleep(100.0)))
        elif kind == "timer":
            loop.call_later(100.0, print)
        else:
            server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
            await loop.create_connection(asyncio.Protocol, *server.sockets[0].getsockname())
            if kind == "transport":
                server.close()

    with pytest.raises(AssertionError, match=kind):
        run(world, main())


class Peer(asyncio.Protocol):
    """Remembers what it got and when; `echo` sends it back."""

    transport: asyncio.Transport

    def __init__(self, world: World, *, echo: bool = False) -> None:
        self.world = world
        self.echo = echo
        self.data = b""
        self.reads: list[tuple[float, int]] = []
        self.lost: asyncio.Future[Exception | None] = world.loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.reads.append((self.world.loop.time() - START_S, len(data)))
        self.world.trace.note("read", len(data))
        if self.echo:
            self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)


class Scene:
    """A server at `UNIT` that echoes, and a client on the gate's host."""

    def __init__(self, seed: int = 1) -> None:
        self.world = World(seed)
        self.net = self.world.net
        self.net.names["unit"] = [UNIT]
        self.served: list[Peer] = []
        self.net.listen(self._accept, UNIT, PORT, is_outside=True)

    def _accept(self) -> Peer:
        self.served.append(Peer(self.world, echo=True))
        return self.served[-1]

    async def connect(self, host: str = "unit") -> Peer:
        _, peer = await self.world.loop.create_connection(lambda: Peer(self.world), host, PORT)
        return cast(Peer, peer)

    async def close(self, *peers: Peer) -> None:
        for peer in peers:
            peer.transport.abort()
            await peer.lost

    def play(self, main: Coroutine[Any, Any, None]) -> None:
        run(self.world, main)


@pytest.mark.parametrize("place", ["unit", f"unit:{PORT}", UNIT, f"{UNIT}:{PORT}"])
@played(Scene)
async def test_refusing_holds_for_the_place_until_it_is_healed(scene: Scene, place: str) -> None:
    scene.net.refuse(place)
    with pytest.raises(ConnectionRefusedError):
        await scene.connect()
    scene.net.heal(place)
    await scene.close(await scene.connect())


@played(Scene)
async def test_a_partition_holds_bytes_and_ends_until_it_is_healed(scene: Scene) -> None:
    peer = await scene.connect()
    scene.net.partition("gate", "unit")
    peer.transport.write(b"held")
    connect = scene.world.loop.create_task(scene.connect())
    await asyncio.sleep(60.0)
    assert (peer.data, connect.done()) == (b"", False)
    scene.net.heal()
    other = await connect
    await asyncio.sleep(1.0)
    assert peer.data == b"held"
    scene.net.partition("unit")
    peer.transport.abort()
    await asyncio.sleep(60.0)
    assert not scene.served[0].lost.done()
    scene.net.heal("unit")
    assert await scene.served[0].lost is None
    await scene.close(other)


@played(Scene)
async def test_a_partition_concerns_only_its_two_places(scene: Scene) -> None:
    scene.net.partition("client", "unit")
    await scene.close(await scene.connect())


@played(Scene)
async def test_healing_with_reset_breaks_the_connections_that_had_bytes_on_the_way(scene: Scene) -> None:
    busy, quiet = await scene.connect(), await scene.connect()
    await asyncio.sleep(1.0)
    scene.net.partition("gate", "unit")
    busy.transport.write(b"x")
    await asyncio.sleep(5.0)
    scene.net.heal(reset=True)
    assert isinstance(await busy.lost, ConnectionResetError)
    await scene.close(quiet)


def test_writes_arrive_split_and_joined_over_the_seeds() -> None:
    split = joined = whole = 0
    for seed in range(20):
        scene = Scene(seed)

        async def main(scene: Scene = scene) -> None:
            peer = await scene.connect()
            for _ in range(50):
                peer.transport.write(b"x" * 100)
                await asyncio.sleep(0.005)
            await asyncio.sleep(1.0)
            await scene.close(peer)

        scene.play(main())
        sizes = [size for _, size in scene.served[0].reads]
        assert sum(sizes) == 5000
        split += sum(size < 100 for size in sizes)
        joined += sum(size > 100 for size in sizes)
        whole += sum(size == 100 for size in sizes)
    assert min(split, joined, whole) > 20


def test_every_strike_strikes_somewhere() -> None:
    struck: set[str] = set()
    for seed in range(4):
        world = World(seed)
        Chaos(world, [Engine(world, "a")], pause_s=(0.1, 0.2), lasting_s=(0.1, 0.2))
        run(world, asyncio.sleep(30.0))
        struck |= {line.split("'")[3] for line in world.trace.last if " strike " in line}
    assert struck == set(STRIKES)


def trace_of(seed: int) -> int:
    """The digest of a small scenario with traffic and faults."""
    scene = Scene(seed)

    async def talk(rounds: int) -> None:
        peer = await scene.connect()
        for _ in range(rounds):
            if peer.lost.done():
                return
            peer.transport.write(b"x" * scene.world.rng.randrange(1, 5000))
            await asyncio.sleep(scene.world.rng.random())
        await scene.close(peer)

    async def main() -> None:
        talks = [asyncio.ensure_future(talk(10)) for _ in range(5)]
        await asyncio.sleep(3.0)
        scene.net.partition("gate", "unit")
        await asyncio.sleep(3.0)
        scene.net.heal()
        scene.net.reset("unit")
        await asyncio.gather(*talks)

    scene.play(main())
    return scene.world.trace.digest


def test_a_seed_decides_everything_in_every_process() -> None:
    assert trace_of(1) != trace_of(2)
    code = "from tests.sim.test_world import trace_of; print(trace_of(1))"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    }
    assert digests == {str(trace_of(1))}
