"""How fast a unit has been recently."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.router.backlog import Backlog, Job, Prefilled
from cellgate.router.learning import ANSWERS, GAPS_MS, MARK_S, SLOWEST_TOKENS_S, UNSURE_TIMES, StepTimes

law = settings(derandomize=True, deadline=None, max_examples=50)


def paced(*gaps_ms: int, times: int = 100) -> StepTimes:
    """A pace that has seen these gaps so many times each."""
    step_times = StepTimes()
    add(step_times, *gaps_ms, times=times)
    return step_times


def add(step_times: StepTimes, *gaps_ms: int, times: int = 100) -> None:
    for gap_ms in gaps_ms:
        step_times.gaps_ms[gap_ms] += times


def test_too_few_gaps_tell_nothing() -> None:
    assert paced(20, times=99).gap_s(0.5) is None
    assert paced(20, times=100).gap_s(0.5) == 0.021


def test_a_gap_is_told_by_its_upper_bound() -> None:
    step_times = paced(10, times=99)
    add(step_times, 200, times=1)
    assert step_times.gap_s(0.5) == step_times.gap_s(0.99) == 0.011
    assert step_times.gap_s(1.0) == 0.201


@law
@given(st.dictionaries(st.integers(0, GAPS_MS - 1), st.integers(1, 50), min_size=1), st.floats(0.01, 1.0))
def test_at_least_the_share_asked_for_does_not_exceed_the_gap(seen: dict[int, int], share: float) -> None:
    step_times = StepTimes()
    for gap_ms, times in seen.items():
        step_times.gaps_ms[gap_ms] += times
    gap_s, total = step_times.gap_s(share), sum(seen.values())
    assert (gap_s is None) is (total < 100)
    if gap_s is not None:
        within = sum(times for gap_ms, times in seen.items() if (gap_ms + 1) / 1000 <= gap_s)
        below = sum(times for gap_ms, times in seen.items() if (gap_ms + 1) / 1000 < gap_s)
        assert below < share * total <= within


def test_what_is_older_than_two_marks_is_forgotten() -> None:
    step_times = paced(500)
    step_times.mark(MARK_S)
    add(step_times, 20)
    assert step_times.gap_s(0.99) == 0.021, "the first mark already hides what came before it"
    step_times.mark(2 * MARK_S)
    assert step_times.gap_s(0.99) == 0.021, "between the marks"
    step_times.mark(3 * MARK_S)
    assert step_times.gap_s(0.99) is None, "nothing came since the second mark"


def test_a_mark_too_soon_is_none() -> None:
    step_times = paced(20)
    step_times.mark(MARK_S)
    add(step_times, 30)
    step_times.mark(1.9 * MARK_S)
    assert step_times.gap_s(0.5) == 0.031


def prefills(step_times: StepTimes, *prompts: tuple[int, float], at: float = 0.0) -> float:
    """Prompts of so many tokens that take so long, one after the other, all sent `at`; when all are done."""
    backlog, now = Backlog(), at
    for number, (tokens, _) in enumerate(prompts):
        backlog.open(number, Job(tokens, tokens, at, at), at)
    for number, (_, busy_s) in enumerate(prompts):
        now += busy_s
        done = backlog.show(number, now)
        assert done is not None
        step_times.prefilled(done)
    return now


def test_prefill_is_judged_slow_until_something_is_known() -> None:
    assert StepTimes().prefill_s(100_000) >= 50.0
    assert StepTimes().prefill_s(0) == 0.0


def test_prefill_is_judged_by_the_prompts_and_not_by_the_queue() -> None:
    """Thirty prompts at once: the last one waits for three seconds, and takes a tenth of one."""
    step_times = StepTimes()
    prefills(step_times, *[(2_000, 0.1)] * 30)
    assert step_times.prefill_s(2_000) == pytest.approx(0.1, rel=0.05)


def test_prompts_that_share_a_step_share_its_time() -> None:
    step_times, now = StepTimes(), 0.0
    for _ in range(20):
        now = prefills(step_times, (2_000, 0.4), (2_000, 0.0), (2_000, 0.0), (2_000, 0.0), at=now)
    assert step_times.rates.prefill_tokens_s.value == pytest.approx(20_000.0, rel=0.25)


def test_time_without_a_prompt_is_not_counted() -> None:
    step_times = StepTimes()
    for hour in range(20):
        prefills(step_times, (4_000, 0.2), at=3600.0 * hour)
    assert step_times.prefill_s(4_000) == pytest.approx(0.2, rel=0.05)


def test_a_prompt_larger_than_any_before_is_given_more_time() -> None:
    step_times = StepTimes()
    prefills(step_times, *[(4_000, 0.1)] * 20)
    assert step_times.prefill_s(8_000) == pytest.approx(2 * 0.2, rel=0.05)
    assert step_times.prefill_s(400_000) == pytest.approx(UNSURE_TIMES * 4 * 10.0, rel=0.05)


def test_what_nobody_knows_takes_as_long_as_on_the_slowest_engine() -> None:
    step_times = StepTimes()
    assert step_times.prefill_s(1_000) == 1_000 / SLOWEST_TOKENS_S
    assert step_times.prefill_s(1_000, beside=500) == 1_500 / SLOWEST_TOKENS_S
    step_times.waited(500, 10.0, is_whole=True)
    assert 10.0 < step_times.prefill_s(1_000) < 40.0


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_engine_that_is_always_full_shows_at_least_how_long_prompts_and_slots_take(
    is_stream: bool,
) -> None:
    step_times = StepTimes()
    if is_stream:
        step_times.prefilled(Prefilled(100, 1.0, 1.0, 1.0, False, False, had_seat=False))
    else:
        step_times.answered(100, 1.0, 12)
    assert step_times.prefill_s(100, beside=200) == pytest.approx(3.0)
    assert step_times.prefill_s(300) == 300 / SLOWEST_TOKENS_S, "nothing is known of one so large"
    step_times.forget_pace()
    assert step_times.prefill_s(100) == 100 / SLOWEST_TOKENS_S


def test_a_slow_answer_is_remembered_behind_fast_ones() -> None:
    """The fast ones may have been in the prefix cache."""
    step_times = StepTimes()
    step_times.waited(6_000, 12.0, is_whole=True)
    prefills(step_times, *[(6_000, 0.05)] * 20)
    assert step_times.prefill_s(6_000) > 6.0
    step_times.forget_pace()
    assert step_times.prefill_s(6_000) >= 10.0, "nothing is known any more"


def test_more_prompts_at_once_than_ever_before_may_all_take_as_long_as_the_slowest_alone() -> None:
    step_times = StepTimes()
    step_times.waited(100, 1.0, is_whole=True)
    assert step_times.prefill_s(100, beside=100) < 1.5
    assert 8.9 < step_times.prefill_s(100, beside=800) < 10.0
    step_times.waited(100, 4.0, is_whole=True, beside=800)
    assert 3.5 < step_times.prefill_s(100, beside=800) < 6.0


def test_prompts_that_waited_together_do_not_make_each_other_slower() -> None:
    """One of ten that are computed in one step shows when all ten are done."""
    step_times = StepTimes()
    step_times.waited(100, 10.0, is_whole=True, beside=900)
    assert 9.0 < step_times.prefill_s(100, beside=900) < 20.0
    assert step_times.prefill_s(100) > 5.0, "it may have been computed alone, with the others in line"


def test_a_short_answer_of_a_slow_engine_does_not_look_like_one_of_a_fast_engine() -> None:
    step_times = StepTimes()
    step_times.answered(0, 1.3, 4)
    assert step_times.answer_token_s == pytest.approx(0.325)
    step_times.answered(0, 300.0, 1)
    assert ANSWERS * step_times.answer_token_s == pytest.approx(ANSWERS * 300.0 / 16)


def test_an_engine_that_counts_the_pieces_of_a_large_prompt_is_given_the_time_of_a_piece() -> None:
    """Known only once one was seen, and only of prompts like it."""
    step_times = StepTimes()
    first_s = step_times.prefill_s(100_000, counts=True)
    assert first_s > 20.0
    step_times.record_stall(100_000, 0.3)
    assert step_times.prefill_s(100_000, counts=True) == pytest.approx(0.6)
    assert step_times.prefill_s(100_000, counts=False) >= first_s
    assert step_times.prefill_s(300_000, counts=True) >= first_s


@law
@given(st.lists(st.floats(0.001, 100.0), max_size=100), st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_larger_prompt_never_takes_less(busy_s: list[float], one: int, other: int) -> None:
    step_times = StepTimes()
    prefills(step_times, *((1_000, each_s) for each_s in busy_s))
    small, large = sorted((one, other))
    assert step_times.prefill_s(small) <= step_times.prefill_s(large)
