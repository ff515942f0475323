"""A gate that ends leaves no connection to Redis, whatever it was doing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cellgate.proxy.admission.limits import DoorCounts, LimitLedger
from cellgate.proxy.redis.commands import RedisClient, ServerClient
from cellgate.proxy.redis.link import RedisLink
from cellgate.proxy.redis.reports import Names, Roster
from cellgate.proxy.redis.sharing import SharedLimits


class Lost:
    """A client whose server is gone. Its connections take a moment to close."""

    def __init__(self) -> None:
        self.closing = asyncio.Event()
        self.is_closed = False

    async def exchange(self, *_: object) -> list[Any]:
        raise ConnectionError

    async def pubsub(self) -> object:
        raise ConnectionError

    async def disconnect(self) -> None:
        self.closing.set()
        await asyncio.sleep(0.01)
        self.is_closed = True


def link(connect: Callable[[], RedisClient]) -> RedisLink:
    now = asyncio.get_running_loop().time
    return RedisLink(
        connect,
        "g1",
        list,
        Roster("g1", 0.25),
        now=now,
        rng=random.Random(1),
        on_flip=lambda _: None,
        tell=lambda _: None,
        names=Names(),
        all_cells=True,
    )


def limits(connect: Callable[[], RedisClient]) -> SharedLimits:
    ledger = LimitLedger(lambda: 0.0, DoorCounts(frozenset), None)
    return SharedLimits(ledger, connect, Names(), lambda: 1, lambda _: None, random.Random(1))


@pytest.mark.parametrize("make", [link, limits])
def test_who_ends_while_a_lost_server_is_left_closes_all_connections(make: Callable[..., Any]) -> None:
    clients: list[Lost] = []

    def connect() -> RedisClient:
        clients.append(Lost())
        return cast("RedisClient", clients[-1])

    async def scenario() -> None:
        user = make(connect)
        user.start()
        await asyncio.sleep(0)
        await clients[0].closing.wait()
        await user.close()
        assert all(client.is_closed for client in clients)

    asyncio.run(asyncio.wait_for(scenario(), 5.0))


def test_one_server_that_cannot_be_left_keeps_no_connection_to_others_open() -> None:
    closed: list[str] = []

    async def refuse() -> None:
        raise ConnectionError("it does not close")

    async def close() -> None:
        closed.append("sentinel")

    def redis(disconnect: Callable[[], Any]) -> Any:
        return SimpleNamespace(connection_pool=SimpleNamespace(disconnect=disconnect))

    client = ServerClient(redis(refuse), [redis(close)])
    with pytest.raises(ConnectionError, match="it does not close"):
        asyncio.run(client.disconnect())
    assert closed == ["sentinel"]
