"""What a unit is believed to hold: how much, how exactly, and how it is taken back."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from cellgate.router.prefix import MAX_BLOCKS, PrefixCache, blocks_for
from tests.cost.bench import counted

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


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize("limit", [1000, 12_000])
def test_memory_is_bounded_by_construction(limit: int, size: int) -> None:
    """However long it has been in use: at most 220 bytes for a block of the limit, and its first runs."""
    draw = random.Random(1).getrandbits
    tracemalloc.start()
    cache = PrefixCache(limit)
    for _ in range(4 * limit // size):
        prompt = tuple(draw(60) for _ in range(size))
        cache.prove(prompt, cache.record(prompt))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert limit * min(0.24 * size, 0.9) < len(cache) <= limit
    assert used < 220 * limit + 30_000


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


@pytest.mark.parametrize("seed", range(20))
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
    assert used < 220 * 1000 + 30_000
