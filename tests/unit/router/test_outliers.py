"""Which unit is called degraded, and which never is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.router.nouns import Rules
from cellgate.router.outliers import STREAK, Outlier, Speed, compare, slowdown

RULES = Rules()
law = settings(derandomize=True, deadline=None, max_examples=100)
USUAL = Speed(gap_s=0.020, batch=8.0, kv_use=0.5, weight=1.0)
OTHERS = [USUAL, USUAL, USUAL]


def after(*gaps_s: float, before: Outlier | None = None) -> Outlier:
    """The state after comparisons at which the unit had these gaps."""
    outlier = before or Outlier()
    for gap_s in gaps_s:
        outlier = compare(outlier, USUAL._replace(gap_s=gap_s), OTHERS, RULES)
    return outlier


def test_a_unit_like_the_others_is_not_slow() -> None:
    assert slowdown(USUAL, OTHERS) == 1.0
    assert after(*[0.020] * 10) == Outlier()


def test_a_slower_unit_is_degraded_after_three_comparisons_by_as_much_as_it_is_slower() -> None:
    assert after(0.030, 0.030).degraded == 0.0
    assert after(0.030, 0.030, 0.030).degraded == pytest.approx(1 / 3)
    assert after(0.040, 0.040, 0.040).degraded == pytest.approx(0.5)


def test_a_streak_that_is_broken_begins_anew() -> None:
    assert after(0.030, 0.030, 0.020, 0.030, 0.030).degraded == 0.0


def test_below_the_ratio_nothing_counts() -> None:
    assert after(*[0.0249] * 10) == Outlier()


def test_recovery_takes_coming_half_the_way_back_three_times() -> None:
    slow = after(0.030, 0.030, 0.030)
    assert after(*[0.024] * 10, before=slow).degraded > 0.0, "at the edge it does not flap"
    assert after(0.022, 0.022, before=slow).degraded == slow.degraded
    assert after(0.022, 0.022, 0.022, before=slow) == Outlier()
    assert after(0.022, 0.022, 0.030, 0.022, 0.022, before=slow).degraded > 0.0


def test_one_slow_unit_among_others_does_not_make_them_the_measure() -> None:
    slow = USUAL._replace(gap_s=0.060)
    assert slowdown(USUAL, [slow, USUAL, USUAL]) == 1.0
    assert slowdown(slow, [USUAL, USUAL, USUAL]) == pytest.approx(3.0)


@law
@given(st.floats(0.0, 500.0), st.floats(0.0, 500.0))
def test_a_unit_is_never_called_degraded_for_its_batch(own: float, theirs: float) -> None:
    """A gap that grows with the batch, even in proportion to it, is expected."""
    unit = USUAL._replace(batch=own, gap_s=0.020 * max(1.0, (own + 1.0) / (theirs + 1.0)))
    assert slowdown(unit, [USUAL._replace(batch=theirs)] * 2) <= 1.0 + 1e-9


@law
@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_unit_is_never_called_degraded_for_its_cache(own: float, theirs: float) -> None:
    unit = USUAL._replace(kv_use=own, gap_s=0.020 * max(1.0, (own + 0.1) / (theirs + 0.1)))
    assert slowdown(unit, [USUAL._replace(kv_use=theirs)] * 2) <= 1.0 + 1e-9


def test_a_unit_of_less_weight_may_be_as_much_slower() -> None:
    assert slowdown(USUAL._replace(gap_s=0.040, weight=0.5), OTHERS) == pytest.approx(1.0)


@law
@given(st.floats(1.0, 8.0))
def test_a_unit_of_more_weight_need_not_be_faster(weight: float) -> None:
    """It may have more places, and steps as long as those of others."""
    heavy = USUAL._replace(weight=weight)
    assert slowdown(heavy, OTHERS) == pytest.approx(1.0)
    assert slowdown(heavy._replace(gap_s=0.040), OTHERS) == pytest.approx(2.0)
    assert slowdown(USUAL, [heavy, heavy]) <= 1.0


@law
@given(st.lists(st.floats(0.001, 4.0), max_size=20))
def test_whatever_is_compared_the_share_stays_between_nothing_and_all(gaps_s: list[float]) -> None:
    outlier = after(*gaps_s)
    assert 0.0 <= outlier.degraded < 1.0
    assert 0 <= outlier.streak < STREAK
