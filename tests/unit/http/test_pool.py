"""Connections to a unit: which is taken, when a new one is opened, and whose fault it is when none comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.unit import IDLE_S, Pool, UnitConnection
from tests.sim.loop import SimLoop
from tests.sim.world import World, run

HOST, PORT = "unit", 8000
URL = f"http://{HOST}:{PORT}"
TIMEOUT_S = 3.0


class Taker:
    """Takes what the pool gives."""

    def __init__(self) -> None:
        self.conn: UnitConnection | None = None
        self.failure: Failure | None = None

    def on_connected(self, conn: UnitConnection) -> None:
        self.conn = conn

    def on_failed(self, failure: Failure) -> None:
        self.failure = failure


class Place:
    """A pool, and units that accept connections and say nothing; `accepted` holds who accepted each."""

    def __init__(self, world: World, url: str = URL) -> None:
        self.world = world
        self.pool = Pool(url, world.loop, connect_timeout_s=TIMEOUT_S, tls=None)
        self.accepted: list[str] = []
        self.listen(HOST)

    def listen(self, host: str) -> None:
        """Let a host listen, under an address of its own."""
        address = self.world.net.add_host(host)

        def accept() -> asyncio.Protocol:
            self.accepted.append(host)
            return asyncio.Protocol()

        self.world.net.listen(accept, address, PORT, is_outside=True)

    async def take(self, *, fresh: bool = False, wait_s: float = 1.0) -> Taker:
        """What the pool gives within a while."""
        taker = Taker()
        self.pool.take(taker, fresh=fresh)
        await asyncio.sleep(wait_s)
        return taker


def played(test: Callable[[Place], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test in a world of its own, at whose end the pool must have left nothing open."""

    def play() -> None:
        world = World(seed=1)

        async def main() -> None:
            place = Place(world)
            await test(place)
            place.pool.close()
            await asyncio.sleep(1.0)
            for conn in tuple(place.pool.connections):
                conn.drop()
            await asyncio.sleep(1.0)
            assert not place.pool.connections

        run(world, main())

    play.__name__ = test.__name__
    return play


@played
async def test_a_connection_that_was_given_back_is_taken_again(place: Place) -> None:
    first = (await place.take()).conn
    assert first is not None
    reused = [first.reused]
    place.pool.give_back(first)
    second = await place.take(wait_s=0.0)
    assert second.conn is first
    assert [*reused, first.reused] == [False, True]
    assert len(place.accepted) == 1


@played
async def test_the_youngest_is_taken_first(place: Place) -> None:
    takers = [await place.take() for _ in range(3)]
    for taker in takers:
        assert taker.conn is not None
        place.pool.give_back(taker.conn)
    again = [(await place.take(wait_s=0.0)).conn for _ in range(3)]
    assert again == [taker.conn for taker in reversed(takers)]


@played
async def test_a_fresh_one_can_be_asked_for(place: Place) -> None:
    first = (await place.take()).conn
    assert first is not None
    place.pool.give_back(first)
    second = (await place.take(fresh=True)).conn
    assert second is not None
    assert second is not first


@played
async def test_one_that_was_idle_too_long_is_closed_and_not_taken(place: Place) -> None:
    first = (await place.take()).conn
    assert first is not None
    place.pool.give_back(first)
    await asyncio.sleep(IDLE_S)
    second = (await place.take()).conn
    assert second is not first
    assert list(place.pool.connections) == [second]


@played
async def test_the_purge_closes_what_is_too_old(place: Place) -> None:
    for _ in range(3):
        conn = (await place.take(fresh=True)).conn
        assert conn is not None
        place.pool.give_back(conn)
    now = place.world.loop.time()
    place.pool.purge(now + IDLE_S - 1.5)
    await asyncio.sleep(0.1)
    assert len(place.pool.connections) == 2
    place.pool.purge()
    await asyncio.sleep(0.1)
    assert len(place.pool.connections) == 0


@played
async def test_one_that_the_unit_has_closed_is_not_taken(place: Place) -> None:
    first = (await place.take()).conn
    assert first is not None
    place.pool.give_back(first)
    place.world.net.reset(HOST)
    await asyncio.sleep(0.1)
    second = (await place.take()).conn
    assert second is not None
    assert second is not first


@played
async def test_what_nobody_waits_for_any_more_is_kept_for_the_next(place: Place) -> None:
    taker = Taker()
    place.pool.take(taker)
    place.pool.cancel(taker)
    await asyncio.sleep(1.0)
    assert taker.conn is None
    other = await place.take(wait_s=0.0)
    assert other.conn is not None
    assert len(place.accepted) == 1


@played
async def test_the_name_is_looked_up_for_each_connection(place: Place) -> None:
    await place.take()
    place.listen("elsewhere")
    place.world.net.names[HOST] = place.world.net.names["elsewhere"]
    await place.take()
    assert place.accepted == [HOST, "elsewhere"]


@played
async def test_a_closed_pool_keeps_nothing_and_lets_what_is_in_use_finish(place: Place) -> None:
    used = (await place.take()).conn
    idle = (await place.take()).conn
    assert used is not None
    assert idle is not None
    place.pool.give_back(idle)
    waiting = Taker()
    place.pool.take(waiting, fresh=True)
    place.pool.close()
    await asyncio.sleep(0.1)
    assert waiting.failure is not None
    assert waiting.failure.kind is FailureKind.EVICTED
    assert (used.usable, idle.usable) == (True, False)
    place.pool.give_back(used)
    assert not used.usable


@played
async def test_a_connection_that_is_closed_before_it_is_used_says_so(place: Place) -> None:
    conn = (await place.take()).conn
    assert conn is not None
    place.world.net.reset(HOST)
    await asyncio.sleep(0.1)
    sink = Taker()
    conn.send(b"GET / HTTP/1.1\r\n\r\n", b"", cast(Any, sink), to_head=False)
    assert sink.failure is not None
    assert sink.failure.kind is FailureKind.CLOSED_EARLY


FAULTS: dict[str, tuple[Callable[[World], None], FailureKind]] = {
    "nobody listens": (lambda world: world.net.kill(HOST), FailureKind.REFUSED),
    "no answer": (lambda world: world.net.blackhole(HOST), FailureKind.CONNECT_TIMEOUT),
    "no route": (lambda world: world.net.fail_connects(HOST, 113), FailureKind.UNREACHABLE),
    "no name": (lambda world: world.net.fail_resolver(HOST), FailureKind.NO_RESOURCES),
    "no descriptors left": (lambda world: world.net.exhaust_files("gate"), FailureKind.NO_RESOURCES),
}


@pytest.mark.parametrize(("strike", "kind"), FAULTS.values(), ids=FAULTS)
def test_a_failed_connect_says_whose_fault_it_is(strike: Callable[[World], None], kind: FailureKind) -> None:
    @played
    async def test(place: Place) -> None:
        strike(place.world)
        taker = await place.take(wait_s=TIMEOUT_S + 1.0)
        assert taker.failure is not None
        assert taker.failure.kind is kind
        assert HOST in taker.failure.message or kind is FailureKind.NO_RESOURCES
        place.world.net.heal()
        if kind is not FailureKind.REFUSED:
            assert (await place.take()).conn is not None

    test()


@pytest.mark.parametrize(
    ("url", "host", "port", "authority"),
    [
        ("http://a", "a", 80, b"a"),
        ("https://a", "a", 443, b"a"),
        ("http://a:8000", "a", 8000, b"a:8000"),
        ("http://[::1]:8000", "::1", 8000, b"[::1]:8000"),
    ],
)
def test_where_a_url_leads(url: str, host: str, port: int, authority: bytes) -> None:
    loop = SimLoop()
    pool = Pool(url, loop, connect_timeout_s=1.0, tls=None)
    loop.close()
    assert (pool.host, pool.port, pool.authority) == (host, port, authority)
