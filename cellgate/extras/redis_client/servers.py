"""`RedisClient`: what the gate wants of a Redis, however many servers it is: batches and one channel.

Every command has one key, so that a Cluster can take each of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from redis.asyncio import Redis
from redis.asyncio.client import PubSub

EXCHANGE_S = 1.0
"""How long one exchange may take before the connection is given up."""

Command = tuple[str | bytes | int, ...]


class RedisClient(Protocol):
    """One user's connections. Errors are those of redis-py, or TimeoutError."""

    async def exchange(self, commands: Sequence[Command], limit_s: float = EXCHANGE_S, /) -> list[Any]:
        """The answers to these commands; an error of the server stands in the place of an answer."""

    async def pubsub(self) -> PubSub:
        """For messages of a channel that any client of this Redis publishes."""

    async def disconnect(self) -> None:
        """Close all connections; the next exchange makes new ones."""


class ServerClient:
    """One server, or the primary that `sentinels` name, who are asked for each connection."""

    def __init__(self, redis: Redis, sentinels: Sequence[Redis] = ()) -> None:
        self._redis = redis
        self._sentinels = sentinels

    async def exchange(self, commands: Sequence[Command], limit_s: float = EXCHANGE_S) -> list[Any]:
        """The answers to these commands; an error of the server stands in the place of an answer."""
        batch = self._redis.pipeline(transaction=False)
        for command in commands:
            batch.execute_command(*command)
        # A cancelled exchange closes its connection, so no later one reads its answers.
        async with asyncio.timeout(limit_s):
            return await batch.execute(raise_on_error=False)

    async def pubsub(self) -> PubSub:
        """For messages of a channel."""
        return self._redis.pubsub(ignore_subscribe_messages=True)

    async def disconnect(self) -> None:
        """Close all connections. Raises the first error once all were tried."""
        pools = [each.connection_pool for each in (self._redis, *self._sentinels)]
        for ended in await asyncio.gather(*(pool.disconnect() for pool in pools), return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended


async def answered(
    client: RedisClient, commands: Sequence[Command], limit_s: float = EXCHANGE_S
) -> list[Any]:
    """As `exchange`, for commands that must all succeed. Raises the first error of the server."""
    answers = await client.exchange(commands, limit_s)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers
