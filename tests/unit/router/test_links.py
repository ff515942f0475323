"""The link of a pair: avoided after a failure, tried again, and priced by what transfers took."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cellgate.router.prefill_decode import AVOID_MOST_S, AVOID_S, FIRST_TOKENS_S, STALE_S, TransferLink


def test_the_first_failure_closes_it_and_success_opens_it() -> None:
    link = TransferLink()
    assert link.is_open(0.0)
    assert link.fail("cut", 10.0)
    assert not link.is_open(10.0 + AVOID_S - 0.1)
    assert link.is_open(10.0 + AVOID_S)
    link.learn(1000, 0.1, 20.0)
    assert link.is_open(20.0)
    assert link.failures == 0


def test_after_a_failure_one_request_at_a_time_tries_it() -> None:
    link = TransferLink()
    link.fail("cut", 0.0)
    link.use(AVOID_S)
    assert not link.is_open(AVOID_S)
    assert link.is_open(2 * AVOID_S)


def test_one_request_goes_over_a_link_that_was_never_used() -> None:
    link = TransferLink()
    link.use(0.0)
    assert not link.is_open(1.0)
    link.learn(1000, 8.0, 8.0)
    assert link.is_open(8.0)
    # How long its engines took to connect says nothing about its speed.
    assert link.seen == 0


def test_requests_that_fail_together_count_once() -> None:
    link = TransferLink()
    assert [link.fail("cut", 0.0) for _ in range(10)] == [True] + [False] * 9
    assert link.failures == 1
    assert link.failed == 10


def test_a_slow_link_is_dear_and_is_forgiven_after_a_while() -> None:
    link = TransferLink()
    usual_s = link.seconds(10_000, 0.0)
    for at in range(9):
        link.learn(10_000, 5.0, float(at))
    assert link.seconds(10_000, 8.0) > 10 * usual_s
    assert link.is_open(8.0)
    assert link.seconds(10_000, 9.0 + STALE_S) == usual_s


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 300.0), st.floats(0.0, 1e6)), max_size=50))
def test_it_is_never_avoided_for_longer_than_the_bound(steps: list[tuple[bool, float, float]]) -> None:
    link, now = TransferLink(), 0.0
    for has_failed, wait_s, tokens in steps:
        now += wait_s
        if has_failed:
            link.fail("x", now)
        else:
            link.learn(int(tokens), wait_s, now)
        assert link.avoided_until - now <= AVOID_MOST_S + 1e-6
        assert 0.0 < link.seconds(tokens, now) < float("inf")
    assert link.is_open(now + AVOID_MOST_S + 1e-6)


def test_an_unknown_link_has_the_speed_of_a_usual_one() -> None:
    assert TransferLink().seconds(FIRST_TOKENS_S, 0.0) > 1.0
