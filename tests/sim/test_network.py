"""The simulated network: what its faults do to connections, and that a seed decides everything."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import socket
import subprocess
import sys
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from tests.sim.loop import START_S
from tests.sim.network import GATE
from tests.sim.tcp import WINDOW, Link
from tests.sim.world import World, played, run

UNIT = "10.9.0.1"
PORT = 80


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


async def nap(delay_s: float) -> None:
    await asyncio.sleep(delay_s)


@played(Scene)
async def test_the_resolver_knows_names_and_can_fail(scene: Scene) -> None:
    await scene.close(await scene.connect("unit"), await scene.connect(UNIT))
    with pytest.raises(socket.gaierror) as unknown:
        await scene.connect("nobody")
    assert unknown.value.errno == socket.EAI_NONAME
    scene.net.fail_resolver("unit")
    with pytest.raises(socket.gaierror) as failed:
        await scene.connect("unit")
    assert failed.value.errno == socket.EAI_AGAIN
    scene.net.heal()
    assert (await scene.world.loop.getaddrinfo("unit", PORT))[0][4] == (UNIT, PORT)


@played(Scene)
async def test_a_name_with_two_addresses_is_tried_at_both(scene: Scene) -> None:
    scene.net.names["pair"] = ["10.9.0.9", UNIT]
    await scene.close(await scene.connect("pair"))
    scene.net.refuse(UNIT)
    with pytest.raises(ConnectionRefusedError):
        await scene.connect("pair")


@pytest.mark.parametrize("place", ["unit", f"unit:{PORT}", UNIT, f"{UNIT}:{PORT}"])
@played(Scene)
async def test_refusing_holds_for_the_place_until_it_is_healed(scene: Scene, place: str) -> None:
    scene.net.refuse(place)
    with pytest.raises(ConnectionRefusedError):
        await scene.connect()
    scene.net.heal(place)
    await scene.close(await scene.connect())


@played(Scene)
async def test_a_black_hole_never_answers_and_a_cancelled_connect_leaves_nothing(scene: Scene) -> None:
    scene.net.blackhole("unit")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(scene.connect(), 30.0)
    assert scene.world.loop.time() >= START_S + 30
    assert scene.served == []


@played(Scene)
async def test_a_host_without_file_descriptors_cannot_connect_anywhere(scene: Scene) -> None:
    scene.net.exhaust_files("gate")
    with pytest.raises(OSError, match="Too many open files") as full:
        await scene.connect()
    assert full.value.errno == errno.EMFILE
    with scene.world.at("client"):
        await scene.close(await scene.connect())


@played(Scene)
async def test_connections_come_from_the_host_that_the_code_is_on(scene: Scene) -> None:
    with scene.world.at("client"):
        task = scene.world.loop.create_task(scene.connect())
    peers = [await scene.connect(), await task]
    hosts = [peer.transport.get_extra_info("sockname")[0] for peer in peers]
    assert hosts == [GATE, scene.net.canonical("client")]
    await scene.close(*peers)


@played(Scene)
async def test_a_partition_holds_bytes_and_ends_until_it_is_healed(scene: Scene) -> None:
    peer = await scene.connect()
    scene.net.partition("gate", "unit")
    peer.transport.write(b"held")
    connect = scene.world.loop.create_task(scene.connect())
    await nap(60.0)
    assert (peer.data, connect.done()) == (b"", False)
    scene.net.heal()
    other = await connect
    await nap(1.0)
    assert peer.data == b"held"
    scene.net.partition("unit")
    peer.transport.abort()
    await nap(60.0)
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
    await nap(1.0)
    scene.net.partition("gate", "unit")
    busy.transport.write(b"x")
    await nap(5.0)
    scene.net.heal(reset=True)
    assert isinstance(await busy.lost, ConnectionResetError)
    await scene.close(quiet)


@played(Scene)
async def test_killing_a_place_resets_its_connections_and_refuses_new_ones(scene: Scene) -> None:
    peers = [await scene.connect() for _ in range(3)]
    await nap(1.0)
    scene.net.kill("unit")
    for peer in (*peers, *scene.served):
        assert isinstance(await peer.lost, ConnectionResetError)
    with pytest.raises(ConnectionRefusedError):
        await scene.connect()


@played(Scene)
async def test_half_closing_a_place_ends_its_sending_and_not_its_hearing(scene: Scene) -> None:
    peer = await scene.connect()
    await nap(1.0)
    scene.served[0].echo = False
    scene.net.half_close("unit")
    assert await peer.lost is None  # Its protocol answers the end by closing.
    await nap(1.0)


@played(Scene)
async def test_a_slow_link_takes_its_time(scene: Scene) -> None:
    peer = await scene.connect()
    scene.net.slow("unit", bytes_per_s=1000.0)
    peer.transport.write(b"x" * 5000)
    while len(peer.data) < 5000:
        await nap(0.5)
    assert 10.0 < scene.world.loop.time() - START_S < 11.0  # there and back
    await scene.close(peer)


@played(Scene)
async def test_a_reader_that_stops_bounds_what_is_in_flight(scene: Scene) -> None:
    peer = await scene.connect()
    await nap(1.0)
    scene.served[0].transport.pause_reading()
    peer.transport.write(b"x" * 1_000_000)
    await nap(60.0)
    assert peer.transport.get_write_buffer_size() == 1_000_000 - WINDOW
    scene.served[0].transport.resume_reading()
    await nap(60.0)
    assert peer.transport.get_write_buffer_size() == 0
    assert len(peer.data) == 1_000_000
    await scene.close(peer)


def test_writes_arrive_split_and_joined_over_the_seeds() -> None:
    split = joined = whole = 0
    for seed in range(20):
        scene = Scene(seed)

        async def main(scene: Scene = scene) -> None:
            peer = await scene.connect()
            for _ in range(50):
                peer.transport.write(b"x" * 100)
                await nap(0.005)
            await nap(1.0)
            await scene.close(peer)

        scene.play(main())
        sizes = [size for _, size in scene.served[0].reads]
        assert sum(sizes) == 5000
        split += sum(size < 100 for size in sizes)
        joined += sum(size > 100 for size in sizes)
        whole += sum(size == 100 for size in sizes)
    assert min(split, joined, whole) > 20


def test_a_plain_link_delivers_each_write_as_it_was() -> None:
    scene = Scene()
    scene.net.default_link = Link(latency_s=(0.001, 0.001), bytes_per_s=math.inf, split=0.0, hiccup=0.0)

    async def main() -> None:
        peer = await scene.connect()
        for size in (10, 20, 30):
            peer.transport.write(b"x" * size)
            await nap(0.01)
        await scene.close(peer)

    scene.play(main())
    assert [size for _, size in scene.served[0].reads] == [10, 20, 30]


def trace_of(seed: int) -> str:
    """The digest of a small scenario with traffic and faults."""
    scene = Scene(seed)

    async def talk(rounds: int) -> None:
        peer = await scene.connect()
        for _ in range(rounds):
            if peer.lost.done():
                return
            peer.transport.write(b"x" * scene.world.rng.randrange(1, 5000))
            await nap(scene.world.rng.random())
        await scene.close(peer)

    async def main() -> None:
        talks = [asyncio.ensure_future(talk(10)) for _ in range(5)]
        await nap(3.0)
        scene.net.partition("gate", "unit")
        await nap(3.0)
        scene.net.heal()
        scene.net.reset("unit")
        await asyncio.gather(*talks)

    scene.play(main())
    return scene.world.trace.digest


def test_a_seed_decides_everything() -> None:
    assert trace_of(1) == trace_of(1)
    assert trace_of(1) != trace_of(2)


def test_a_seed_decides_everything_in_every_process() -> None:
    code = "from tests.sim.test_network import trace_of; print(trace_of(1))"
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
    assert digests == {trace_of(1)}
