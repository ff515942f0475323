"""What first tokens wait for besides work, and when a unit's differs from its peers'."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.router.latency import LATENCY_MAX_S, Latency
from cellgate.router.learning import Peer, Rates, learn_of_peers
from tests.unit.router.test_learning import brief_law

TOKENS_S = 4000.0
any_seconds = st.floats() | st.floats(0.0, 1e3)


@brief_law
@given(st.lists(st.tuples(st.integers(), any_seconds, any_seconds)))
def test_nothing_upsets_it_and_short_prompts_say_most(samples: list[tuple[int, float, float]]) -> None:
    latency = Latency()
    for _ in range(10):
        latency.learn(16_000, 1.0, 1.5)
        latency.learn(160, 0.01, 0.51)
    assert latency.value == pytest.approx(0.51, rel=0.02)
    assert latency.without_work_s(16_000.0) == pytest.approx(0.5, rel=0.02)
    for _ in range(50):
        latency.learn(100, 0.01, 0.1)
    latency.learn(100, 0.01, 300.0)
    assert latency.value < 0.15, "one that hangs says little"
    for tokens, work_s, ttft_s in samples:
        latency.guess(ttft_s)
        latency.learn(tokens, work_s, ttft_s)
        assert 0.0 <= latency.value <= LATENCY_MAX_S
        assert 0.0 <= latency.without_work_s(1000.0) <= latency.value
        assert 0.0 <= latency.reckoned_s(1000.0) <= LATENCY_MAX_S


def units(*waits: list[float], is_fresh: bool = False) -> list[float]:
    """The latencies that units are compared by which have shown these times to a first token, just now or a
    while ago.
    """
    every = [Rates() for _ in waits]
    for at in range(max(map(len, waits))):
        for rates, of_unit in zip(every, waits, strict=True):
            if at < len(of_unit):
                rates.latency.learn(10, 0.0, of_unit[at])
        learn_of_peers([Peer("m", 1.0, rates) for rates in every], 1.0)
    if not is_fresh:
        learn_of_peers([Peer("m", 1.0, rates) for rates in every], 1.0)
    return [rates.latency.reckoned_s(TOKENS_S) for rates in every]


def test_a_unit_that_had_two_slow_requests_by_chance_looks_like_its_peers() -> None:
    usual_s, unlucky_s = units([0.06] * 11, [10.0] * 2)
    assert unlucky_s == pytest.approx(usual_s, abs=0.03)


def test_what_a_unit_has_just_shown_counts() -> None:
    """It may have requests of another gate."""
    usual_s, slower_s = units([0.06, 0.1, 0.3, 0.1], [0.06, 0.5, 0.3, 0.5], is_fresh=True)
    assert slower_s > 2.0 * usual_s


def test_what_a_unit_shows_after_a_restart_is_new_however_many_it_had_shown_before() -> None:
    slow, usual = Rates(), Rates()
    peers = [Peer("m", 1.0, slow), Peer("m", 1.0, usual)]
    for _ in range(2):
        for rates, ttft_s in ((slow, 0.5), (usual, 0.06)):
            rates.latency.reset()
            for _ in range(2):
                rates.latency.learn(10, 0.0, ttft_s)
        learn_of_peers(peers, 1.0)
    assert slow.latency.reckoned_s(TOKENS_S) > 3.0 * usual.latency.reckoned_s(TOKENS_S)


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("chance", [0.1, 0.3, 0.5])
def test_equals_some_of_whose_requests_take_long_are_rarely_told_apart(count: int, chance: float) -> None:
    rng, apart, rounds = Random(count), 0, 300
    for _ in range(rounds):
        waits = [
            [3.0 if rng.random() < chance else 0.05 for _ in range(rng.randint(1, 20))] for _ in range(count)
        ]
        found = units(*waits)
        apart += max(found) - min(found) > 0.1
    assert apart <= 0.12 * rounds


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_unit_each_of_whose_requests_takes_longer_is_told_apart_after_a_few(count: int) -> None:
    for seen in (3, 5, 10):
        *_, usual_s, slow_s = units(*[[0.05, 0.06, 0.05, 0.07]] * (count - 1), [0.5] * seen)
        assert slow_s > 3.0 * usual_s
