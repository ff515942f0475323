"""Who comes in, and when: listeners, descriptors that run short, and the clocks of many clients."""

from __future__ import annotations

import asyncio
import resource
import socket
from contextlib import ExitStack
from typing import cast

import pytest

from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.config.settings import Address, Settings
from cellgate.proxy.gateway import CLIENTS_PER_TURN
from cellgate.proxy.http.server import ClientConnection
from cellgate.proxy.process import listeners
from cellgate.proxy.process.listeners import (
    AT_ONCE,
    EPISODE_S,
    LISTENER_FRESH_S,
    PAUSE_S,
    WAITS_S,
    Descriptors,
    Entrance,
    Overflow,
    listen,
)
from cellgate.router.nouns import Cell, Fleet, Unit
from tests.cost.bench import Bench
from tests.wire.stage import live

BACKLOG = 1024


class Guest(asyncio.Protocol):
    """A connection that says in which turn of the loop it was made."""

    def __init__(self, made: list[int], turn: list[int]) -> None:
        self._made, self._turn = made, turn

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made.append(self._turn[0])
        cast(asyncio.Transport, transport).abort()


async def turns_taken(clients: int, rooms: int) -> list[int]:
    """In which turn each of those who wait already was let in, where there is room for so many."""
    loop, made, turn = asyncio.get_running_loop(), list[int](), [0]
    (listener,) = listeners = await listen(Address("127.0.0.1", 0), BACKLOG)
    left = iter(range(rooms - 1, -1, -1))
    with ExitStack() as stack:
        for _ in range(clients):
            stack.enter_context(socket.create_connection(listener.getsockname(), 5.0))
        entrance = Entrance(loop, lambda: Guest(made, turn))
        entrance.has_room = lambda _now: next(left)
        await entrance.open(Address("127.0.0.1", 0), listeners, None, BACKLOG)
        for _ in range(2 * clients):
            turn[0] += 1
            await asyncio.sleep(0)
        entrance.close()
    return made


@pytest.mark.parametrize("clients", [1, AT_ONCE, 5 * AT_ONCE])
@pytest.mark.parametrize("rooms", [1, 2, 50, 10 * AT_ONCE])
@live
async def test_a_crowd_is_let_in_within_a_few_turns_where_there_is_room(clients: int, rooms: int) -> None:
    made = await turns_taken(clients, rooms)
    assert len(made) == min(clients, rooms)
    assert made[-1] - made[0] <= 2 * (1 + clients // AT_ONCE)


# Descriptors: whether they are enough at start, and who comes in while they run short.

SETTINGS = Settings(Fleet((Cell("c"),), tuple(Unit(name, "c", f"http://{name}") for name in "ab")))
"""Two units of 256 requests each."""


class Process:
    """One that may have 100 descriptors, of which 8 are kept. `told` is what its operator heard."""

    def __init__(self, used: int) -> None:
        self.used = used
        self.told: list[str] = []
        self.counted = 0
        self.idle = 0
        self.unopened = 0
        self.descriptors = Descriptors(
            100, self.told.append, self._make_room, self._count, lambda: self.unopened
        )

    def _make_room(self, most: int) -> int:
        freed = min(most, self.idle)
        self.idle -= freed
        self.used -= freed
        return freed

    def _count(self) -> int:
        self.counted += 1
        return self.used

    def accepted(self, now: float = 0.0, most: int = 200) -> int:
        """How many come in one after the other before nobody may; each that comes has a descriptor."""
        for number in range(most):
            if not self.descriptors.has_room(now):
                return number
            self.used += 1
        return most


def test_of_those_that_come_at_once_no_more_are_accepted_than_can_have_a_unit_each() -> None:
    process = Process(used=20)
    accepted = process.accepted()
    assert 30 <= accepted <= 36
    assert process.used + accepted <= 92
    process.used = 30
    assert process.accepted(2.0 * LISTENER_FRESH_S) > 10, "who left makes room"
    process = Process(used=20)
    accepted = sum(process.accepted(now, most=2) for now in range(1, 100))
    assert process.used == 20 + accepted >= 88, "clients that ask nothing need one each"


def test_who_came_long_ago_and_has_no_unit_yet_needs_a_descriptor_still() -> None:
    process = Process(used=50)
    process.unopened = 45
    assert process.accepted(10.0 * LISTENER_FRESH_S) == 0, "where the gate lags, it may be about to ask"
    process.unopened = 20
    assert process.accepted(20.0 * LISTENER_FRESH_S) > 3


def test_who_waits_for_half_a_second_is_turned_away_and_a_wave_that_is_over_sooner_only_waits() -> None:
    overflow = Overflow()
    looks = [n * PAUSE_S for n in range(20)]
    found = [overflow.is_due(at, True) for at in looks]
    assert looks[found.index(True)] == pytest.approx(WAITS_S)
    assert all(found[found.index(True) :])
    assert overflow.is_still_due(looks[-1] + PAUSE_S)
    assert not overflow.is_due(looks[-1] + PAUSE_S, False), "the queue was empty"
    overflow = Overflow()
    assert not any(overflow.is_due(at, at % 0.4 > 0.05) for at in looks)
    assert not overflow.is_still_due(looks[-1])


def test_the_operator_hears_once_of_one_shortage() -> None:
    process = Process(used=93)
    assert not any(process.descriptors.has_room(float(now)) for now in range(30))
    assert process.told == [
        "93 of 100 file descriptors are in use, and clients that are here may need 1 more: connections "
        "without a request are closed for new ones, and while there are none to close clients get 503"
    ]
    assert not process.descriptors.has_room(30.0 + EPISODE_S)
    assert len(process.told) == 2


def test_idle_connections_make_way_for_those_who_come() -> None:
    process = Process(used=92)
    process.idle = 50
    # Whoever comes may need one to a unit as well.
    assert 20 <= process.accepted(now=10.0) < 50
    assert process.used <= 96
    assert process.idle == 0


def test_to_count_is_rare_while_there_is_room() -> None:
    process = Process(used=100)
    many = Descriptors(65536, process.told.append, process._make_room, process._count)
    assert all(many.has_room(number / 1000.0) for number in range(50_000))
    assert process.counted < 6
    process.used = 1_000_000
    without_limit = Descriptors(None, process.told.append, process._make_room, process._count)
    assert without_limit.has_room(0.0)


@pytest.mark.parametrize(
    ("most", "workers", "said"),
    [
        (1024, 1, None),
        (63, 1, "workers: 1 requires 64 file descriptors, and the limit is 63; raise it with `ulimit -n`"),
        (100, 60, "workers: 60 requires 184 file descriptors, and the limit is 100 (enough for 18); raise"),
        (resource.RLIM_INFINITY, 1000, None),
    ],
)
def test_too_few_for_the_processes_themselves_is_one_line_at_start(
    most: int, workers: int, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most, 4096))
    if said is None:
        listeners.check(workers)
    else:
        with pytest.raises(ConfigError) as error:
            listeners.check(workers)
        assert error.value.problems[0].startswith(said)
        assert "up to 4096 without privileges" in error.value.problems[0]


def test_too_few_for_what_units_take_is_said_with_the_limit_and_how_to_raise_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    line = listeners.shortage(SETTINGS)
    said = "1024 file descriptors are enough for about 480 requests at a time, but the units take 512"
    assert line.startswith(said)
    assert "`ulimit -n` (up to 4096 without privileges)" in line
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1088, 4096))
    assert not listeners.shortage(SETTINGS)


# The clocks of many clients: a tick of the gate stops nobody for long.

CLIENTS = 2 * CLIENTS_PER_TURN + 10


class Clocked(ClientConnection):
    """A client whose clocks were checked at these times."""

    ticks: list[float]
    __slots__ = ("ticks",)

    def tick(self, now: float) -> None:
        self.ticks.append(now)


def ticks_by_turn(*ticks: tuple[int, float]) -> list[int]:
    """The gate ticks in these turns of its loop, at these times: clocks checked after each turn."""

    async def played() -> list[int]:
        loop = asyncio.get_running_loop()
        bench = Bench(loop)
        try:
            clients = [Clocked(bench.gateway) for _ in range(CLIENTS)]
            for client in clients:
                client.ticks = list[float]()
            bench.gateway.clients = dict.fromkeys(clients)
            seen, due = list[int](), dict(ticks)
            for turn in range(5):
                if turn in due:
                    bench.gateway._tick_clients(due[turn])
                await asyncio.sleep(0)
                seen.append(sum(len(client.ticks) for client in clients))
            return seen
        finally:
            bench.close()

    return asyncio.run(played())


def test_one_turn_checks_the_clocks_of_a_bounded_number_of_clients() -> None:
    # The first part is done in the tick, the next in the turn that follows at once.
    assert ticks_by_turn((0, 1.0)) == [2 * CLIENTS_PER_TURN, CLIENTS, CLIENTS, CLIENTS, CLIENTS]
    # A tick that comes before the last has reached all lets it go on.
    assert ticks_by_turn((0, 1.0), (1, 1.25))[-1] == CLIENTS
    assert ticks_by_turn((0, 1.0), (3, 1.25))[-1] == 2 * CLIENTS
