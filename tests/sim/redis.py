"""A Redis in the simulated world: what gates say to each other, as far as they use it. It may be away."""

from __future__ import annotations

import asyncio
import builtins
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Self, cast

from redis.asyncio.client import PubSub
from redis.exceptions import ConnectionError as RedisConnectionError

from cellgate.extras.redis_client.servers import EXCHANGE_S, Command, RedisClient

if TYPE_CHECKING:
    from tests.sim.world import World

TRIP_S = (0.0002, 0.002)
HANGS_S = 60.0
LOOK_AGAIN_S = 0.05


class SimRedis:
    """`is_away`: it refuses. `hangs`: it takes what is said and answers nothing."""

    def __init__(self, world: World) -> None:
        self.is_away = self.hangs = False
        self.ears: dict[_Ear, None] = {}
        self._world = world
        self._documents: dict[str, tuple[bytes, float]] = {}
        self._sets: dict[str, builtins.set[bytes]] = {}
        self._hashes: dict[str, tuple[dict[bytes, bytes], float]] = {}

    def client(self) -> RedisClient:
        """What a gate takes for a Redis."""
        return _Client(self)

    def forget(self) -> None:
        """It comes back empty."""
        self._documents.clear()
        self._sets.clear()
        self._hashes.clear()

    async def trip(self) -> None:
        """One way there and back. Raises redis-py's ConnectionError."""
        await asyncio.sleep(HANGS_S if self.hangs else self._world.rng.uniform(*TRIP_S))
        self.check()

    def check(self) -> None:
        """Raises redis-py's ConnectionError when it is away."""
        if self.is_away:
            raise RedisConnectionError("Connection refused")

    # Commands

    def do(self, command: Command) -> Any:
        """The answer to a command, as it goes over the wire."""
        word, *args = command
        # `del` is a keyword.
        return getattr(self, "delete" if word == "DEL" else str(word).lower())(*args)

    def set(self, key: str, document: bytes, _px: str, expiry_ms: int) -> bool:
        self._documents[key] = document, self._world.loop.time() + expiry_ms / 1000.0
        return True

    def get(self, key: str) -> bytes | None:
        return self._documents[key][0] if self.pttl(key) > 0 else None

    def mget(self, *keys: str) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def pttl(self, key: str) -> int:
        _, expires_at = self._documents.get(key, (b"", 0.0))
        left_ms = round(1000.0 * (expires_at - self._world.loop.time()))
        return left_ms if left_ms > 0 else -2

    def smembers(self, key: str) -> builtins.set[bytes]:
        return builtins.set(self._sets.get(key, ()))

    def sscan(self, key: str, cursor: bytes, _count: str, number: int) -> tuple[bytes, builtins.set[bytes]]:
        members, at = sorted(self._sets.get(key, ())), int(cursor)
        end = at + number if at + number < len(members) else 0
        return str(end).encode(), builtins.set(members[at : at + number])

    def scard(self, key: str) -> int:
        return len(self._sets.get(key, ()))

    def sadd(self, key: str, member: str) -> int:
        self._sets.setdefault(key, builtins.set()).add(member.encode())
        return 1

    def srem(self, key: str, member: str) -> int:
        self._sets.get(key, builtins.set()).discard(member.encode())
        return 1

    def delete(self, key: str) -> int:
        return int(self._documents.pop(key, None) is not None)

    def hset(self, key: str, *pairs: str | bytes) -> int:
        fields = self._hashes.setdefault(key, ({}, inf))[0]
        names, values = pairs[::2], pairs[1::2]
        fields |= {str(name).encode(): bytes(value) for name, value in zip(names, values, strict=True)}  # type: ignore[arg-type]
        return len(names)

    def hdel(self, key: str, *names: str) -> int:
        fields = self._fields(key)
        return sum(fields.pop(name.encode(), None) is not None for name in names)

    def hscan(self, key: str, _cursor: int, _count: str, _number: int) -> tuple[int, dict[bytes, bytes]]:
        return 0, dict(self._fields(key))

    def pexpire(self, key: str, expiry_ms: int) -> int:
        fields = self._fields(key)
        if fields:
            self._hashes[key] = fields, self._world.loop.time() + expiry_ms / 1000.0
        return bool(fields)

    def _fields(self, key: str) -> dict[bytes, bytes]:
        fields, expires_at = self._hashes.get(key, ({}, inf))
        return fields if expires_at > self._world.loop.time() else {}

    def publish(self, channel: str, document: bytes) -> int:
        for ear in self.ears:
            ear.heard.append(document)
        return len(self.ears)


class _Client:
    def __init__(self, redis: SimRedis) -> None:
        self._redis = redis

    async def exchange(self, commands: Sequence[Command], limit_s: float = EXCHANGE_S) -> list[Any]:
        async with asyncio.timeout(limit_s):
            await self._redis.trip()
        return [self._redis.do(command) for command in commands]

    async def pubsub(self) -> PubSub:
        return cast(PubSub, _Ear(self._redis))

    async def disconnect(self) -> None:
        """It has no connections."""


class _Ear:
    """One subscription."""

    def __init__(self, redis: SimRedis) -> None:
        self._redis = redis
        self.heard: deque[bytes] = deque()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._redis.ears.pop(self, None)

    async def subscribe(self, channel: str) -> None:
        await self._redis.trip()
        self._redis.ears[self] = None

    async def get_message(self, *, timeout: float) -> dict[str, bytes] | None:  # noqa: ASYNC109 - as redis-py
        for _ in range(round(timeout / LOOK_AGAIN_S)):
            self._redis.check()
            if self.heard and not self._redis.hangs:
                return {"data": self.heard.popleft()}
            await asyncio.sleep(LOOK_AGAIN_S)
        return None
