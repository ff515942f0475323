"""Who comes in, and when: on a real listener and the loop that the gate uses."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from typing import cast

import pytest

from cellgate.proxy.config.settings import Address
from cellgate.proxy.process.listeners import AT_ONCE, Entrance, listen
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
@live
async def test_a_crowd_is_let_in_within_a_few_turns(clients: int) -> None:
    made = await turns_taken(clients, rooms=2 * clients)
    assert len(made) == clients
    assert made[-1] - made[0] <= 2 * (1 + clients // AT_ONCE)


@pytest.mark.parametrize("rooms", [1, 2, 50])
@live
async def test_of_a_crowd_no_more_are_let_in_than_there_is_room_for(rooms: int) -> None:
    assert len(await turns_taken(3 * AT_ONCE, rooms)) == rooms
