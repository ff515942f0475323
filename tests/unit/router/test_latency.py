"""What first tokens wait for besides work, and what is left of it for rates."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.router.backlog import Backlog, Job
from cellgate.router.learning import LATENCY_MAX_S, Latency, StepTimes

law = settings(derandomize=True, deadline=None, max_examples=100)
anything = st.floats() | st.floats(0.0, 1e3)


@law
@given(st.lists(st.tuples(st.integers(), anything, anything)))
def test_nothing_upsets_it(samples: list[tuple[int, float, float]]) -> None:
    latency = Latency()
    for tokens, work_s, ttft_s in samples:
        latency.guess(ttft_s)
        latency.learn(tokens, work_s, ttft_s)
        assert 0.0 <= latency.value <= LATENCY_MAX_S
        assert 0.0 <= latency.without_work_s(1000.0) <= latency.value


def test_short_prompts_say_most() -> None:
    latency = Latency()
    for _ in range(10):
        latency.learn(16_000, 1.0, 1.5)
        latency.learn(160, 0.01, 0.51)
    assert latency.value == pytest.approx(0.51, rel=0.02)
    assert latency.without_work_s(16_000.0) == pytest.approx(0.5, rel=0.02)


def test_one_that_hangs_moves_it_by_little() -> None:
    latency = Latency()
    for _ in range(50):
        latency.learn(100, 0.01, 0.1)
    latency.learn(100, 0.01, 300.0)
    assert latency.value < 0.15


class Unit:
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


def test_a_rate_is_told_from_a_latency_by_the_lengths_of_prompts() -> None:
    unit, rng = Unit(20_000.0, 0.5), Random(1)
    for _ in range(200):
        unit.compute(rng.randrange(100, 20_000))
    assert unit.learnt == pytest.approx(20_000.0, rel=0.1)
    assert unit.pace.rates.latency.without_work_s(unit.learnt) == pytest.approx(0.5, rel=0.1)


def test_a_rate_is_told_from_a_latency_by_prompts_right_behind_each_other() -> None:
    unit = Unit(20_000.0, 0.5)
    for _ in range(50):
        unit.compute(1000, 1000, 1000)
    assert unit.learnt == pytest.approx(20_000.0, rel=0.1)


def test_prompts_that_are_all_alike_and_alone_change_no_rate() -> None:
    unit = Unit(20_000.0, 0.5)
    unit.compute(4000)
    first = unit.learnt
    for _ in range(100):
        unit.compute(4000)
    assert unit.learnt == first
    assert unit.pace.rates.followed == 0, "nobody is held back for that"


def test_without_a_latency_a_rate_is_learnt_as_well_from_prompts_that_were_alone() -> None:
    unit, rng = Unit(7_000.0, 0.0), Random(1)
    unit.pace.rates.prefill_tokens_s.guess(14_000.0)
    for _ in range(20):
        unit.compute(rng.randrange(500, 20_000))
    assert unit.learnt == pytest.approx(7_000.0, rel=0.1)


def test_what_was_achieved_is_the_least_that_a_unit_can_do() -> None:
    rates = StepTimes().rates
    for _ in range(20):
        rates.prefilled(4096, 4.096)
    for _ in range(60):
        rates.prefilled(10_000, 0.0, 1.0, had_seat=False)
    assert rates.prefill_tokens_s.value > 7_500.0
    for _ in range(60):
        rates.prefilled(100, 0.0, 1.0, had_seat=False)
    assert rates.prefill_tokens_s.value > 7_500.0
