"""Workers that share a listener: who accepts those that wait on it, and when."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from cellgate.proxy.config.settings import Address
from cellgate.proxy.http.turns import accept_queue
from cellgate.proxy.workers.worker import Page, SharedEntrance

HERE = Address("127.0.0.1", 0)
FEW_TURNS = 8


class Worker:
    """One that accepts on its own copy of the listener. `clients` are those it has."""

    def __init__(self, page: Page, number: int) -> None:
        self.clients: list[asyncio.Protocol] = []
        loop = asyncio.get_running_loop()
        self.entrance = SharedEntrance(loop, self._connection, page, number, lambda: len(self.clients), print)

    def _connection(self) -> asyncio.Protocol:
        self.clients.append(asyncio.Protocol())
        return self.clients[-1]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as made:
        made.setblocking(False)
        yield made


def arrive(stack: ExitStack, listener: socket.socket, clients: int) -> None:
    """So many clients connect, and wait."""
    for _ in range(clients):
        stack.enter_context(socket.create_connection(listener.getsockname()))


def test_how_many_wait_on_a_listener(listener: socket.socket) -> None:
    with ExitStack() as stack:
        assert accept_queue(listener) == 0
        arrive(stack, listener, 7)
        assert accept_queue(listener) == 7
        listener.accept()[0].close()
        assert accept_queue(listener) == 6


def test_of_a_socket_that_is_no_tcp_it_is_taken_for_one(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"{tmp_path}/socket")
        other.listen()
        assert accept_queue(other) == 1


def clients_of_each(listener: socket.socket, had: Sequence[int], waiting: int) -> list[int]:
    """So many wait when workers that had so many clients begin to accept: what each has a few turns later."""

    async def played() -> list[int]:
        page = Page(len(had))
        crew = [Worker(page, number) for number in range(len(had))]
        with ExitStack() as stack:
            arrive(stack, listener, waiting)
            for worker, count in zip(crew, had, strict=True):
                worker.clients += [asyncio.Protocol() for _ in range(count)]
                await worker.entrance.open(HERE, [listener.dup()], None, 0)
            for _ in range(FEW_TURNS):
                await asyncio.sleep(0)
            counts = [len(worker.clients) for worker in crew]
            for worker in crew:
                worker.entrance.close()
            return counts

    return asyncio.run(played())


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_all_that_wait_are_accepted_in_a_few_turns_as_many_by_each(
    listener: socket.socket, workers: int
) -> None:
    assert clients_of_each(listener, [0] * workers, 30) == [30 // workers] * workers


def test_who_has_more_clients_leaves_those_that_wait_to_the_other(listener: socket.socket) -> None:
    assert clients_of_each(listener, [5, 0], 3) == [5, 3]
