"""What a unit is believed to hold of prompts, by this gate and by others."""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc
from itertools import pairwise

import pytest

from cellgate.router.prefix import (
    EXPIRES_S,
    HASHES_MAX,
    PREFIX_MAX_BLOCKS,
    REMOTE_PENDING_MAX,
    REPORT_AGAIN_S,
    PrefixCache,
    ProvenPrefixes,
    RemotePrefixes,
    SharedPrefixes,
    blocks_for,
)
from tests.cost.bench import counted

SYSTEM = (1, 2, 3)


def test_what_was_computed_is_told_from_what_is_only_awaited() -> None:
    cache, prompt = PrefixCache(100), tuple(range(20))
    assert cache.proven(prompt, 0) == 0
    for size in (7, 13):
        first = cache.record(prompt[:size])
        cache.record(prompt)
        before = 7 if size == 13 else 0
        assert [cache.proven(prompt, held) for held in (20, size, before)] == [before] * 3
        cache.prove(prompt[:size], first)
        assert [cache.proven(prompt, held) for held in (20, size, before)] == [size, size, before]


def test_trust_follows_what_the_engine_found_and_a_new_incarnation_is_trusted_anew() -> None:
    cache = PrefixCache(100)
    for _ in range(100):
        cache.correct(1000, 0)
    assert 0.0 <= cache.trust < 0.01
    for _ in range(100):
        cache.correct(1000, 1200)
    assert 0.99 < cache.trust <= 1.0
    cache.correct(0, 500)
    cache.correct(1000, -5)
    assert 0.9 < cache.trust < 1.0
    cache = PrefixCache(100)
    cache.record(SYSTEM)
    cache.correct(1000, 0)
    cache.purge()
    assert (cache.match(SYSTEM), len(cache), cache.trust) == (0, 0, 1.0)


@pytest.mark.parametrize("size", [1, 2, 16, 200])
def test_the_objects_that_known_prompts_consist_of_are_counted(size: int) -> None:
    """By them memory that has grown for a reason is told from a leak."""
    cache, rng = PrefixCache(1 << 16), random.Random(size)
    # Nothing of other tests is freed meanwhile.
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(20_000 // size):
        cache.record([rng.getrandbits(63) for _ in range(size)])
    assert cache.objects == pytest.approx(sys.getallocatedblocks() - before, rel=0.1)
    shared = SharedPrefixes()
    before = sys.getallocatedblocks()
    for at in range(5_000):
        shared.of(rng.getrandbits(63), float(at))
    assert shared.objects == pytest.approx(sys.getallocatedblocks() - before, rel=0.1)


@pytest.mark.parametrize(
    ("kv_tokens", "blocks"),
    [(0, 1), (256, 2), (500_000, 3906), (1e12, PREFIX_MAX_BLOCKS), (1e300, PREFIX_MAX_BLOCKS)],
)
def test_its_size_is_that_of_the_kv_cache(kv_tokens: float, blocks: int) -> None:
    assert blocks_for(kv_tokens, 4.0, 512) == blocks


@pytest.mark.parametrize("size", [1, 4, 100])
def test_memory_is_bounded_by_construction(size: int) -> None:
    """However long it has been in use: at most 220 bytes for a block of the limit, and its first runs."""
    draw, limit = random.Random(1).getrandbits, 1000
    tracemalloc.start()
    cache = PrefixCache(limit)
    for _ in range(4 * limit // size):
        prompt = tuple(draw(60) for _ in range(size))
        cache.prove(prompt, cache.record(prompt))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert limit * min(0.24 * size, 0.9) < len(cache) <= limit
    assert used < 220 * limit + 30_000


def test_it_gives_memory_back_when_it_is_made_smaller() -> None:
    tracemalloc.start()
    cache, prompt = PrefixCache(20_000), tuple(range(10**9, 10**9 + 20_000))
    cache.prove(prompt, cache.record(prompt))
    del prompt
    cache.resize(1000)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 220 * 1000 + 30_000


class ByBlock:
    """The same, block by block: each that a prompt has is used again, the last one first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: dict[int, None] = {}

    def record(self, blocks: tuple[int, ...]) -> None:
        for block in reversed(blocks[: self.limit]):
            self.held.pop(block, None)
            self.held[block] = None
        if (spare := len(self.held) - self.limit) > 0:
            for block in list(self.held)[: spare + self.limit // 32]:
                del self.held[block]


@pytest.mark.parametrize("seed", range(10))
def test_it_holds_what_would_be_held_if_each_block_were_moved(seed: int) -> None:
    """Prompts that go on from others, repeat a part of them, or are new."""
    rng, new = random.Random(seed), iter(range(1, 10_000))
    cache, model = PrefixCache(200), ByBlock(200)
    prompts: list[tuple[int, ...]] = [(0,)]
    for _ in range(300):
        before = rng.choice(prompts[-12:])[: rng.choice((None, None, rng.randint(0, 12)))]
        prompt = (*before, *(next(new) for _ in range(rng.randint(0 if before else 1, 9))))
        prompts.append(prompt)
        cache.prove(prompt, cache.record(prompt))
        model.record(prompt)
        assert cache.recent(1000) == list(reversed(model.held))
        assert all(cache.match(each) == sum(block in model.held for block in each) for each in prompts[-12:])


def test_a_turn_costs_what_is_new_however_much_was_said_before() -> None:
    def turn(said: int) -> float:
        cache, prompt = PrefixCache(100_000), tuple(range(said))
        for _ in range(3):
            cache.prove(prompt, cache.record(prompt))
            prompt = (*prompt, *range(1_000_000 + len(prompt), 1_000_010 + len(prompt)))
        with counted() as counts:
            cache.prove(prompt, cache.record(prompt))
        return counts.total()

    # It is found by halving.
    assert turn(8000) < 2 * turn(100)


# What gates know of prompts that others have had computed: how exactly, for how long, and how much of it.

NOW = 1000.0


def known(**told: tuple[int, ...]) -> RemotePrefixes:
    remote = RemotePrefixes()
    for unit, blocks in told.items():
        remote.take(unit, blocks, NOW)
    return remote


def test_one_block_stands_for_all_before_it_until_its_unit_starts_anew() -> None:
    remote = known(a=(14,), b=(12, 13), c=(99,), d=(13,))
    assert remote.match((11, 12, 13, 14, 15)) == {"a": 4, "b": 3, "d": 3}
    assert remote.match((11, 12)) == {"b": 2}
    assert remote.match((11, 15)) == {}
    assert remote.match(()) == {}
    remote = known(a=(1,), b=(1,))
    remote.forget("a")
    assert remote.match((1,)) == {"b": 1}
    remote.take("a", (7,), NOW)
    remote.take("c", (8,), NOW)
    assert (remote.match((1,)), remote.match((1, 7)), remote.match((8,))) == (
        {"b": 1},
        {"b": 1, "a": 2},
        {"c": 1},
    )


@pytest.mark.parametrize("looks", [1, 3, 100])
def test_what_nobody_tells_any_more_is_dropped_however_often_one_looks(looks: int) -> None:
    remote = known(a=(1,))
    for look in range(looks + 1):
        remote.expire(NOW + (EXPIRES_S / 2 - 1.0) * look / looks)
    assert remote.match((1,)) == {"a": 1}, "for half of its time at least"
    for look in range(1, looks + 1):
        remote.expire(NOW + EXPIRES_S / 2 + EXPIRES_S * look / looks)
    assert len(remote) == 0


def test_it_is_bounded_and_the_newest_is_kept_and_units_that_come_and_go_leave_nothing_behind() -> None:
    remote = RemotePrefixes()
    for first in range(0, 4 * HASHES_MAX, 256):
        remote.take("a", range(first, first + 256), NOW)
        assert len(remote) <= HASHES_MAX + 512
    assert remote.match((4 * HASHES_MAX - 1,)) == {"a": 1}
    assert remote.match((1,)) == {}
    remote, now = RemotePrefixes(), NOW
    widest = 0
    for number in range(1000):
        remote.take(f"pod-{number}", (number,), now)
        widest = max(widest, *remote._recent.values())
        remote.forget(f"pod-{number}")
        now += EXPIRES_S / 10
    # Ten of them come within an expiry: their numbers are used again after it.
    assert widest.bit_length() < 25


def test_a_prompt_of_which_nothing_is_known_takes_as_many_steps_however_long_it_is() -> None:
    remote = known(a=tuple(range(1000)))
    short, long = tuple(range(5000, 5002)), tuple(range(5000, 13_000))
    with counted() as few:
        remote.match(short)
    with counted() as many:
        remote.match(long)
    assert sum(few.values()) == sum(many.values()) > 0


def test_what_is_told_of_a_prompt_is_bounded_and_the_same_is_told_again_only_after_a_while() -> None:
    proven = ProvenPrefixes()
    proven.record("a", tuple(range(101, 111)), 5)
    assert proven.take(2, NOW) == {"a": [105, 110]}
    proven.record("a", tuple(range(101, 121)), 10)
    assert proven.take(100, NOW) == {"a": [120, 101, 102, 103, 104, 106, 108, 112, 116]}
    told = []
    for second in range(600):
        proven.record("a", (1,), 0)
        if proven.take(10, NOW + second):
            told.append(second)
    assert len(told) >= 3
    # Whoever heard of it has not forgotten it by then.
    assert all(REPORT_AGAIN_S <= after - before < EXPIRES_S / 2 for before, after in pairwise(told))


def test_the_newest_are_told_first_of_each_unit_and_again_after_it_has_started_anew() -> None:
    proven = ProvenPrefixes()
    for number in range(REMOTE_PENDING_MAX + 50):
        proven.record(f"u{number % 2}", (number,), 0)
    assert proven.take(3, NOW) == {"u1": [305, 303], "u0": [304]}
    assert proven.take(1000, NOW) == {}
    for unit in ("a", "b"):
        proven.record(unit, (1,), 0)
    assert proven.take(10, NOW) == {"b": [1], "a": [1]}
    proven.record("a", (2,), 0)
    proven.forget("a")
    assert proven.take(10, NOW) == {}
    proven.record("a", (1,), 0)
    assert proven.take(10, NOW) == {"a": [1]}
