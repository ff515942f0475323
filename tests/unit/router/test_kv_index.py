"""What a unit that publishes events holds: the index of KV events, else belief."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Iterable, Sequence

import pytest
from xxhash import xxh3_64_intdigest

from cellgate.router.kv_index import (
    CANDIDATES_MAX,
    LEAVES_MAX,
    SIZES_MAX,
    Cleared,
    KvIndex,
    Lessons,
    Removed,
    Stored,
    depth_of,
)
from cellgate.router.prefix import PER_TICK, PREFIX_LATE_S, Computed, KnownPrefixes, PrefixCache

BLOCK_TOKENS = 4


def stored(names: Iterable[int], parent: int | None = None, first: int = 0, **more: object) -> Stored:
    names = list(names)
    ids = array("I", range(first, first + len(names) * BLOCK_TOKENS)).tobytes()
    return Stored(names, parent, ids, BLOCK_TOKENS)._replace(**more)  # type: ignore[arg-type]


def index_of(*events: Stored | Removed | Cleared) -> KvIndex:
    index = KvIndex()
    for at, event in enumerate(events):
        index.apply(event, float(at))
    return index


def test_two_engines_with_other_names_have_the_same_chain() -> None:
    one, other = index_of(stored([1, 2])), index_of(stored([71]), stored([72], 71, first=BLOCK_TOKENS))
    assert one.held == other.held
    assert sorted(map(depth_of, one.held)) == [1, 2]
    larger = index_of(stored([1], block_tokens=2 * BLOCK_TOKENS, tokens=bytes(8 * BLOCK_TOKENS)))
    smaller = index_of(stored([1], tokens=bytes(4 * BLOCK_TOKENS)))
    assert larger.held.keys().isdisjoint(smaller.held), "sizes of blocks do not mix"


def test_a_block_that_was_stored_twice_is_held_until_it_was_removed_twice() -> None:
    index = index_of(stored([1, 2]), stored([1, 2]), Removed([2, 1]))
    assert len(index.held) == 2
    index.apply(Removed([2]), 3.0)
    assert (len(index.held), len(index.gone)) == (1, 1)


def test_one_stored_under_two_names_or_in_two_tiers_is_held_until_both_are_removed() -> None:
    index = index_of(stored([1]), stored([9]), Removed([1]))
    assert len(index.held) == 1
    index.apply(Removed([9]), 3.0)
    assert (len(index.held), len(index.gone)) == (0, 1)
    assert len(index_of(stored([1]), Stored([1, 5], None, b"", 0), Removed([1])).held) == 1


@pytest.mark.parametrize(
    "event",
    [
        stored([2], 1, tokens=b"123"),
        stored([2], 1, block_tokens=8),
        stored([2], 1, block_tokens=0),
        stored([], 1, tokens=b"1234"),
        stored([2], 1, extra=[b"", b""]),
        stored([2], parent=7),
    ],
)
def test_an_event_that_contradicts_itself_or_what_is_known_changes_nothing(event: Stored) -> None:
    index = index_of(stored([1]), event)
    assert (len(index), index.strange) == (1, 1)


def test_a_prompt_is_the_run_of_its_depth_that_was_stored_meanwhile_also_if_it_was_evicted_since() -> None:
    index = index_of(stored([1, 2]), stored([3], 2, first=50), stored([8]), stored([4], 2, first=90))
    common = index.prompt(2, 0.0, 0.0)
    assert common is not None
    assert sorted(map(depth_of, common)) == [1, 2]
    found = index.prompt(3, 0.5, 1.5)
    assert found is not None
    assert (found[:2], depth_of(found[2])) == (common, 3)
    assert index.prompt(3, 1.0, 3.0) == common, "what all possible runs have in common"
    assert index.prompt(3, 1.5, 2.5) is None
    assert index.prompt(4, 0.0, 9.0) is None
    many = index_of(*(stored([name], first=name) for name in range(CANDIDATES_MAX + 1)))
    assert many.prompt(1, 0.0, 99.0) is None, "it could be too many prompts"
    index = index_of(stored([1, 2]), stored([3], 2, first=2 * BLOCK_TOKENS))
    found = index.prompt(3, 0.5, 1.5)
    index.apply(Removed([3, 2, 1]), 2.0)
    assert not index.held
    assert found
    assert index.prompt(3, 0.5, 1.5) == found
    index.gone.clear()
    assert index.prompt(3, 0.5, 1.5) is None


def test_no_more_blocks_and_ends_of_runs_are_kept_than_the_limits() -> None:
    index = KvIndex(limit=3)
    index.apply(stored([1, 2]), 0.0)
    index.apply(stored([3, 4], 2), 0.0)
    assert (len(index), index.strange) == (2, 1)
    for name in range(100):
        index.apply(stored([name], first=name), 0.0)
        index.apply(Removed([name]), 0.0)
    assert len(index.gone) <= 4
    for at in range(3 * LEAVES_MAX):
        index.apply(stored([1]), float(at))
    assert len(index._leaves) <= 2 * LEAVES_MAX


def test_a_million_blocks_take_at_most_200_mb() -> None:
    """A part of them is measured, at the worst size of the tables: just after they have grown."""
    index, count = KvIndex(), 22_000
    tracemalloc.start()
    for at in range(0, count, 250):
        names = [(name * 0x9E3779B97F4A7C15) & ((1 << 60) - 1) for name in range(at + 1, at + 251)]
        index.apply(stored(names, first=at * BLOCK_TOKENS), 0.0)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index) == count
    assert used / count <= 200


# What a unit that publishes events holds: by its events where they tell, else by belief.

TOKENS_EACH = 16
PER_BYTES = 8
"""Blocks of tokens in one of bytes: 4 bytes for a token."""


class Prompt:
    """A text: its blocks of bytes, and its token ids, from numbers that each stand for a block of bytes."""

    def __init__(self, *parts: int) -> None:
        self.blocks: list[int] = []
        seed, tokens = 0, array("I")
        for part in parts:
            seed = xxh3_64_intdigest(part.to_bytes(4, "big"), seed) >> 4
            self.blocks.append(seed)
            tokens.extend(part * 1000 + number for number in range(PER_BYTES * TOKENS_EACH))
        self.tokens = tokens.tobytes()
        self.count = len(tokens)

    @property
    def names(self) -> list[int]:
        """The engine's names of its blocks: of all the tokens up to there."""
        size = 4 * TOKENS_EACH
        ends = range(size, len(self.tokens) + 1, size)
        return [xxh3_64_intdigest(self.tokens[:end]) >> 4 for end in ends]


class Unit:
    """One unit: its events, and answers about prompts."""

    def __init__(self, lessons: Lessons, rank: int = 0) -> None:
        self.believed = PrefixCache(1000)
        self.known = KnownPrefixes(self.believed, lessons)
        self.known.rank(rank, 100_000)
        self.known.resume(rank)
        self.now = 0.0

    def store(self, prompt: Prompt, held: int = 0) -> None:
        """The prompt is computed behind its first `held` blocks."""
        names = prompt.names
        event = Stored(
            names[held:],
            names[held - 1] if held else None,
            prompt.tokens[held * 4 * TOKENS_EACH :],
            TOKENS_EACH,
        )
        self.known.apply(0, event, self.now)

    def remove(self, names: Sequence[int]) -> None:
        self.known.apply(0, Removed(names), self.now)

    def answer(self, prompt: Prompt, cached: int | None = 0) -> None:
        """An answer tells how many tokens the prompt had."""
        length = float(len(prompt.blocks))
        self.known.note(Computed(prompt.blocks, length, prompt.count, cached, self.now, self.now))
        self.now += 1.0
        self.known.tick(self.now)

    def compute(self, prompt: Prompt, held: int = 0) -> None:
        self.store(prompt, held)
        self.answer(prompt, held * TOKENS_EACH)


def proven(lessons: Lessons | None = None) -> Unit:
    """A unit whose events have proved true."""
    unit = Unit(lessons or Lessons())
    for number in range(100, 104):
        unit.compute(Prompt(number))
    assert unit.known.is_used()
    return unit


def believe(unit: Unit, prompt: Prompt) -> None:
    """A prompt was sent, and something of its answer has come."""
    unit.believed.prove(prompt.blocks, unit.believed.record(prompt.blocks))


def test_what_was_stored_is_held_and_what_was_removed_is_not() -> None:
    unit, prompt, before = proven(), Prompt(1, 2, 3, 4), Prompt(5, 6)
    believe(unit, prompt)
    believe(unit, before)
    unit.compute(prompt)
    assert unit.known.match(prompt.blocks) == 4
    assert unit.known.match(before.blocks) == 2, "stored before events were followed: belief decides"
    unit.remove(prompt.names[2 * PER_BYTES :])
    assert unit.known.match(prompt.blocks) == 2
    assert unit.known.lacks(prompt.blocks[2])
    assert unit.believed.match(prompt.blocks) == 4
    late = Prompt(7, 8)
    unit.compute(late)
    unit.remove(late.names)
    unit.believed.record(late.blocks)
    assert unit.known.match(late.blocks) == 2, "it is computed now"


def test_a_prompt_that_another_unit_has_taught_is_known_here_and_a_beginning_that_prompts_share() -> None:
    """The second half of the dense one has twice as many tokens for its bytes: evenly spread, the first half
    seems to end in the middle of the second.
    """
    lessons, prompt = Lessons(), Prompt(11, 12, 13, 14)
    unit, third = proven(lessons), proven(lessons)
    unit.compute(prompt)
    assert third.known.match(prompt.blocks) == 0
    third.store(prompt)
    assert third.known.match(prompt.blocks) == 4
    dense, other = Prompt(1, 2, 3, 4, 5, 6), Prompt(1, 2, 9)
    del dense.blocks[4:]
    unit.compute(dense)
    unit.compute(other, held=2 * PER_BYTES)
    third.store(other)
    assert third.known.match(dense.blocks) == 2
    assert third.known.match(other.blocks) == 3


def test_a_publisher_that_tells_of_something_else_or_stops_to_prove_true_is_not_used() -> None:
    unit = Unit(Lessons())
    for number in range(40):
        unit.store(Prompt(number, number))
        unit.answer(Prompt(100 + number))
    prompt = Prompt(1, 1)
    believe(unit, prompt)
    unit.remove(prompt.names)
    assert (unit.known.is_used(), unit.known.missed) == (False, 40)
    assert unit.known.match(prompt.blocks) == 2
    unit = proven()
    for cached in (2 * PER_BYTES * TOKENS_EACH, None):
        unit.answer(Prompt(300, 301), cached)
    assert unit.known.missed == 0, "a prompt that was cached is not missed"
    for number in range(5):
        unit.answer(Prompt(200 + number))
    assert not unit.known.is_used()
    restarted = proven()
    restarted.known.forget()
    assert (len(restarted.known), restarted.known.is_used()) == (0, False)


def test_interrupted_events_leave_belief_and_a_unit_that_is_cleared_holds_nothing() -> None:
    unit, prompt = proven(), Prompt(1, 2)
    unit.compute(prompt)
    unit.known.suspend(0)
    assert unit.known.match(prompt.blocks) == 0
    believe(unit, prompt)
    assert unit.known.match(prompt.blocks) == 2
    unit.known.resume(0)
    assert unit.known.match(prompt.blocks) == 2
    unit.known.apply(0, Cleared(), unit.now)
    assert unit.known.match(prompt.blocks) == 0


def test_a_prompt_is_held_if_one_rank_holds_it() -> None:
    unit, prompt = proven(), Prompt(1, 2)
    unit.known.rank(1, 1000)
    unit.known.resume(1)
    for number in range(100, 104):
        prompt = Prompt(number, 7)
        unit.known.apply(1, Stored(prompt.names, None, prompt.tokens, TOKENS_EACH), unit.now)
        unit.answer(prompt)
    assert unit.known.match(prompt.blocks) == 2


def test_a_tick_looks_for_a_bounded_number_of_prompts_once_their_events_are_due() -> None:
    unit = proven()
    for number in range(PER_TICK + 1):
        prompt = Prompt(500 + number)
        unit.store(prompt)
        unit.known.note(Computed(prompt.blocks, 1.0, prompt.count, 0, unit.now, unit.now))
    found = unit.known.found
    unit.known.tick(unit.now + PREFIX_LATE_S / 2)
    assert unit.known.found == found
    unit.known.tick(unit.now + PREFIX_LATE_S)
    assert unit.known.found + unit.known.missed == found + PER_TICK


def test_a_prompt_that_contradicts_all_that_was_taught_teaches_nothing_and_sizes_are_bounded() -> None:
    lessons, blocks = Lessons(), Prompt(1, 2).blocks
    lessons.teach(16, blocks, 1.0, [11, 12])
    lessons.teach(16, blocks, 1.0, [21, 22])
    assert lessons.of(16) == dict(zip(blocks, [11, 12], strict=True))
    assert lessons.count == 1
    for size in range(1, 100):
        lessons.teach(size, [1], 1.0, [11])
    assert sum(bool(lessons.of(size)) for size in range(1, 100)) == SIZES_MAX
