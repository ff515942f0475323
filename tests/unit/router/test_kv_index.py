"""The index of KV events: counted duplicates, runs of a prompt, bounds."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Iterable

import pytest

from cellgate.router.kv_index import (
    CANDIDATES_MAX,
    LEAVES_MAX,
    Cleared,
    KvIndex,
    Removed,
    Stored,
    depth_of,
    following,
    root,
)

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


def test_a_block_that_was_stored_twice_is_held_until_it_was_removed_twice() -> None:
    index = index_of(stored([1, 2]), stored([1, 2]), Removed([2, 1]))
    assert len(index.held) == 2
    index.apply(Removed([2]), 3.0)
    assert (len(index.held), len(index.gone)) == (1, 1)


def test_one_stored_under_two_names_is_held_until_both_are_removed() -> None:
    index = index_of(stored([1]), stored([9]), Removed([1]))
    assert len(index.held) == 1
    index.apply(Removed([9]), 3.0)
    assert not index.held


def test_a_copy_in_another_tier_keeps_a_block() -> None:
    index = index_of(stored([1]), Stored([1, 5], None, b"", 0), Removed([1]))
    assert len(index.held) == 1


def test_adapters_salts_and_sizes_of_blocks_do_not_mix() -> None:
    ids = array("I", range(BLOCK_TOKENS)).tobytes()
    chains = {
        following(root(BLOCK_TOKENS, b""), ids),
        following(root(BLOCK_TOKENS, b"adapter"), ids),
        following(root(BLOCK_TOKENS, b""), ids, b"salt"),
        following(root(2 * BLOCK_TOKENS, b""), ids),
    }
    assert len(chains) == 4


def test_a_block_whose_parent_is_not_known_is_left_out() -> None:
    index = index_of(stored([2], parent=1))
    assert (len(index), index.strange) == (0, 1)


@pytest.mark.parametrize(
    "event",
    [
        stored([2], 1, tokens=b"123"),
        stored([2], 1, block_tokens=8),
        stored([2], 1, block_tokens=0),
        stored([], 1, tokens=b"1234"),
        stored([2], 1, extra=[b"", b""]),
    ],
)
def test_an_event_that_contradicts_itself_changes_nothing(event: Stored) -> None:
    index = index_of(stored([1]), event)
    assert (len(index), index.strange) == (1, 1)


def test_no_more_blocks_are_kept_than_the_limit() -> None:
    index = KvIndex(limit=3)
    index.apply(stored([1, 2]), 0.0)
    index.apply(stored([3, 4], 2), 0.0)
    assert (len(index), index.strange) == (2, 1)
    for name in range(100):
        index.apply(stored([name], first=name), 0.0)
        index.apply(Removed([name]), 0.0)
    assert len(index.gone) <= 4


def test_a_prompt_is_the_run_of_its_depth_that_was_stored_meanwhile() -> None:
    index = index_of(stored([1, 2]), stored([3], 2, first=50), stored([8]))
    assert index.prompt(3, 0.5, 1.5) == [*chain_of(index, 2, 0.0), index_leaf(index, 3)]
    assert index.prompt(3, 1.5, 9.0) is None
    assert index.prompt(4, 0.0, 9.0) is None


def chain_of(index: KvIndex, depth: int, at: float) -> list[int]:
    chain = index.prompt(depth, at, at)
    assert chain is not None
    assert len(chain) == depth
    return chain


def index_leaf(index: KvIndex, depth: int) -> int:
    return next(chain for chain in index.held if depth_of(chain) == depth)


def test_a_prompt_that_was_evicted_since_is_found_as_long_as_its_blocks_are_remembered() -> None:
    """Its answer ended, and told its tokens, when others had taken its place already."""
    index = index_of(stored([1, 2]), stored([3], 2, first=2 * BLOCK_TOKENS))
    found = index.prompt(3, 0.5, 1.5)
    index.apply(Removed([3, 2, 1]), 2.0)
    assert not index.held
    assert found
    assert index.prompt(3, 0.5, 1.5) == found
    index.gone.clear()
    assert index.prompt(3, 0.5, 1.5) is None


def test_what_all_possible_runs_have_in_common_is_the_prompts() -> None:
    index = index_of(stored([1, 2]), stored([3], 2, first=50), stored([4], 2, first=90))
    assert index.prompt(3, 1.0, 2.0) == chain_of(index, 2, 0.0)


def test_a_run_that_could_be_too_many_prompts_is_none() -> None:
    index = index_of(*(stored([name], first=name) for name in range(CANDIDATES_MAX + 1)))
    assert index.prompt(1, 0.0, 99.0) is None


def test_the_ends_of_runs_that_are_remembered_are_bounded() -> None:
    index = KvIndex()
    for at in range(3 * LEAVES_MAX):
        index.apply(stored([1]), float(at))
    assert len(index._leaves) <= 2 * LEAVES_MAX


def test_a_million_blocks_take_at_most_200_mb() -> None:
    """A fifth of them is measured, at the worst size of the tables: just after they have grown."""
    index, count = KvIndex(), 175_000
    tracemalloc.start()
    for at in range(0, count, 250):
        names = [(name * 0x9E3779B97F4A7C15) & ((1 << 60) - 1) for name in range(at + 1, at + 251)]
        index.apply(stored(names, first=at * BLOCK_TOKENS), 0.0)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index) == count
    assert used / count <= 200
