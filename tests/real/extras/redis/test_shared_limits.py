"""Limits that gates share over a real Redis: how much passes, and what its death costs."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from cellgate.extras.redis.sharing import SharedLimits
from cellgate.extras.redis_client.connect import connector
from cellgate.extras.redis_client.redis_names import Names
from cellgate.proxy.admission.limits import KeyCounts, LimitLedger
from cellgate.proxy.config.key_file import Key, KeyRing, LimitRules, TenantRules
from cellgate.proxy.config.settings import RedisAccess
from cellgate.proxy.observe.events import Action
from cellgate.router.nouns import Ask
from loadtests.kit.redis_group import Cluster, Sentinels
from loadtests.kit.waiting import wait_until
from tests.real.redis_server import RedisServer, cluster, sentinels
from tests.wire.stage import live, live_for, until

GATES, LIMIT, TOKENS = 3, 10_000, 50
ASK = Ask(model="m", tenant="t")
REQUESTS = 120
BY_TOKENS, BY_REQUESTS = LimitRules(tokens_per_minute=LIMIT), LimitRules(requests_per_minute=REQUESTS)
TURN_S, TURNS = 0.01, 150


class Gate:
    """What a gate has of limits. Its clock stands still at `at`, so that a minute does not end."""

    def __init__(self, url: str, at: float, limits: LimitRules) -> None:
        self.at = at
        self.passed = 0
        self.told: list[str] = []
        self.ledger = LimitLedger(lambda: self.at, KeyCounts(frozenset), None)
        rules = TenantRules("t", limits=limits)
        self.ledger.take(KeyRing({b"": Key("k", rules)}, {"t": rules}))
        connect = connector(RedisAccess(url))
        self.sharing = SharedLimits(
            self.ledger, connect, Names(), lambda: GATES, self._tell, random.Random(1)
        )

    def _tell(self, action: Action) -> None:
        self.told.append(action.kind)

    def ask(self) -> None:
        """One request, of TOKENS."""
        if isinstance(self.ledger.admit(("k", TOKENS, 0, self.at), ASK), bytes):
            self.passed += TOKENS


@asynccontextmanager
async def sharing(url: str, limits: LimitRules = BY_TOKENS) -> AsyncIterator[list[Gate]]:
    """Gates that share, once all of them do."""
    at = time.time()
    gates = [Gate(url, at, limits) for _ in range(GATES)]
    for gate in gates:
        gate.sharing.start()
    await until(lambda: all(gate.ledger.gates for gate in gates))
    try:
        yield gates
    finally:
        for gate in gates:
            await gate.sharing.close()


async def flood(gates: list[Gate], *weights: int) -> None:
    """Requests come, to each gate as many in a turn as its weight."""
    for _ in range(TURNS):
        for gate, weight in zip(gates, weights, strict=True):
            for _ in range(weight):
                gate.ask()
        await asyncio.sleep(TURN_S)


@live
async def test_what_passes_is_the_limit_wherever_the_requests_come(tmp_path: Path) -> None:
    for weights in ((10, 10, 10), (20, 1, 1), (20, 0, 0)):
        with RedisServer(tmp_path) as redis:
            async with sharing(redis.url) as gates:
                await flood(gates, *weights)
                passed = sum(gate.passed for gate in gates)
                assert 0.95 * LIMIT <= passed <= 1.05 * LIMIT, weights
                assert [gate.told for gate in gates] == [[], [], []]


@live
async def test_without_redis_each_gate_passes_at_most_the_limit_and_says_so_once(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        async with sharing(redis.url) as gates:
            for gate in gates:
                gate.ask()
            redis.kill()
            await until(lambda: all(gate.told for gate in gates))
            await flood(gates, 20, 20, 20)
            assert [gate.passed for gate in gates] == [LIMIT] * GATES
            assert [gate.told for gate in gates] == [["limits_alone"]] * GATES
            redis.start()
            await until(lambda: all(len(gate.told) == 2 for gate in gates))
            before = sum(gate.passed for gate in gates)
            await flood(gates, 5, 5, 5)
            assert sum(gate.passed for gate in gates) == before
            assert [gate.told for gate in gates] == [["limits_alone", "limits_shared"]] * GATES


@live
async def test_a_frozen_redis_costs_no_request(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        async with sharing(redis.url) as gates:
            redis.freeze()
            await until(lambda: all(gate.told for gate in gates))
            for gate in gates:
                gate.ask()
            assert [gate.passed for gate in gates] == [TOKENS] * GATES
            assert [gate.told for gate in gates] == [["limits_alone"]] * GATES
            redis.thaw()


@live_for(60.0)
@pytest.mark.parametrize(
    ("made", "limits", "limit", "over"),
    [
        (sentinels, BY_TOKENS, LIMIT, TOKENS),
        (cluster, BY_TOKENS, LIMIT, TOKENS),
        (sentinels, BY_REQUESTS, REQUESTS * TOKENS, 0),
    ],
)
async def test_after_a_fail_over_the_next_minute_is_exact_and_why_was_said_once(
    tmp_path: Path,
    made: Callable[[Path, ExitStack], Sentinels | Cluster],
    limits: LimitRules,
    limit: int,
    over: int,
) -> None:
    """The server that has the counter is killed in a burst. One request of many tokens more than the limit
    may pass, but no request more than a limit of requests.
    """
    with ExitStack() as stack:
        group = await asyncio.to_thread(made, tmp_path, stack)
        async with sharing(group.url, limits) as gates:
            await flood(gates, 5, 5, 5)
            assert 0.98 * limit <= passed_of(gates) <= limit + over
            next_minute(gates)
            burst = asyncio.create_task(flood(gates, 5, 5, 5))
            await until(lambda: passed_of(gates) > 0)
            await asyncio.to_thread(fail_over, group)
            await burst
            await until(lambda: all(len(gate.told) == 2 for gate in gates))
            assert passed_of(gates) <= GATES * limit
            next_minute(gates)
            await flood(gates, 5, 5, 5)
            assert 0.98 * limit <= passed_of(gates) <= limit + over
            assert [gate.told for gate in gates] == [["limits_alone", "limits_shared"]] * GATES


def passed_of(gates: list[Gate]) -> int:
    """What has passed at all of them since the last minute."""
    return sum(gate.passed for gate in gates)


def next_minute(gates: list[Gate]) -> None:
    """Each window of a minute ends."""
    for gate in gates:
        gate.at, gate.passed = gate.at + 60.0, 0


def fail_over(group: Sentinels | Cluster) -> None:
    """Kill the server that has the counter, and wait until another one has its place."""
    if isinstance(group, Sentinels):
        group.primary.kill()
        assert wait_until(group.failed_over, 20.0, 0.01)
        return
    node = next(node for node in group.nodes[:3] if node.do("KEYS", "*limit:*"))
    node.kill()
    assert wait_until(lambda: group.serves_without(node), 20.0, 0.01)
