"""What a unit that publishes events holds: by its events where they tell, else by belief."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from cellgate.router.kv_index import SIZES_MAX, Cleared, Lessons, Removed, Stored
from cellgate.router.prefix import LATE_S, PER_TICK, Computed, KnownPrefixes, PrefixCache

BLOCK_TOKENS = 16
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
            tokens.extend(part * 1000 + number for number in range(PER_BYTES * BLOCK_TOKENS))
        self.tokens = tokens.tobytes()
        self.count = len(tokens)

    @property
    def names(self) -> list[int]:
        """The engine's names of its blocks: of all the tokens up to there."""
        size = 4 * BLOCK_TOKENS
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
            prompt.tokens[held * 4 * BLOCK_TOKENS :],
            BLOCK_TOKENS,
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
        self.answer(prompt, held * BLOCK_TOKENS)


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
    unit, prompt = proven(), Prompt(1, 2, 3, 4)
    believe(unit, prompt)
    unit.compute(prompt)
    assert unit.known.match(prompt.blocks) == 4
    unit.remove(prompt.names[2 * PER_BYTES :])
    assert unit.known.match(prompt.blocks) == 2
    assert unit.known.lacks(prompt.blocks[2])
    assert unit.believed.match(prompt.blocks) == 4


def test_a_prompt_that_another_unit_has_taught_is_known_here() -> None:
    lessons, prompt = Lessons(), Prompt(1, 2, 3, 4)
    proven(lessons).compute(prompt)
    other = proven(lessons)
    assert other.known.match(prompt.blocks) == 0
    other.store(prompt)
    assert other.known.match(prompt.blocks) == 4


def test_belief_decides_about_what_was_stored_before_events_were_followed() -> None:
    unit, prompt = proven(), Prompt(1, 2)
    believe(unit, prompt)
    assert unit.known.match(prompt.blocks) == 2


def test_a_prompt_that_is_computed_now_counts_as_held() -> None:
    unit, prompt = proven(), Prompt(1, 2)
    unit.compute(prompt)
    unit.remove(prompt.names)
    unit.believed.record(prompt.blocks)
    assert unit.known.match(prompt.blocks) == 2


def test_a_beginning_that_prompts_share_is_known_wherever_one_of_them_is() -> None:
    """The second half of this prompt has twice as many tokens for its bytes: evenly spread, the first half
    seems to end in the middle of the second.
    """
    lessons = Lessons()
    unit = proven(lessons)
    dense, other = Prompt(1, 2, 3, 4, 5, 6), Prompt(1, 2, 9)
    del dense.blocks[4:]
    unit.compute(dense)
    unit.compute(other, held=2 * PER_BYTES)
    third = proven(lessons)
    third.store(other)
    assert third.known.match(dense.blocks) == 2
    assert third.known.match(other.blocks) == 3


def test_events_of_another_unit_change_nothing() -> None:
    unit = Unit(Lessons())
    for number in range(40):
        unit.store(Prompt(number, number))
        unit.answer(Prompt(100 + number))
    prompt = Prompt(1, 1)
    believe(unit, prompt)
    unit.remove(prompt.names)
    assert (unit.known.is_used(), unit.known.missed) == (False, 40)
    assert unit.known.match(prompt.blocks) == 2


def test_a_publisher_that_stops_to_prove_true_is_not_used_any_more() -> None:
    unit = proven()
    for number in range(5):
        unit.answer(Prompt(200 + number))
    assert not unit.known.is_used()


def test_a_prompt_that_was_cached_is_not_missed() -> None:
    unit = proven()
    unit.answer(Prompt(300, 301), cached=2 * PER_BYTES * BLOCK_TOKENS)
    unit.answer(Prompt(300, 301), cached=None)
    assert unit.known.missed == 0


def test_interrupted_events_leave_belief() -> None:
    unit, prompt = proven(), Prompt(1, 2)
    unit.compute(prompt)
    unit.known.suspend(0)
    assert unit.known.match(prompt.blocks) == 0
    believe(unit, prompt)
    assert unit.known.match(prompt.blocks) == 2
    unit.known.resume(0)
    assert unit.known.match(prompt.blocks) == 2


def test_a_unit_that_is_cleared_is_believed_to_hold_nothing() -> None:
    unit, prompt = proven(), Prompt(1, 2)
    believe(unit, prompt)
    unit.compute(prompt)
    unit.known.apply(0, Cleared(), unit.now)
    assert unit.known.match(prompt.blocks) == 0


def test_a_restarted_unit_has_to_prove_its_events_again() -> None:
    unit = proven()
    unit.known.forget()
    assert (len(unit.known), unit.known.is_used()) == (0, False)


def test_a_prompt_is_held_if_one_rank_holds_it() -> None:
    unit, prompt = proven(), Prompt(1, 2)
    unit.known.rank(1, 1000)
    unit.known.resume(1)
    for number in range(100, 104):
        prompt = Prompt(number, 7)
        unit.known.apply(1, Stored(prompt.names, None, prompt.tokens, BLOCK_TOKENS), unit.now)
        unit.answer(prompt)
    assert unit.known.match(prompt.blocks) == 2


def test_a_tick_looks_for_a_bounded_number_of_prompts_once_their_events_are_due() -> None:
    unit = proven()
    for number in range(PER_TICK + 1):
        prompt = Prompt(500 + number)
        unit.store(prompt)
        unit.known.note(Computed(prompt.blocks, 1.0, prompt.count, 0, unit.now, unit.now))
    found = unit.known.found
    unit.known.tick(unit.now + LATE_S / 2)
    assert unit.known.found == found
    unit.known.tick(unit.now + LATE_S)
    assert unit.known.found + unit.known.missed == found + PER_TICK


def test_a_prompt_that_contradicts_all_that_was_taught_teaches_nothing() -> None:
    lessons, blocks = Lessons(), Prompt(1, 2).blocks
    lessons.teach(16, blocks, 1.0, [11, 12])
    lessons.teach(16, blocks, 1.0, [21, 22])
    assert lessons.of(16) == dict(zip(blocks, [11, 12], strict=True))
    assert (lessons.count, lessons.conflicts) == (1, 1)


def test_only_some_sizes_of_blocks_are_known() -> None:
    lessons = Lessons()
    for size in range(1, 100):
        lessons.teach(size, [1], 1.0, [11])
    assert sum(bool(lessons.of(size)) for size in range(1, 100)) == SIZES_MAX
