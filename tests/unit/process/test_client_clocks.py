"""The clocks of many clients: a tick of the gate stops nobody for long."""

from __future__ import annotations

import asyncio

from cellgate.proxy.gateway import CLIENTS_PER_TURN
from cellgate.proxy.http.server import ClientConnection
from tests.cost.bench import Bench

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


def test_a_tick_that_comes_before_the_last_has_reached_all_lets_it_go_on() -> None:
    assert ticks_by_turn((0, 1.0), (1, 1.25))[-1] == CLIENTS
    assert ticks_by_turn((0, 1.0), (3, 1.25))[-1] == 2 * CLIENTS
