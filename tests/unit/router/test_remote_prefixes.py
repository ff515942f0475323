"""What gates know of prompts that others have had computed: how exactly, for how long, and how much of it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cellgate.router.prefix import (
    EXPIRES_S,
    HASHES_MAX,
    REMOTE_PENDING_MAX,
    REPORT_AGAIN_S,
    ProvenPrefixes,
    RemotePrefixes,
)
from tests.cost.bench import counted

NOW = 1000.0


def known(**told: tuple[int, ...]) -> RemotePrefixes:
    remote = RemotePrefixes()
    for unit, blocks in told.items():
        remote.take(unit, blocks, NOW)
    return remote


def test_one_block_stands_for_all_before_it() -> None:
    remote = known(a=(14,), b=(12, 13), c=(99,))
    assert remote.match((11, 12, 13, 14, 15)) == {"a": 4, "b": 3}
    assert remote.match((11, 12)) == {"b": 2}
    assert remote.match((11, 15)) == {}
    assert remote.match(()) == {}


def test_two_units_may_hold_the_same() -> None:
    remote = known(a=(11, 13), b=(13,))
    assert remote.match((11, 12, 13)) == {"a": 3, "b": 3}


def test_a_unit_that_starts_anew_holds_nothing_of_what_was_told_before() -> None:
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


def test_units_that_come_and_go_leave_nothing_behind() -> None:
    remote, now = RemotePrefixes(), NOW
    widest = 0
    for number in range(1000):
        remote.take(f"pod-{number}", (number,), now)
        widest = max(widest, *remote._recent.values())
        remote.forget(f"pod-{number}")
        now += EXPIRES_S / 10
    # Ten of them come within an expiry: their numbers are used again after it.
    assert widest.bit_length() < 25


@pytest.mark.parametrize("looks", [1, 2, 7, 100])
def test_what_nobody_tells_any_more_is_dropped_however_often_one_looks(looks: int) -> None:
    remote = known(a=(1,))
    remote.expire(NOW)
    for look in range(1, looks + 1):
        remote.expire(NOW + 1.5 * EXPIRES_S * look / looks)
    assert len(remote) == 0


def test_what_was_told_holds_for_half_of_its_time_at_least() -> None:
    remote = known(a=(1,))
    remote.expire(NOW + EXPIRES_S / 2 - 1.0)
    assert remote.match((1,)) == {"a": 1}


def test_it_is_bounded_and_the_newest_is_kept() -> None:
    remote = RemotePrefixes()
    for first in range(0, 4 * HASHES_MAX, 256):
        remote.take("a", range(first, first + 256), NOW)
        assert len(remote) <= HASHES_MAX + 512
    assert remote.match((4 * HASHES_MAX - 1,)) == {"a": 1}
    assert remote.match((1,)) == {}


def test_a_prompt_of_which_nothing_is_known_takes_as_many_steps_however_long_it_is() -> None:
    remote = known(a=tuple(range(1000)))
    short, long = tuple(range(5000, 5002)), tuple(range(5000, 13_000))
    with counted() as few:
        remote.match(short)
    with counted() as many:
        remote.match(long)
    assert sum(few.values()) == sum(many.values()) > 0


def test_where_a_prompt_branches_off_and_ends_is_told_before_the_steps_on_the_way() -> None:
    proven = ProvenPrefixes()
    proven.record("a", tuple(range(101, 111)), 5)
    assert proven.take(2, NOW) == {"a": [105, 110]}
    proven.record("a", tuple(range(101, 121)), 10)
    assert proven.take(100, NOW) == {"a": [120, 101, 102, 103, 104, 106, 108, 112, 116]}


def test_the_newest_prompts_are_told_of_first() -> None:
    proven = ProvenPrefixes()
    for number in range(REMOTE_PENDING_MAX + 50):
        proven.record(f"u{number % 2}", (number,), 0)
    assert proven.take(3, NOW) == {"u1": [305, 303], "u0": [304]}
    assert proven.take(1000, NOW) == {}


def test_the_same_is_told_again_only_after_a_while() -> None:
    proven, told = ProvenPrefixes(), []
    for second in range(600):
        proven.record("a", (1,), 0)
        if proven.take(10, NOW + second):
            told.append(second)
    assert len(told) >= 3
    # Whoever heard of it has not forgotten it by then.
    assert all(REPORT_AGAIN_S <= after - before < EXPIRES_S / 2 for before, after in pairwise(told))


def test_the_same_is_told_of_each_unit_and_again_after_it_has_started_anew() -> None:
    proven = ProvenPrefixes()
    proven.record("a", (1,), 0)
    proven.record("b", (1,), 0)
    assert proven.take(10, NOW) == {"b": [1], "a": [1]}
    proven.record("a", (2,), 0)
    proven.forget("a")
    assert proven.take(10, NOW) == {}
    proven.record("a", (1,), 0)
    assert proven.take(10, NOW) == {"a": [1]}
