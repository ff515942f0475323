"""Gates that agree through a real Redis on who acts: one at a time, whatever happens to gates and Redis."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from cellgate.extras.operator import leadership
from cellgate.extras.operator.agreement import ClaimSharing
from cellgate.extras.operator.leadership import Leadership
from cellgate.extras.operator.plan import Claim, NotActingError
from cellgate.extras.redis_client.connect import connector
from cellgate.extras.redis_client.redis_names import Names
from cellgate.proxy.config.settings import RedisAccess
from tests.real.programs import ROOT
from tests.real.redis_server import RedisServer, cluster
from tests.wire.stage import live_for, until

LIMIT_S = 120.0
CLAIM = Claim("u1", "c", "", "u1-1", attempt=1, rest_s=60.0)


class Gate:
    """One gate's side, and what it has heard."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.tokens: list[int] = []
        self.heard: list[Claim] = []
        self.leadership = Leadership(
            connector(RedisAccess(url)),
            name,
            Names(),
            now=asyncio.get_running_loop().time,
            rng=random.Random(name),
            on_leading=lambda _, token: self.tokens.append(token),
            on_document=lambda document: self.claims.hear(document),
        )
        self.claims = ClaimSharing(self.leadership)
        self.leadership.start()
        self.claims.stand_for({"c"})

    @property
    def acts(self) -> bool:
        return self.claims.acts_for("c")

    def listen(self) -> list[Claim]:
        self.heard += self.claims.news()
        return self.heard

    def freeze(self) -> None:
        """As SIGSTOP does: no more renewals, no answer is read."""
        assert self.leadership._task is not None
        self.leadership._task.cancel()


@asynccontextmanager
async def gates(url: str, *names: str) -> AsyncIterator[list[Gate]]:
    found = [Gate(name, url) for name in names]
    try:
        yield found
    finally:
        for gate in found:
            await gate.claims.close()


async def acting(among: list[Gate]) -> Gate:
    """The one that acts, once there is one."""
    await until(lambda: sum(gate.acts for gate in among) == 1)
    return next(gate for gate in among if gate.acts)


@asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[tuple[RedisServer, Gate, Gate]]:
    """A Redis, and two gates of which the first one acts."""
    with RedisServer(folder) as redis:
        async with gates(redis.url, "g1", "g2") as both:
            one = await acting(both)
            yield redis, one, next(gate for gate in both if gate is not one)


@live_for(LIMIT_S)
async def test_one_of_five_acts_the_others_hear_what_it_begins_and_follow_at_once_if_it_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody can follow because a lease has run out.
    monkeypatch.setattr(leadership, "LEADER_LEASE_S", 2 * LIMIT_S)
    page = (ROOT / "docs" / "redis.md").read_text()
    found = re.search(r"An ACL user with `([^`]+)`.*with recovery or rolls also\s+`([^`]+)`", page, re.DOTALL)
    assert found is not None
    with RedisServer(tmp_path) as redis:
        # The rights of the documentation are enough.
        rights = "reset", "on", "nopass", "~cellgate:*", "+ping", *found[1].split(), *found[2].split()
        redis.do("ACL", "SETUSER", "default", *rights)
        async with gates(redis.url, "g1", "g2", "g3", "g4", "g5") as all_gates:
            one = await acting(all_gates)
            others = [gate for gate in all_gates if gate is not one]
            assert await one.claims.claim(CLAIM) == one.tokens[-1] > 0
            for other in others:
                await until(other.listen)
                assert [(claim.gate, claim.id, claim.attempt) for claim in other.heard] == [
                    (one.name, "u1-1", 1)
                ]
                with pytest.raises(NotActingError, match=f"gate {one.name} acts"):
                    await other.claims.claim(CLAIM)
            assert not one.listen()
            await one.claims.withdraw(CLAIM)
            await one.claims.close()
            await until(lambda: any(gate.acts for gate in others))
            # What is withdrawn is forgotten by Redis. Who follows has written there what all know.
            async with gates(redis.url, "g6") as (new,):
                await until(lambda: not new.claims.trouble)
                assert new.listen() == []


@live_for(LIMIT_S)
async def test_a_gate_that_stood_still_for_longer_than_its_lease_is_refused(tmp_path: Path) -> None:
    async with pair(tmp_path) as (_, one, other):
        one.freeze()
        # It believes what it believed when it stopped.
        stopped_at = one.leadership._now()
        one.leadership._now = lambda: stopped_at
        await until(lambda: other.acts)
        assert other.tokens[-1] > one.tokens[-1]
        assert one.acts
        with pytest.raises(NotActingError, match=f"gate {other.name} acts"):
            await one.claims.claim(CLAIM)
        await other.claims.claim(CLAIM)


@live_for(LIMIT_S)
async def test_what_an_empty_redis_has_lost_is_written_again_before_anybody_acts(tmp_path: Path) -> None:
    async with pair(tmp_path) as (redis, one, other):
        await one.claims.claim(CLAIM)
        await until(other.listen)
        one.freeze()
        redis.kill()
        redis.start()
        async with gates(redis.url, "g3") as (new,):
            await until(lambda: new.acts or other.acts)
            await until(new.listen)
            assert [claim.id for claim in new.heard] == ["u1-1"]
            assert max(gate.tokens[-1] for gate in (new, other) if gate.acts) > one.tokens[-1]


@live_for(LIMIT_S)
async def test_while_redis_is_gone_nobody_acts(tmp_path: Path) -> None:
    async with pair(tmp_path) as (redis, one, other):
        redis.kill()
        with pytest.raises(NotActingError, match="Redis cannot be asked"):
            await one.claims.claim(CLAIM)
        await until(lambda: not one.acts and one.claims.trouble)
        assert not other.acts
        redis.start()
        await acting([one, other])


@live_for(LIMIT_S)
async def test_in_a_cluster_a_claim_is_heard_and_orders_are_kept(tmp_path: Path) -> None:
    with ExitStack() as stack:
        nodes = await asyncio.to_thread(cluster, tmp_path, stack)
        one, other = (Gate(name, nodes.url) for name in ("g1", "g2"))
        await until(lambda: one.acts or other.acts)
        acts, hears_of_it = (one, other) if one.acts else (other, one)
        assert await acts.claims.claim(CLAIM) > 0
        await until(lambda: hears_of_it.claims.news())
        await one.leadership.push("roll:orders", b"first")
        assert await other.leadership.first("roll:orders") == b"first"
        await other.leadership.remove("roll:orders", b"first")
        assert await one.leadership.first("roll:orders") is None
        for gate in (one, other):
            await gate.leadership.close()
