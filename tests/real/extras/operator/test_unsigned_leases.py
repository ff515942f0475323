"""Somebody who may write in Redis, and is no gate: he orders no roll, restarts nothing, holds no lease."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from cellgate.extras.operator.leadership import Document, Leadership
from cellgate.extras.operator.roll_plan import (
    Order,
    Phase,
    Roll,
    UnitRoll,
    order_document,
    roll_document,
)
from cellgate.extras.operator.shared_roll import ORDERS, ROLL_KEPT_S, ROLL_LEASE, SCOPE, SharedRoll
from cellgate.extras.redis_client.connect import connector
from cellgate.extras.redis_client.redis_names import Names
from cellgate.extras.redis_client.signing import Signer
from cellgate.proxy.config.settings import RedisAccess
from tests.real.redis_server import RedisServer
from tests.wire.stage import live_for, until

LIMIT_S = 60.0
SECRET = b"a secret of the fleet"
LEASES, LIST = Names().acting(SCOPE), Names().prefix + ORDERS
START = order_document(Order("start", "op", id="1"))
ROLL = roll_document(Roll("r1", "op", 1, (UnitRoll("u", "c", Phase.WAITING),)))
FAR_MS = b"9" * 18


class Gate:
    """One gate's part of a roll, and what it has said of lies. `late_s`: how far its clock is behind."""

    def __init__(self, name: str, url: str, late_s: float = 0.0) -> None:
        self.name = name
        self.lies: list[str] = []
        self.leadership = Leadership(
            connector(RedisAccess(url)),
            name,
            Names(),
            now=asyncio.get_running_loop().time,
            rng=random.Random(name),
            on_leading=lambda _scope, _token: None,
            on_document=self._hear,
            on_forged=lambda _scope, what: self.lies.append(what),
            signer=Signer(SECRET, must=True),
        )
        self.roll = SharedRoll(self.leadership)
        self.leadership.signer._wall = lambda wall=self.leadership.signer._wall: wall() - late_s  # type: ignore[misc]
        self.leadership.start()
        self.roll.stand(willing=True)

    def _hear(self, document: Document) -> None:
        self.roll.hear(document)


@asynccontextmanager
async def conducting(redis: RedisServer, *names: str) -> AsyncIterator[list[Gate]]:
    """Gates, the one that conducts first."""
    gates = [Gate(name, redis.url) for name in names]
    try:
        await until(lambda: sum(gate.roll.conducts() for gate in gates) == 1)
        yield sorted(gates, key=lambda gate: not gate.roll.conducts())
    finally:
        for gate in gates:
            await gate.leadership.close()


@live_for(LIMIT_S)
async def test_an_order_that_no_gate_has_signed_or_that_was_carried_out_is_removed(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        async with conducting(redis, "g1", "g2") as (one, other):
            redis.do("RPUSH", LIST, START, b"x" * 1_000_000, b'{"gate":"g1",' + START[1:])
            assert await one.roll.asked() is None
            assert redis.do("LLEN", LIST) == 0
            assert "an order that no gate has signed" in one.lies[-1]
            # One that was asked of the other gate, and is put there again.
            await other.roll.ask(START)
            signed = redis.do("LINDEX", LIST, "0")
            asked = await one.roll.asked() or b"{}"
            assert orjson.loads(asked)["id"] == "1"
            assert await one.roll.asked() == asked, "it is not done yet"
            await one.roll.done(asked)
            redis.do("RPUSH", LIST, signed)
            assert await one.roll.asked() is None
            # A key of another kind is no list.
            redis.do("SET", LIST, "x")
            assert await one.roll.asked() is None
            await other.roll.ask(START)
            assert await one.roll.asked() is not None


@live_for(LIMIT_S)
async def test_a_roll_that_no_gate_has_written_is_removed_and_an_older_one_does_not_come_back(
    tmp_path: Path,
) -> None:
    with RedisServer(tmp_path) as redis:
        async with conducting(redis, "g1", "g2") as (one, other):
            await one.roll.write(ROLL)
            await until(lambda: other.roll.latest() == ROLL)
            first = redis.do("HGET", LEASES, f"of:{ROLL_LEASE}")
            paused = ROLL.replace(b'"running"', b'"paused"')
            await one.roll.write(paused)
            await until(lambda: other.roll.latest() == paused)
            said = redis.do("HGET", LEASES, f"of:{ROLL_LEASE}")
            now_ms = int(said.partition(b":")[0])
            for lie in (b"%d:" % (now_ms + 9) + ROLL, b"%d:" % (now_ms + 9) + first.partition(b":")[2]):
                redis.do("HSET", LEASES, f"of:{ROLL_LEASE}", lie)
                await until(lambda: redis.do("HGET", LEASES, f"of:{ROLL_LEASE}") == said)
                assert one.roll.latest() == other.roll.latest() == paused
            redis.do("HSET", LEASES, f"of:{ROLL_LEASE}", FAR_MS + b":" + ROLL, "of:big", b"x" * 2_000_000)
            await until(lambda: redis.do("HGETALL", LEASES).get(f"of:{ROLL_LEASE}".encode()) == said)
            assert redis.do("HGET", LEASES, "of:big") is None
            assert other.lies or one.lies


@live_for(LIMIT_S)
@pytest.mark.parametrize("is_over", [True, False])
async def test_an_old_roll_does_not_go_on_at_a_gate_that_begins(is_over: bool, tmp_path: Path) -> None:
    roll = ROLL.replace(b'"running"', b'"stopped"') if is_over else ROLL
    with RedisServer(tmp_path) as redis:
        old = Gate("g1", redis.url, late_s=2 * ROLL_KEPT_S)
        await until(old.roll.conducts)
        await old.roll.write(roll)
        await old.leadership.close()
        async with conducting(redis, "g2") as (new,):
            await until(lambda: not new.leadership.trouble)
            assert new.roll.latest() == (roll if is_over else b"")
            assert is_over == (not new.lies)


@live_for(LIMIT_S)
async def test_a_forged_lease_or_one_that_nobody_renews_holds_nothing(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        async with conducting(redis, "g1", "g2") as (one, other):
            lease = redis.do("HGET", LEASES, "lease")
            names = (
                ("g9", b"x"),
                (other.name, b""),
                ("g9", lease),
                ("g" * 300, b"y" * 300),
                (b"\xff", b"\xfe"),
            )
            for gate, said in names:
                redis.do("HSET", LEASES, "gate", gate, "until", FAR_MS, "token", "1e300", "lease", said)
                await until(lambda: redis.do("HGET", LEASES, "gate") in (b"g1", b"g2"))
                await until(lambda: one.roll.conducts() or other.roll.conducts())
                await until(lambda: redis.do("HGET", LEASES, "token") < b"1e15")
            assert any("holds nothing" in lie for lie in one.lies + other.lies)
            # That of a gate that is gone, kept alive by somebody.
            leading = next(gate for gate in (one, other) if gate.roll.conducts())
            left = other if leading is one else one
            lease = redis.do("HGET", LEASES, "lease")
            assert leading.leadership._task is not None
            leading.leadership._task.cancel()

            def is_led_by_the_other() -> bool:
                redis.do("HSET", LEASES, "gate", leading.name, "until", FAR_MS, "lease", lease)
                return bool(left.leadership._scopes[SCOPE].usurper[0])

            await until(is_led_by_the_other)
            await until(left.roll.conducts)
            redis.do("DEL", LEASES)
            redis.do("SET", LEASES, "x")
            await until(left.roll.conducts)
