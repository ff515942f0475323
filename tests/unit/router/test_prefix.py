"""What a unit is believed to hold: how much, how exactly, and how it is taken back."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from cellgate.router.prefix import MAX_BLOCKS, PrefixCache, blocks_for

SYSTEM = (1, 2, 3)


def test_the_longest_common_beginning_is_found() -> None:
    cache = PrefixCache(100)
    cache.record((*SYSTEM, 4, 5))
    assert cache.match((*SYSTEM, 4, 5, 6)) == 5
    assert cache.match((*SYSTEM, 7, 8)) == 3
    assert cache.match((9, 2, 3)) == 0
    assert cache.match(()) == 0


def test_the_end_of_the_oldest_prompt_goes_first() -> None:
    cache = PrefixCache(8)
    cache.record((*SYSTEM, 4, 5, 6))
    cache.record((*SYSTEM, 7, 8, 9))
    assert cache.match((*SYSTEM, 7, 8, 9)) == 6
    assert cache.match((*SYSTEM, 4, 5, 6)) == 5


def test_a_prompt_larger_than_the_cache_leaves_its_beginning() -> None:
    cache = PrefixCache(4)
    cache.record(tuple(range(10)))
    assert cache.match(tuple(range(10))) == 4


def test_an_attempt_that_came_to_nothing_is_taken_back() -> None:
    cache = PrefixCache(100)
    cache.prove(SYSTEM, cache.record(SYSTEM))
    prompt = (*SYSTEM, 4, 5)
    cache.forget(prompt, cache.record(prompt))
    assert cache.match(prompt) == 3


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_two_attempts_in_vain_have_shared_is_not_held(order: tuple[int, int]) -> None:
    cache = PrefixCache(100)
    records = [cache.record(SYSTEM), cache.record(SYSTEM)]
    for number in order:
        assert cache.match(SYSTEM) == 3
        cache.forget(SYSTEM, records[number])
    assert (cache.match(SYSTEM), len(cache)) == (0, 0)


def test_what_one_attempt_has_shown_stays_whoever_fails() -> None:
    cache = PrefixCache(100)
    first, second, third = (cache.record(SYSTEM) for _ in range(3))
    cache.prove(SYSTEM, second)
    cache.forget(SYSTEM, first)
    cache.forget(SYSTEM, third)
    assert cache.match(SYSTEM) == 3


def test_what_somebody_else_needs_by_now_is_not_taken_back() -> None:
    cache = PrefixCache(100)
    prompt = (*SYSTEM, 4, 5)
    number = cache.record(prompt)
    cache.record((*SYSTEM, 4, 6))
    cache.forget(prompt, number)
    assert cache.match((*SYSTEM, 4, 6)) == 5
    assert cache.match(prompt) == 4


def test_trust_follows_what_the_engine_found() -> None:
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


def test_a_new_incarnation_holds_nothing_and_is_trusted_anew() -> None:
    cache = PrefixCache(100)
    cache.record(SYSTEM)
    cache.correct(1000, 0)
    cache.purge()
    assert (cache.match(SYSTEM), len(cache), cache.trust) == (0, 0, 1.0)


@pytest.mark.parametrize(
    ("kv_tokens", "blocks"), [(0, 1), (256, 2), (500_000, 3906), (1e12, MAX_BLOCKS), (1e300, MAX_BLOCKS)]
)
def test_its_size_is_that_of_the_kv_cache(kv_tokens: float, blocks: int) -> None:
    assert blocks_for(kv_tokens, 4.0, 512) == blocks


@pytest.mark.parametrize("limit", [1000, 12_000])
def test_memory_is_bounded_by_construction(limit: int) -> None:
    """However long it has been in use: at most 152 bytes for a block of the limit."""
    draw = random.Random(1).getrandbits
    tracemalloc.start()
    cache = PrefixCache(limit)
    for _ in range(4 * limit // 100):
        prompt = tuple(draw(60) for _ in range(100))
        cache.prove(prompt, cache.record(prompt))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert limit * 0.9 < len(cache) <= limit
    assert used < 152 * limit + 10_000


def test_it_gives_memory_back_when_it_is_made_smaller() -> None:
    draw = random.Random(1).getrandbits
    tracemalloc.start()
    cache = PrefixCache(20_000)
    prompt = tuple(draw(60) for _ in range(20_000))
    cache.prove(prompt, cache.record(prompt))
    del prompt
    cache.resize(1000)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 152 * 1000 + 10_000
