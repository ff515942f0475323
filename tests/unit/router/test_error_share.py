"""Failures of a unit: what they cost it alone, and beside peers that fail as well."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.router.error_share import Errors, compare_errors
from tests.unit.router.test_learning import law

TICK_S = 0.25


@law
@given(events=st.lists(st.tuples(st.booleans(), st.floats(0.0, 100.0))))
def test_the_share_of_errors_is_a_share(events: list[tuple[bool, float]]) -> None:
    errors, now = Errors(), 5.0
    for failed, later_s in events:
        now += later_s
        before = errors.share(now)
        (errors.failed if failed else errors.worked)(now)
        assert 0.0 <= errors.share(now) <= Errors.MAX
        assert errors.share(now) >= before if failed else errors.share(now) <= before
        assert errors.share(now + 10.0) == pytest.approx(errors.share(now) / 2.0)


def test_errors_add_up_fade_and_are_made_good() -> None:
    errors = Errors()
    assert errors.share(100.0) == 0.0
    for _ in range(4):
        errors.failed(100.0)
    assert errors.share(100.0) == errors.excess(100.0) == pytest.approx(0.9375)
    assert errors.share(130.0) == pytest.approx(0.9375 / 8)
    errors.worked(100.0)
    assert errors.share(100.0) == pytest.approx(0.9375 / 2)
    assert math.isfinite(errors.share(1e12))


class Units:
    """Units of which each gets one request after the other, and fails it by a chance of its own."""

    def __init__(self, count: int, seed: int) -> None:
        self.each = [Errors() for _ in range(count)]
        self.now = 5.0
        self._rng = Random(seed)

    def attempt(self, chances: Sequence[float]) -> list[bool]:
        """One request for each; which of them are avoided then."""
        self.now += TICK_S
        for errors, chance in zip(self.each, chances, strict=True):
            if self._rng.random() < chance:
                errors.failed(self.now)
            elif errors.counts:
                errors.worked(self.now)
        compare_errors([(errors, 0) for errors in self.each], self.now)
        return [errors.excess(self.now) > 0.0 for errors in self.each]


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("chance", [0.1, 0.3, 0.7, 1.0])
def test_units_that_fail_alike_are_not_avoided(chance: float, count: int) -> None:
    avoided = 0
    for seed in range(20):
        units = Units(count, seed)
        for _ in range(20):
            # The first one that fails is, until another one does.
            units.attempt([chance] * count)
        avoided += sum(sum(units.attempt([chance] * count)) for _ in range(100))
    assert avoided <= 0.02 * 20 * 100 * count


@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize("chance", [0.6, 1.0])
def test_one_that_fails_more_often_than_others_that_fail_is_avoided_soon(chance: float, count: int) -> None:
    took = []
    for seed in range(20):
        units = Units(count, seed)
        for _ in range(100):
            units.attempt([0.1] * count)
        worse = [chance, *[0.1] * (count - 1)]
        took.append(next(number for number in range(100) if units.attempt(worse)[0]))
    assert sorted(took)[10] <= (15 if chance == 1.0 else 25)
    assert max(took) <= (20 if chance == 1.0 else 50)


def test_one_that_works_among_many_that_all_fail_gets_the_requests() -> None:
    units = Units(8, 1)
    for _ in range(10):
        avoided = units.attempt([0.0, *[1.0] * 7])
    assert avoided == [False, *[True] * 7]


def test_one_that_fails_while_its_peers_do_not_is_avoided_at_once_whenever_that_is() -> None:
    units = Units(3, 1)
    assert units.attempt([1.0, 0.0, 0.0]) == [True, False, False]
    for _ in range(3):
        units.attempt([1.0, 1.0, 1.0])
    for _ in range(200):
        units.attempt([0.0, 0.0, 0.0])
    assert units.attempt([1.0, 0.0, 0.0])[0]
