"""Stored responses that gates share over a real Redis: at another gate, after restarts, and forged ones."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson

from cellgate.extras.redis.stored import SharedResponses
from cellgate.extras.redis_client.connect import connector
from cellgate.extras.redis_client.redis_names import Names
from cellgate.extras.redis_client.signing import Signer
from cellgate.proxy.config.settings import RedisAccess
from cellgate.proxy.control.stored_responses import StoredResponses
from tests.real.redis_server import RedisServer
from tests.unit.router.test_dry_run import router_of
from tests.wire.stage import live, until

SECRET = b"a secret of the fleet"
NAMES = [f"resp_{number}" for number in range(60)]


class Gate:
    """What a gate has of stored responses."""

    def __init__(self, url: str, secret: bytes = SECRET) -> None:
        self.stored = StoredResponses(router_of(2).board, keyed=True)
        signer = Signer(secret, must=True, now=time.monotonic)
        self.shared = SharedResponses(self.stored, connector(RedisAccess(url)), Names(), signer)

    async def find(self, payer: str = "alice") -> list[str | None]:
        """The unit that has each of the 60."""
        found = [await self.shared.find(name, payer) for name in NAMES]
        return [None if one is None else one.unit for one in found]


@asynccontextmanager
async def running(*gates: Gate) -> AsyncIterator[None]:
    """They share."""
    for gate in gates:
        gate.shared.start()
    try:
        yield
    finally:
        for gate in gates:
            await gate.shared.close()


@live
async def test_what_one_gate_has_seen_another_finds_also_when_gates_and_redis_were_restarted(
    tmp_path: Path,
) -> None:
    with RedisServer(tmp_path) as redis:
        first, second = Gate(redis.url), Gate(redis.url)
        async with running(first, second):
            for number, name in enumerate(NAMES):
                first.stored.made(name, f"u{number % 2}", "alice")
            await until(lambda: not first.shared._due)
            expected: list[str | None] = [f"u{number % 2}" for number in range(60)]
            assert await second.find() == expected
            assert await second.find("bob") == [None] * 60
        # The first gate ends, another one begins.
        third = Gate(redis.url)
        async with running(third):
            assert await third.find() == expected
            stranger = Gate(redis.url, b"another secret")
            assert await stranger.find() == [None] * 60
            await stranger.shared.close()


@live
async def test_a_redis_that_came_back_empty_is_told_again(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        first, second = Gate(redis.url), Gate(redis.url)
        async with running(first, second):
            for name in NAMES:
                first.stored.made(name, "u1", "alice")
            await until(lambda: not first.shared._due)
            await second.shared._asking.exchange([("FLUSHALL",)])
            assert await second.find() == [None] * 60
            await until(lambda: first.shared.written >= 120)
            assert await second.find() == ["u1"] * 60


@live
async def test_who_writes_in_redis_leads_no_conversation_to_another_unit(tmp_path: Path) -> None:
    """A forged document, and one that was signed for another response."""
    with RedisServer(tmp_path) as redis:
        first, second = Gate(redis.url), Gate(redis.url)
        async with running(first, second):
            first.stored.made("resp_0", "u1", "alice")
            first.stored.made("resp_1", "u0", "mallory")
            await until(lambda: not first.shared._due)
            key, theirs = (second.shared._key(*of) for of in (("resp_0", "alice"), ("resp_1", "mallory")))
            client = second.shared._asking
            (signed,) = await client.exchange([("GET", theirs)])
            for lie in (orjson.dumps({"v": 1, "unit": "u0"}), signed):
                await client.exchange([("SET", key, lie)])
                assert await second.shared.find("resp_0", "alice") is None
