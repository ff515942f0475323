"""What is learnt of a unit's speed: rates, first tokens, steps, peers."""

from __future__ import annotations

import random
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.router.backlog import Backlog, Job, Prefilled
from cellgate.router.learning import (
    ANSWERS,
    FIRST_PREFILL_TOKENS_S,
    FIRST_STEP_S,
    GAPS_MS,
    MARK_S,
    SEQUENCE_SHARE,
    SLOWEST_TOKENS_S,
    UNSURE_TIMES,
    Estimate,
    Peer,
    Rates,
    Steps,
    StepTimes,
    learn_of_peers,
    weights_fit,
)
from cellgate.router.nouns import Unit
from tests.unit.router.fleets import board_of

law = settings(derandomize=True, deadline=None, max_examples=200)
anything = st.floats() | st.floats(1e-3, 1e5)


def fed(tokens_s: float, windows: int, rates: Rates | None = None) -> Rates:
    rates = rates or Rates()
    for _ in range(windows):
        rates.prefilled(4096, 4096 / tokens_s)
    return rates


@law
@given(samples=st.lists(anything), prompts=st.lists(st.tuples(st.integers(), anything)))
def test_an_estimate_is_always_in_its_bounds(samples: list[float], prompts: list[tuple[int, float]]) -> None:
    estimate, rates = Estimate(1e9, 0.5, 1e4), Rates()
    for sample in samples:
        estimate.guess(sample)
        estimate.fade(0.5)
        assert 0.5 <= estimate.value <= 1e4
        estimate.learn(sample)
        assert 0.5 <= estimate.value <= 1e4
    for tokens, busy_s in prompts:
        rates.prefilled(tokens, busy_s)
        assert 1.0 <= rates.prefill_tokens_s.value <= 1e8


@law
@given(samples=st.lists(st.tuples(anything, anything)), batch=st.floats(0.0, 1e6))
def test_a_step_is_always_positive_and_never_shorter_with_more_sequences(
    samples: list[tuple[float, float]], batch: float
) -> None:
    steps = Steps()
    for step_s, sequences in samples:
        steps.learn(step_s, sequences)
        assert Steps.MIN_S <= steps.at(batch) <= steps.at(batch + 1.0) <= Steps.MAX_S
        assert 0.0 <= steps.own_share < float("inf")


@law
@given(outliers=st.lists(st.floats(1e-9, 1e9), max_size=3))
def test_a_few_wild_samples_move_an_estimate_by_little(outliers: list[float]) -> None:
    estimate = Estimate(100.0, 1e-3, 1e6)
    for _ in range(50):
        estimate.learn(100.0)
    for outlier in outliers:
        estimate.learn(outlier)
    assert 100.0 / 1.25 < estimate.value < 100.0 * 1.25


@pytest.mark.parametrize("tokens_s", [50.0, 14_000.0, 200_000.0])
def test_a_prefill_rate_is_found_within_a_few_prompts_and_again_when_it_has_halved(tokens_s: float) -> None:
    rates = fed(tokens_s, 10)
    assert rates.prefill_tokens_s.value == pytest.approx(tokens_s, rel=0.25)
    fed(tokens_s, 90, rates)
    fed(tokens_s / 2, 20, rates)
    assert rates.prefill_tokens_s.value == pytest.approx(tokens_s / 2, rel=0.1)


def test_a_guess_holds_until_something_was_seen_and_a_new_incarnation_begins_where_the_last_one_was() -> None:
    rates = Rates()
    assert rates.prefill_tokens_s.value == FIRST_PREFILL_TOKENS_S
    rates.prefill_tokens_s.guess(9000.0)
    assert rates.prefill_tokens_s.value == 9000.0
    fed(3000.0, 5, rates)
    rates.prefill_tokens_s.guess(9000.0)
    assert rates.prefill_tokens_s.value == pytest.approx(3000.0, rel=0.2)
    rates = fed(14_000.0, 50)
    rates.steps.learn(0.01, 5.0)
    learnt = rates.steps.at(5.0)
    rates.reset()
    assert rates.prefill_tokens_s.value == pytest.approx(14_000.0, rel=0.01)
    assert rates.steps.at(5.0) == pytest.approx(learnt)
    assert fed(3_000.0, 3, rates).prefill_tokens_s.value == pytest.approx(3_000.0, rel=0.05)


def test_who_may_have_waited_for_a_seat_tells_only_the_least_that_a_unit_can_do() -> None:
    rates = fed(14_000.0, 20)
    for _ in range(50):
        rates.prefilled(4096, 4096 / 2_000, had_slot=False)
    assert rates.prefill_tokens_s.value == pytest.approx(14_000.0, rel=0.01)
    rates = fed(1_000.0, 20)
    for tokens in (10_000, 100):
        for _ in range(60):
            rates.prefilled(tokens, 0.0, 1.0, had_slot=False)
        assert rates.prefill_tokens_s.value > 7_500.0


def test_steps_are_learnt_with_their_batch() -> None:
    rng, seen, even = random.Random(1), Rates(), Rates()
    for number in range(300):
        batch = rng.uniform(1, 60)
        seen.steps.learn((0.008 + 0.00012 * batch) * rng.lognormvariate(0.0, 0.1), batch)
        even.steps.learn(0.02, 8.0)
        if number % 10 == 0:
            learn_of_peers([Peer("seen", 1.0, seen), Peer("even", 1.0, even)], 1.0)
    assert seen.steps.at(0) == pytest.approx(0.008, rel=0.15)
    assert seen.steps.at(60) == pytest.approx(0.0152, rel=0.15)
    # A batch that never changes says nothing of the slope: what is usual stands in.
    assert even.steps.at(8.0) == pytest.approx(0.02)
    assert even.steps.share == pytest.approx(SEQUENCE_SHARE, rel=0.2)
    even.steps.learn(60.0, 8.0)
    assert even.steps.at(8.0) < 0.024, "one frozen stream hardly moves it"


def test_a_unit_that_was_slow_with_many_and_is_fast_with_few_is_as_fast_as_its_peers() -> None:
    """It looks as if many made it slow. What gets one request at a time would never show that they do not."""
    units = [measured(1.0, 300) for _ in range(4)]
    was_slow = units[0].steps
    for _ in range(30):
        was_slow.learn(5.0 * STEP_S, 12.0)
    assert step_s(units[0]) > 4.0 * STEP_S
    samples = 0
    while step_s(units[0]) > 1.3 * STEP_S:
        was_slow.learn(STEP_S * (1.0 + SEQUENCE_SHARE) / (1.0 + 8.0 * SEQUENCE_SHARE), 1.0)
        learnt(*((1.0, rates) for rates in units))
        samples += 1
    assert samples <= 15, samples


def test_streams_that_flow_count_until_one_has_ended_and_again_where_none_ends() -> None:
    steps = Steps()
    for step_s in (0.08, 0.02):
        assert steps.is_stale()
        steps.watch(step_s, 0.0)
        assert steps.at(0.0) == pytest.approx(step_s), "only the last look counts"
    steps.learn(0.01, 0.0)
    assert steps.at(0.0) == pytest.approx(0.01), "streams that end say it better"
    assert not steps.is_stale()
    for _ in range(20):
        assert steps.is_stale()
        steps.watch(0.03, 0.0)
    assert steps.at(0.0) == pytest.approx(0.03, rel=0.1)


@pytest.mark.parametrize("at_once", [1, 4, 8])
def test_a_gap_is_as_long_on_average_whether_tokens_come_one_by_one_or_in_bursts(at_once: int) -> None:
    times = StepTimes()
    times.gaps_ms[20 * at_once] += 800 // at_once
    times.gaps_ms[0] += 800 - 800 // at_once
    assert times.mean_gap_s() == pytest.approx(0.02, rel=0.05)
    times.gaps_ms[2000] += 8
    assert times.mean_gap_s() == pytest.approx(0.04, rel=0.05)


def test_bytes_per_token_are_learnt_from_usage() -> None:
    rates = Rates()
    for _ in range(30):
        rates.used(prompt_bytes=3000, prompt_tokens=1000)
    rates.used(prompt_bytes=10, prompt_tokens=30)
    assert rates.bytes_per_token.value == pytest.approx(3.0, rel=0.02)


# What units take over from their peers and from their weights, and for how long.

brief_law = settings(derandomize=True, deadline=None, max_examples=100)
PREFILL_S, STEP_S = 14_000.0, 0.01
WEIGHTS = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=5)


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


def test_units_that_differ_stay_different_and_what_was_seen_long_ago_gives_way_sooner() -> None:
    """An hour with a prompt now and then, and half an hour with nothing."""
    fast, slow, fresh, stale = fed(20_000.0, 20), fed(2_500.0, 20), fed(1_000.0, 50), fed(1_000.0, 50)
    for _ in range(60):
        for _ in range(60):
            learn_of_peers([Peer("m", 1.0, fast), Peer("m", 1.0, slow)], 1.0)
        fed(20_000.0, 1, fast)
        fed(2_500.0, 1, slow)
    assert fast.prefill_tokens_s.value == pytest.approx(20_000.0, rel=0.1)
    assert slow.prefill_tokens_s.value == pytest.approx(2_500.0, rel=0.1)
    for _ in range(1800):
        learn_of_peers([Peer("m", 1.0, stale)], 1.0)
    assert stale.prefill_tokens_s.value == fresh.prefill_tokens_s.value
    for rates in (fresh, stale):
        fed(16_000.0, 5, rates)
    assert stale.prefill_tokens_s.value > 1.25 * fresh.prefill_tokens_s.value


def test_what_one_unit_shows_first_its_peers_have_before_costs_are_compared() -> None:
    """In the middle of a burst: beside ten times the speed guessed for the others it would get the rest."""
    board = board_of(*(Unit(f"u{n}", "a", f"http://u{n}") for n in range(4)), at=99.0)
    board.tick(100.0)
    fed(44_000.0, 1, board.units["u0"].costs.rates)
    board.tick(100.25)
    speeds = [state.costs.cost_terms.tokens_s for state in board]
    assert speeds == [speeds[0]] * 4
    assert speeds[0] > 10_000.0 > FIRST_PREFILL_TOKENS_S


def test_a_weight_stands_for_the_speed_that_is_not_known_unless_weights_were_wrong() -> None:
    fast, slow = learnt((2.0, Rates()), (0.5, Rates()))
    assert fast.prefill_tokens_s.reckoned == FIRST_PREFILL_TOKENS_S == 4.0 * slow.prefill_tokens_s.reckoned
    assert slow.steps.reckoned[0] == 4.0 * FIRST_STEP_S
    fast, _, unknown = learnt((2.0, measured(2.0)), (1.0, measured(1.0)), (4.0, Rates()))
    assert unknown.prefill_tokens_s.reckoned == pytest.approx(2.0 * fast.prefill_tokens_s.value, rel=0.01)
    assert step_s(unknown) == pytest.approx(step_s(fast) / 2.0, rel=0.01)
    *_, unknown = learnt((4.0, measured(1.0)), (1.0, measured(1.0)), (0.5, Rates()))
    assert unknown.prefill_tokens_s.reckoned == pytest.approx(PREFILL_S, rel=0.01)
    assert step_s(unknown) == pytest.approx(STEP_S, rel=0.01)


@pytest.mark.parametrize("weights", [(4.0, 0.5), (0.25, 1.0), (4.0, 1.0)], ids=str)
def test_measured_speeds_count_and_weights_do_not(weights: tuple[float, float]) -> None:
    """Nor do weights that are right by and large."""
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


def test_units_alike_are_reckoned_alike_whatever_their_weights() -> None:
    """What chance makes of equal units is no reason to prefer one of them."""
    rng = random.Random(1)
    for weights in ((1.0, 1.0, 1.0, 1.0), (4.0, 0.5, 1.0, 2.0)):
        units = learnt(*((weight, measured(1.0, error=rng.uniform(0.9, 1.1))) for weight in weights))
        assert len({rates.prefill_tokens_s.reckoned for rates in units}) == 1
        assert len({rates.steps.reckoned for rates in units}) == 1
    # What is taken for a unit that has restarted is its own until peers have shown something.
    alone = measured(3.0)
    alone.reset()
    learnt((1.0, alone), (4.0, Rates()))
    assert alone.prefill_tokens_s.reckoned == pytest.approx(3.0 * PREFILL_S, rel=0.05)
    assert step_s(alone) == pytest.approx(STEP_S / 3.0, rel=0.05)


@brief_law
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


def embedded(times: float, samples: int = 20) -> Rates:
    """A unit that has only given plain answers of one token, so many times as fast as its peers."""
    rates = Rates()
    for _ in range(samples):
        rates.plain_tokens_s.learn(PREFILL_S * times)
    return rates


def test_units_that_only_answer_plainly_are_priced_by_how_much_they_differ() -> None:
    """Once, not again by their weights, and only until a stream has shown a prefill rate."""
    fast, slow = embedded(1.0), embedded(1.0 / 12.0)
    learnt((1.0, fast), (1.0, embedded(1.0)), (1.0, slow))
    assert fast.prefill_tokens_s.value == FIRST_PREFILL_TOKENS_S
    assert slow.prefill_tokens_s.value == pytest.approx(FIRST_PREFILL_TOKENS_S / 12.0, rel=0.1)
    _, half = learnt((2.0, embedded(2.0)), (1.0, embedded(1.0)))
    assert half.prefill_tokens_s.value == pytest.approx(FIRST_PREFILL_TOKENS_S / 2.0)
    _, slow = learnt((1.0, fed(PREFILL_S, 20)), (1.0, embedded(1.0 / 12.0)))
    assert slow.prefill_tokens_s.value == pytest.approx(PREFILL_S, rel=0.05)
    for times, samples in ((0.6, 20), (1.9, 20), (0.1, 1), (3.0, 5)):
        # What may be the wait for other requests is no difference.
        *_, odd = learnt((1.0, embedded(1.0)), (1.0, embedded(1.0)), (1.0, embedded(times, samples)))
        assert odd.prefill_tokens_s.value == FIRST_PREFILL_TOKENS_S


# What is left for rates of what first tokens wait for.


class PlayedUnit:
    """One that computes `tokens_s` a second, each prompt `latency_s` after it was sent."""

    def __init__(self, tokens_s: float, latency_s: float) -> None:
        self.pace, self.work = StepTimes(), Backlog()
        self.tokens_s, self.latency_s = tokens_s, latency_s
        self.now = self.done_at = 0.0

    def compute(self, *prompts: int) -> None:
        """Send some at once, a while after all before; each is shown when it is done."""
        self.now = self.done_at + 1.0
        for number, tokens in enumerate(prompts):
            begins_at = self.now + self.pace.rates.latency.value
            job = Job(tokens, tokens, self.now, begins_at)
            self.work.open((self.now, number), job, self.now)
        self.done_at = self.now + self.latency_s
        for number, tokens in enumerate(prompts):
            self.done_at += tokens / self.tokens_s
            done = self.work.show((self.now, number), self.done_at)
            assert done is not None
            self.pace.prefilled(done)

    @property
    def learnt(self) -> float:
        return self.pace.rates.prefill_tokens_s.value


@pytest.mark.parametrize(("tokens_s", "latency_s", "prompts"), [(20_000.0, 0.5, 200), (7_000.0, 0.0, 20)])
def test_lengths_of_prompts_tell_a_rate_from_latency(tokens_s: float, latency_s: float, prompts: int) -> None:
    unit, rng = PlayedUnit(tokens_s, latency_s), Random(1)
    unit.pace.rates.prefill_tokens_s.guess(14_000.0)
    for _ in range(prompts):
        unit.compute(rng.randrange(500, 20_000))
    assert unit.learnt == pytest.approx(tokens_s, rel=0.1)
    assert unit.pace.rates.latency.without_work_s(unit.learnt) == pytest.approx(latency_s, rel=0.1, abs=0.05)


def test_a_rate_is_told_from_a_latency_by_prompts_right_behind_each_other_and_not_by_some_alone() -> None:
    unit, alike = PlayedUnit(20_000.0, 0.5), PlayedUnit(20_000.0, 0.5)
    for _ in range(50):
        unit.compute(1000, 1000, 1000)
    assert unit.learnt == pytest.approx(20_000.0, rel=0.1)
    alike.compute(4000)
    first = alike.learnt
    for _ in range(100):
        alike.compute(4000)
    assert alike.learnt == first
    assert alike.pace.rates.followed == 0, "nobody is held back for that"


# How fast a unit has been recently.


@brief_law
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
    step_times = StepTimes()
    step_times.gaps_ms[500] += 100
    step_times.mark(MARK_S)
    step_times.gaps_ms[20] += 100
    assert step_times.gap_s(0.99) == 0.021, "the first mark already hides what came before it"
    step_times.mark(1.9 * MARK_S)
    assert step_times.gap_s(0.99) == 0.021, "too soon to be a mark"
    step_times.mark(2 * MARK_S)
    assert step_times.gap_s(0.99) == 0.021, "between the marks"
    step_times.mark(3 * MARK_S)
    assert step_times.gap_s(0.99) is None, "nothing came since the second mark"


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


def test_prefill_is_judged_by_the_prompts_and_not_by_the_queue_or_idle_time() -> None:
    """Thirty prompts at once: the last one waits for three seconds, and takes a tenth of one."""
    step_times, idle, shared, now = StepTimes(), StepTimes(), StepTimes(), 0.0
    assert step_times.prefill_s(100_000) >= 50.0
    assert step_times.prefill_s(0) == 0.0
    prefills(step_times, *[(2_000, 0.1)] * 30)
    assert step_times.prefill_s(2_000) == pytest.approx(0.1, rel=0.05)
    for hour in range(20):
        prefills(idle, (4_000, 0.2), at=3600.0 * hour)
        # Prompts that share a step share its time.
        now = prefills(shared, (2_000, 0.4), (2_000, 0.0), (2_000, 0.0), (2_000, 0.0), at=now)
    assert idle.prefill_s(4_000) == pytest.approx(0.2, rel=0.05)
    assert shared.rates.prefill_tokens_s.value == pytest.approx(20_000.0, rel=0.25)


def test_what_nobody_knows_takes_as_long_as_on_the_slowest_engine_and_larger_prompts_longer() -> None:
    step_times = StepTimes()
    assert step_times.prefill_s(1_000) == 1_000 / SLOWEST_TOKENS_S
    assert step_times.prefill_s(1_000, beside=500) == 1_500 / SLOWEST_TOKENS_S
    step_times.waited(500, 10.0, is_whole=True)
    assert 10.0 < step_times.prefill_s(1_000) < 40.0
    step_times = StepTimes()
    prefills(step_times, *[(4_000, 0.1)] * 20)
    assert step_times.prefill_s(8_000) == pytest.approx(2 * 0.2, rel=0.05)
    assert step_times.prefill_s(400_000) == pytest.approx(UNSURE_TIMES * 4 * 10.0, rel=0.05)


def test_an_engine_that_is_always_full_shows_at_least_how_long_prompts_and_slots_take() -> None:
    stream, plain = StepTimes(), StepTimes()
    stream.prefilled(Prefilled(100, 1.0, 1.0, 1.0, False, False, had_slot=False))
    plain.answered(100, 1.0, 12)
    for step_times in (stream, plain):
        assert step_times.prefill_s(100, beside=200) == pytest.approx(3.0)
        assert step_times.prefill_s(300) == 300 / SLOWEST_TOKENS_S, "nothing is known of one so large"
        step_times.forget_pace()
        assert step_times.prefill_s(100) == 100 / SLOWEST_TOKENS_S


def test_more_prompts_at_once_than_ever_before_may_all_take_as_long_as_the_slowest_alone() -> None:
    step_times = StepTimes()
    step_times.waited(100, 1.0, is_whole=True)
    assert step_times.prefill_s(100, beside=100) < 1.5
    assert 8.9 < step_times.prefill_s(100, beside=800) < 10.0
    step_times.waited(100, 4.0, is_whole=True, beside=800)
    assert 3.5 < step_times.prefill_s(100, beside=800) < 6.0
    # One of ten that are computed in one step shows when all ten are done: none makes another slower.
    together = StepTimes()
    together.waited(100, 10.0, is_whole=True, beside=900)
    assert 9.0 < together.prefill_s(100, beside=900) < 20.0
    assert together.prefill_s(100) > 5.0, "it may have been computed alone, with the others in line"


def test_a_slow_or_short_answer_of_a_slow_engine_does_not_look_like_one_of_a_fast_engine() -> None:
    """Fast ones may have been in the prefix cache."""
    step_times = StepTimes()
    step_times.waited(6_000, 12.0, is_whole=True)
    prefills(step_times, *[(6_000, 0.05)] * 20)
    assert step_times.prefill_s(6_000) > 6.0
    step_times.forget_pace()
    assert step_times.prefill_s(6_000) >= 10.0, "nothing is known any more"
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
