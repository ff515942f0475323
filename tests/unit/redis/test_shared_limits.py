"""Which counters a gate asks Redis about, and for which window it takes of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

from cellgate.proxy.admission.limits import MINUTE_S, DoorCounts, LimitLedger
from cellgate.proxy.config.key_file import Key, KeyRing, LimitRules, TenantRules
from cellgate.proxy.redis.commands import Command, RedisClient
from cellgate.proxy.redis.reports import Names
from cellgate.proxy.redis.sharing import LIMITS_SLICE, QUIET_BEATS, SharedLimits
from cellgate.router.nouns import Ask

AT = 1_751_328_000.0
LIMIT, TOKENS = 1000, 100


class Counters:
    """A Redis that counts; it forgets a key that expires in the past, as Redis does."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.counts = Counter[str]()
        self.increments = 0
        self.before_answer: Callable[[], object] = lambda: None

    async def exchange(self, commands: Sequence[Command], _limit_s: float = 1.0) -> list[Any]:
        await asyncio.sleep(0)
        self.before_answer()
        return [self.answer(*cast("tuple[str, str, int]", command)) for command in commands]

    def answer(self, verb: str, key: str = "", amount: int = 0) -> int:
        """Also to PING, which has no key."""
        if verb == "INCRBY":
            self.increments += 1
            self.counts[key] += amount
        elif verb == "EXPIREAT" and amount <= self.gate.now:
            del self.counts[key]
        return self.counts[key]


class Gate:
    """A gate with a key for each of `keys`, of limits of a minute that it shares with another gate."""

    def __init__(self, keys: int) -> None:
        self.now = AT
        self.redis = Counters(self)
        limits, tenant = LimitRules(tokens_per_minute=LIMIT), TenantRules("t")
        ring = {b"%d" % n: Key(f"k{n}", tenant, limits=limits) for n in range(keys)}
        self.ledger = LimitLedger(lambda: self.now, DoorCounts(frozenset), None)
        self.ledger.take(KeyRing(ring, {"t": tenant}))
        client = cast("RedisClient", self.redis)
        self.sharing = SharedLimits(
            self.ledger, lambda: client, Names(), lambda: 2, lambda _: None, random.Random(1)
        )

    def ask(self, number: int = 0) -> bool:
        charge = f"k{number}", TOKENS, 0, self.now
        return isinstance(self.ledger.admit(charge, Ask(model="m", tenant="t")), bytes)

    def share(self, times: int = 1) -> None:
        for _ in range(times):
            asyncio.run(self.sharing._share(cast("RedisClient", self.redis)))


def test_a_limit_whose_window_is_over_is_not_asked_for_until_it_is_used_again() -> None:
    gate = Gate(1)
    gate.ask()
    gate.share()
    gate.now += 2 * MINUTE_S + 1.0
    gate.redis.increments = 0
    gate.share(4 * QUIET_BEATS)
    assert gate.redis.increments == 0
    gate.ask()
    gate.share()
    assert gate.redis.increments == 1


def test_what_was_due_in_one_window_is_not_taken_in_the_next_one() -> None:
    keys = LIMITS_SLICE + 1
    gate = Gate(keys)
    for number in range(keys):
        gate.ask(number)

    def a_minute_ends() -> None:
        gate.now = AT + MINUTE_S
        gate.ask(keys - 1)
        gate.redis.before_answer = lambda: None

    gate.redis.counts[f"cellgate:limit:key:k{keys - 1}:tokens_per_minute:{int(AT)}"] = LIMIT
    gate.redis.before_answer = a_minute_ends
    gate.share()
    for _ in range(3):
        gate.share()
        assert gate.ask(keys - 1), "the limit of this minute is hardly used"
