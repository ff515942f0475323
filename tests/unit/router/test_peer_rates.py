"""What units take over from their peers and from their weights, and for how long."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.router.board import Board
from cellgate.router.learning import (
    FIRST_PREFILL_TOKENS_S,
    FIRST_STEP_S,
    Peer,
    Rates,
    learn_of_peers,
    weights_fit,
)
from cellgate.router.nouns import Fleet, Rules, Unit

law = settings(derandomize=True, deadline=None, max_examples=100)
PREFILL_S, STEP_S = 14_000.0, 0.01
WEIGHTS = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=5)


def fed(tokens_s: float, windows: int, rates: Rates | None = None) -> Rates:
    rates = rates or Rates()
    for _ in range(windows):
        rates.prefilled(4096, 4096 / tokens_s)
    return rates


def measured(times: float, samples: int = 20, error: float = 1.0) -> Rates:
    """A unit that is so many times as fast as usual, in all."""
    rates = fed(PREFILL_S * times * error, samples)
    for _ in range(samples):
        rates.steps.learn(STEP_S / times / error, 8.0)
    return rates


def learnt(*units: tuple[float, Rates]) -> list[Rates]:
    learn_of_peers([Peer("m", weight, rates) for weight, rates in units], 1.0)
    return [rates for _, rates in units]


def step_s(rates: Rates) -> float:
    base_s, sequence_s = rates.steps.reckoned
    return base_s + 8.0 * sequence_s


# -- peers -------------------------------------------------------------------------------------------------


def test_units_that_differ_stay_different_however_little_they_get() -> None:
    """An hour with a prompt now and then, and nothing else."""
    fast, slow = fed(20_000.0, 20), fed(2_500.0, 20)
    for _ in range(60):
        for _ in range(60):
            learn_of_peers([Peer("m", 1.0, fast), Peer("m", 1.0, slow)], 1.0)
        fed(20_000.0, 1, fast)
        fed(2_500.0, 1, slow)
    assert fast.prefill_tokens_s.value == pytest.approx(20_000.0, rel=0.1)
    assert slow.prefill_tokens_s.value == pytest.approx(2_500.0, rel=0.1)


def test_what_was_seen_long_ago_gives_way_sooner() -> None:
    fresh, stale = fed(1_000.0, 50), fed(1_000.0, 50)
    for _ in range(1800):
        learn_of_peers([Peer("m", 1.0, stale)], 1.0)
    assert stale.prefill_tokens_s.value == fresh.prefill_tokens_s.value
    for rates in (fresh, stale):
        fed(16_000.0, 5, rates)
    assert stale.prefill_tokens_s.value > 1.25 * fresh.prefill_tokens_s.value


def test_what_one_unit_shows_first_its_peers_have_before_costs_are_compared() -> None:
    """In the middle of a burst: beside ten times the speed guessed for the others it would get the rest."""
    board = Board(Rules())
    board.configure(Fleet((), tuple(Unit(f"u{n}", "a", f"http://u{n}") for n in range(4))), 99.0)
    board.tick(100.0)
    fed(44_000.0, 1, board.units["u0"].costs.rates)
    board.tick(100.25)
    speeds = [state.costs.forecast.tokens_s for state in board]
    assert speeds == [speeds[0]] * 4
    assert speeds[0] > 10_000.0 > FIRST_PREFILL_TOKENS_S


# -- weights -----------------------------------------------------------------------------------------------


def test_a_weight_stands_for_the_speed_until_there_is_one() -> None:
    fast, slow = learnt((2.0, Rates()), (0.5, Rates()))
    assert fast.prefill_tokens_s.reckoned == FIRST_PREFILL_TOKENS_S == 4.0 * slow.prefill_tokens_s.reckoned
    assert slow.steps.reckoned[0] == 4.0 * FIRST_STEP_S


def test_who_was_not_measured_is_taken_to_be_as_much_faster_than_the_others_as_its_weight_says() -> None:
    fast, _, unknown = learnt((2.0, measured(2.0)), (1.0, measured(1.0)), (4.0, Rates()))
    assert unknown.prefill_tokens_s.reckoned == pytest.approx(2.0 * fast.prefill_tokens_s.value, rel=0.01)
    assert step_s(unknown) == pytest.approx(step_s(fast) / 2.0, rel=0.01)


@pytest.mark.parametrize("weights", [(4.0, 0.5), (0.25, 1.0), (1.0, 16.0)], ids=str)
def test_measured_speeds_count_and_weights_do_not(weights: tuple[float, float]) -> None:
    for speeds in ((1.0, 1.0), (1.0, 3.0), (3.0, 1.0)):
        units = learnt(*((weight, measured(times)) for weight, times in zip(weights, speeds, strict=True)))
        for rates, times in zip(units, speeds, strict=True):
            assert rates.prefill_tokens_s.reckoned == pytest.approx(PREFILL_S * times, rel=0.05)
            assert step_s(rates) == pytest.approx(STEP_S / times, rel=0.05)


def test_a_weight_that_one_speed_has_shown_to_be_wrong_is_not_taken_for_the_other() -> None:
    """Answers of one token show no decoding step; short prompts show no prefill rate."""
    prompts = learnt((4.0, fed(PREFILL_S, 20)), (1.0, fed(PREFILL_S, 20)))
    assert [step_s(rates) for rates in prompts] == [step_s(Rates())] * 2
    answers = [Rates(), Rates()]
    for rates in answers:
        rates.steps.learn(STEP_S, 8.0)
    learnt((4.0, answers[0]), (1.0, answers[1]))
    assert {rates.prefill_tokens_s.reckoned for rates in answers} == {FIRST_PREFILL_TOKENS_S}


def test_where_weights_were_wrong_they_are_not_believed_of_the_next_unit() -> None:
    *_, unknown = learnt((4.0, measured(1.0)), (1.0, measured(1.0)), (0.5, Rates()))
    assert unknown.prefill_tokens_s.reckoned == pytest.approx(PREFILL_S, rel=0.01)
    assert step_s(unknown) == pytest.approx(STEP_S, rel=0.01)


def test_units_alike_are_reckoned_alike_whatever_their_weights() -> None:
    """What chance makes of equal units is no reason to prefer one of them."""
    rng = random.Random(1)
    for weights in ((1.0, 1.0, 1.0, 1.0), (4.0, 0.5, 1.0, 2.0)):
        units = learnt(*((weight, measured(1.0, error=rng.uniform(0.9, 1.1))) for weight in weights))
        assert len({rates.prefill_tokens_s.reckoned for rates in units}) == 1
        assert len({rates.steps.reckoned for rates in units}) == 1


def test_units_of_different_weights_that_fit_are_no_faster_than_measured() -> None:
    """Weights that are right by and large are not believed beside measurements either."""
    units = learnt((4.0, measured(3.0)), (1.0, measured(1.0)), (1.0, measured(1.0)))
    assert units[0].prefill_tokens_s.reckoned == pytest.approx(3.0 * PREFILL_S, rel=0.05)
    assert step_s(units[0]) == pytest.approx(STEP_S / 3.0, rel=0.05)
    assert units[1].prefill_tokens_s.reckoned == pytest.approx(PREFILL_S, rel=0.05)


@law
@given(weights=WEIGHTS, speeds=WEIGHTS)
def test_weights_fit_where_nothing_was_measured_and_where_they_are_right(
    weights: list[float], speeds: list[float]
) -> None:
    assert weights_fit([(weight, Rates()) for weight in weights])
    assert weights_fit(
        [(weight, measured(min(max(weight, 0.1), 10.0))) for weight in weights if 0.1 <= weight <= 10.0]
    )
    units = learnt(*((weight, measured(speed)) for weight, speed in zip(weights, speeds, strict=False)))
    assert all(rates.prefill_tokens_s.reckoned > 0.0 for rates in units)


def test_what_is_taken_for_a_unit_that_has_restarted_is_its_own_until_peers_have_shown_something() -> None:
    alone = measured(3.0)
    alone.reset()
    learnt((1.0, alone), (4.0, Rates()))
    assert alone.prefill_tokens_s.reckoned == pytest.approx(3.0 * PREFILL_S, rel=0.05)
    assert step_s(alone) == pytest.approx(STEP_S / 3.0, rel=0.05)


# -- plain answers -----------------------------------------------------------------------------------------


def embedded(times: float, samples: int = 20) -> Rates:
    """A unit that has only given plain answers of one token, so many times as fast as its peers."""
    rates = Rates()
    for _ in range(samples):
        rates.plain_tokens_s.learn(PREFILL_S * times)
    return rates


def test_units_that_only_answer_plainly_are_priced_by_how_much_they_differ() -> None:
    fast, slow = embedded(1.0), embedded(1.0 / 12.0)
    learnt((1.0, fast), (1.0, embedded(1.0)), (1.0, slow))
    assert fast.prefill_tokens_s.value == FIRST_PREFILL_TOKENS_S
    assert slow.prefill_tokens_s.value == pytest.approx(FIRST_PREFILL_TOKENS_S / 12.0, rel=0.1)


@pytest.mark.parametrize(("times", "samples"), [(0.6, 20), (1.9, 20), (0.1, 1), (3.0, 5)])
def test_what_may_be_the_wait_for_other_requests_is_no_difference(times: float, samples: int) -> None:
    odd = embedded(times, samples)
    learnt((1.0, embedded(1.0)), (1.0, embedded(1.0)), (1.0, odd))
    assert odd.prefill_tokens_s.value == FIRST_PREFILL_TOKENS_S


def test_once_a_stream_has_shown_a_prefill_rate_plain_answers_say_nothing() -> None:
    slow = embedded(1.0 / 12.0)
    learnt((1.0, fed(PREFILL_S, 20)), (1.0, slow))
    assert slow.prefill_tokens_s.value == pytest.approx(PREFILL_S, rel=0.05)


def test_weights_that_fit_plain_answers_are_not_counted_twice() -> None:
    _, half = learnt((2.0, embedded(2.0)), (1.0, embedded(1.0)))
    assert half.prefill_tokens_s.value == pytest.approx(FIRST_PREFILL_TOKENS_S / 2.0)
