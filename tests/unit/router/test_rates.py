"""What is learnt of a unit's speed: quickly enough, and never nonsense."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.router.learning import FIRST_PREFILL_TOKENS_S, SEQUENCE_SHARE, Errors, Estimate, Rates, Steps

law = settings(derandomize=True, deadline=None, max_examples=200)
anything = st.floats() | st.floats(1e-3, 1e5)


def fed(tokens_s: float, windows: int, rates: Rates | None = None) -> Rates:
    rates = rates or Rates()
    for _ in range(windows):
        rates.prefilled(4096, 4096 / tokens_s)
    return rates


# -- laws --------------------------------------------------------------------------------------------------


@law
@given(samples=st.lists(anything))
def test_an_estimate_is_always_within_its_bounds(samples: list[float]) -> None:
    estimate = Estimate(1e9, 0.5, 1e4)
    for sample in samples:
        estimate.guess(sample)
        estimate.fade(0.5)
        assert 0.5 <= estimate.value <= 1e4
        estimate.learn(sample)
        assert 0.5 <= estimate.value <= 1e4


@law
@given(samples=st.lists(st.tuples(anything, anything)), batch=st.floats(0.0, 1e6))
def test_a_step_is_always_positive_and_never_shorter_with_more_sequences(
    samples: list[tuple[float, float]], batch: float
) -> None:
    steps = Steps()
    for step_s, sequences in samples:
        steps.learn(step_s, sequences)
        assert Steps.MIN_S <= steps.at(batch) <= steps.at(batch + 1.0) <= Steps.MAX_S
        assert steps.per_sequence_s >= 0.0


@law
@given(samples=st.lists(st.tuples(st.integers(), anything)))
def test_no_prefill_at_all_upsets_it(samples: list[tuple[int, float]]) -> None:
    rates = Rates()
    for tokens, busy_s in samples:
        rates.prefilled(tokens, busy_s)
        assert 1.0 <= rates.prefill_tokens_s.value <= 1e8


@law
@given(outliers=st.lists(st.floats(1e-9, 1e9), max_size=3))
def test_a_few_wild_samples_move_an_estimate_by_little(outliers: list[float]) -> None:
    estimate = Estimate(100.0, 1e-3, 1e6)
    for _ in range(50):
        estimate.learn(100.0)
    for outlier in outliers:
        estimate.learn(outlier)
    assert 100.0 / 1.25 < estimate.value < 100.0 * 1.25


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


# -- prefill -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_s", [50.0, 1500.0, 14_000.0, 200_000.0])
def test_a_prefill_rate_is_found_within_a_few_prompts(tokens_s: float) -> None:
    assert fed(tokens_s, 10).prefill_tokens_s.value == pytest.approx(tokens_s, rel=0.25)


def test_a_unit_that_becomes_half_as_fast_is_found_out() -> None:
    rates = fed(14_000.0, 100)
    fed(7_000.0, 20, rates)
    assert rates.prefill_tokens_s.value == pytest.approx(7_000.0, rel=0.1)


def test_prompts_that_end_in_the_same_step_are_taken_together() -> None:
    """Three share a step of 0.3 s: the first took it all, the others nothing."""
    rates = Rates()
    for _ in range(40):
        for busy_s in (0.3, 0.0, 0.0):
            rates.prefilled(1400, busy_s)
    assert rates.prefill_tokens_s.value == pytest.approx(14_000.0, rel=0.35)


def test_noise_averages_out() -> None:
    rng, rates = random.Random(3), Rates()
    for _ in range(300):
        rates.prefilled(4096, 4096 / 14_000 * rng.lognormvariate(0.0, 0.5))
    assert rates.prefill_tokens_s.value == pytest.approx(14_000, rel=0.3)


def test_a_guess_holds_until_something_was_seen() -> None:
    rates = Rates()
    assert rates.prefill_tokens_s.value == FIRST_PREFILL_TOKENS_S
    rates.prefill_tokens_s.guess(9000.0)
    assert rates.prefill_tokens_s.value == 9000.0
    fed(3000.0, 5, rates)
    rates.prefill_tokens_s.guess(9000.0)
    assert rates.prefill_tokens_s.value == pytest.approx(3000.0, rel=0.2)


def test_who_may_have_waited_for_a_seat_says_nothing_of_the_rate() -> None:
    rates = fed(14_000.0, 20)
    for _ in range(50):
        rates.prefilled(4096, 4096 / 2_000, had_seat=False)
    assert rates.prefill_tokens_s.value == pytest.approx(14_000.0, rel=0.01)


def test_a_new_incarnation_is_learnt_anew_from_where_the_last_one_was() -> None:
    rates = fed(14_000.0, 50)
    rates.steps.learn(0.01, 5.0)
    learnt = rates.steps.at(5.0)
    rates.reset()
    assert rates.prefill_tokens_s.value == pytest.approx(14_000.0, rel=0.01)
    assert rates.steps.at(5.0) == pytest.approx(learnt)
    assert fed(3_000.0, 3, rates).prefill_tokens_s.value == pytest.approx(3_000.0, rel=0.05)


# -- decode ------------------------------------------------------------------------------------------------


def test_steps_are_learnt_with_their_batch() -> None:
    rng, steps = random.Random(1), Steps()
    for _ in range(300):
        batch = rng.uniform(1, 60)
        steps.learn((0.008 + 0.00012 * batch) * rng.lognormvariate(0.0, 0.1), batch)
    assert steps.at(0) == pytest.approx(0.008, rel=0.15)
    assert steps.at(60) == pytest.approx(0.0152, rel=0.15)


def test_a_batch_that_never_changes_says_nothing_of_the_slope() -> None:
    steps = Steps()
    for _ in range(100):
        steps.learn(0.02, 8.0)
    assert steps.at(8.0) == pytest.approx(0.02)
    # What is usual stands in, until units of its kind have seen something else.
    assert steps.share == pytest.approx(SEQUENCE_SHARE, rel=0.2)


def test_one_frozen_stream_hardly_moves_the_steps() -> None:
    steps = Steps()
    for _ in range(100):
        steps.learn(0.02, 8.0)
    steps.learn(60.0, 8.0)
    assert steps.at(8.0) < 0.024


# -- sizes -------------------------------------------------------------------------------------------------


def test_bytes_per_token_are_learnt_from_usage() -> None:
    rates = Rates()
    for _ in range(30):
        rates.used(prompt_bytes=3000, prompt_tokens=1000)
    assert rates.bytes_per_token.value == pytest.approx(3.0, rel=0.02)
    rates.used(prompt_bytes=10, prompt_tokens=30)
    assert rates.bytes_per_token.value == pytest.approx(3.0, rel=0.02)


# -- errors ------------------------------------------------------------------------------------------------


def test_errors_add_up_fade_and_are_made_good() -> None:
    errors = Errors()
    assert errors.share(100.0) == 0.0
    for _ in range(4):
        errors.failed(100.0)
    assert errors.share(100.0) == pytest.approx(0.9375)
    assert errors.share(130.0) == pytest.approx(0.9375 / 8)
    errors.worked(100.0)
    assert errors.share(100.0) == pytest.approx(0.9375 / 2)
    assert math.isfinite(errors.share(1e12))
