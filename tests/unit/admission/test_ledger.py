"""The ledger: charges, settlements, refusals, and keys that change meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from cellgate.proxy.admission.keys import ANSWER_TOKENS_MAX, TokenEstimator
from cellgate.proxy.admission.limits import GIVEN_BACK_S, DoorCounts, LimitLedger, UsageRecord
from cellgate.proxy.config.key_file import Key, KeyRing, LimitRules, TenantRules, TokenPrice
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.router.nouns import Ask

AT = 1_751_328_000.0
ASK = Ask(model="m", tenant="t")


NO_LIMITS = LimitRules()


def ring(key: LimitRules = NO_LIMITS, tenant: LimitRules = NO_LIMITS, **prices: TokenPrice) -> KeyRing:
    """A key `k` of a tenant `t`."""
    rules = TenantRules("t", limits=tenant)
    return KeyRing({b"": Key("k", rules, limits=key)}, {"t": rules}, prices)


class Desk:
    """A ledger whose clock stands still, and what it has recorded."""

    def __init__(self, keys: KeyRing) -> None:
        self.now = AT
        self.bills: list[tuple[UsageRecord, float]] = []
        counts = DoorCounts(lambda: frozenset({"m"}))
        self.ledger = LimitLedger(lambda: self.now, counts, lambda *bill: self.bills.append(bill))
        self.ledger.take(keys)

    def admit(self, prompt: int = 0, completion: int = 0) -> bytes | Failure:
        """Charge a request."""
        return self.ledger.admit(("k", prompt, completion, self.now), ASK)

    def kind(self, **tokens: int) -> FailureKind | None:
        """Why a request is refused."""
        found = self.admit(**tokens)
        return found.kind if isinstance(found, Failure) else None

    def settle(self, charged: tuple[int, int], used: tuple[int, int], at: float = AT) -> None:
        """End one."""
        self.ledger.settle(UsageRecord("r", "k", "t", "m", "m", "chat", 200, at, *charged, *used, False))


def test_what_was_charged_too_much_comes_back_and_what_was_too_little_is_taken() -> None:
    desk = Desk(ring(tenant=LimitRules(tokens_per_minute=100)))
    assert desk.kind(prompt=40, completion=60) is None
    assert desk.kind(prompt=1) is FailureKind.LIMITED
    desk.settle((40, 60), (40, 10))
    assert desk.kind(prompt=50) is None
    desk.settle((50, 0), (50, 30))
    assert desk.kind(prompt=1) is FailureKind.LIMITED
    desk.now += 60.0
    assert desk.kind(prompt=1) is None


def test_what_comes_back_after_its_minute_does_not_make_the_next_one_larger() -> None:
    desk = Desk(ring(tenant=LimitRules(tokens_per_minute=100)))
    desk.admit(prompt=100)
    desk.now += 60.0
    desk.admit(prompt=100)
    desk.settle((100, 0), (10, 0), at=AT)
    assert desk.kind(prompt=1) is FailureKind.LIMITED


def test_limits_of_key_and_tenant_both_hold_and_a_refused_request_costs_neither() -> None:
    desk = Desk(ring(LimitRules(requests_per_minute=1), LimitRules(requests_per_minute=2)))
    assert [desk.kind() for _ in range(3)] == [None, FailureKind.LIMITED, FailureKind.LIMITED]
    desk.ledger.take(ring(LimitRules(requests_per_minute=5), LimitRules(requests_per_minute=2)))
    assert [desk.kind() for _ in range(2)] == [None, FailureKind.LIMITED]


def test_limits_that_change_keep_what_was_used() -> None:
    desk = Desk(ring(LimitRules(tokens_per_minute=100)))
    desk.admit(prompt=80)
    desk.ledger.take(ring(LimitRules(tokens_per_minute=90)))
    assert desk.kind(prompt=11) is FailureKind.LIMITED
    assert desk.kind(prompt=10) is None
    desk.ledger.take(ring())
    assert desk.kind(prompt=10**9) is None


def test_money_is_reckoned_by_the_price_of_the_model() -> None:
    price = TokenPrice(prompt=2.0, completion=4.0)
    desk = Desk(ring(LimitRules(cost_per_day=0.001), m=price))
    assert desk.kind(prompt=300, completion=100) is None
    assert desk.kind(prompt=1) is FailureKind.OVER_BUDGET
    desk.settle((300, 100), (100, 50))
    assert desk.bills[0][1] == pytest.approx(0.0004)
    assert desk.kind(prompt=300) is None


def test_a_request_that_may_use_more_than_is_left_is_admitted_alone() -> None:
    desk = Desk(ring(tenant=LimitRules(tokens_per_minute=100)))
    assert desk.kind(prompt=10, completion=5000) is None, "a large max_tokens is no reason to refuse"
    found = desk.admit(prompt=1, completion=1)
    assert isinstance(found, Failure)
    assert (found.kind, found.retry_after_s) == (FailureKind.LIMITED, GIVEN_BACK_S)
    desk.settle((10, 5000), (10, 20))
    assert desk.kind(prompt=10, completion=5000) is None, "what was not used is given back"
    desk.settle((10, 5000), (10, 60))
    assert desk.kind(prompt=1) is FailureKind.LIMITED
    desk.now += 60.0
    assert desk.kind(prompt=101, completion=1) is FailureKind.OVER_BUDGET


def test_short_answers_do_not_teach_that_hundreds_of_long_ones_fit() -> None:
    desk, habits = Desk(ring(tenant=LimitRules(tokens_per_minute=20_000))), TokenEstimator()
    for _ in range(60):
        prompt, completion = habits.expect(5, 1)
        assert desk.kind(prompt=prompt, completion=completion) is None
        habits.learn(5, 5, 1)
        desk.settle((prompt, completion), (5, 1))
    for limit in (0, 2000):
        prompt, completion = habits.expect(5, limit)
        passed = sum(desk.kind(prompt=prompt, completion=completion) is None for _ in range(200))
        assert passed == 10
        for _ in range(passed):
            desk.settle((prompt, completion), (5, 0))


def test_an_answer_without_a_limit_is_expected_to_be_as_long_as_the_longest_lately() -> None:
    habits = TokenEstimator()
    habits.learn(5, 5, 9000)
    assert habits.expect(5, 0)[1] == 9000
    assert habits.expect(5, 100, 40)[1] == 4000
    assert habits.expect(5, 10**9)[1] == ANSWER_TOKENS_MAX


def test_tokens_that_come_unexpected_are_charged_as_they_come() -> None:
    desk = Desk(ring(LimitRules(tokens_per_minute=100)))
    desk.admit(prompt=10)
    desk.ledger.spent("k", "t", "m", 90)
    assert desk.kind(prompt=1) is FailureKind.LIMITED


def test_requests_in_flight_are_released_once_each() -> None:
    desk = Desk(ring(LimitRules(in_flight=1)))
    assert [desk.kind(), desk.kind()] == [None, FailureKind.LIMITED]
    desk.settle((0, 0), (0, 0))
    assert desk.kind() is None
    desk.ledger.abandon("k", "t")
    desk.ledger.abandon("k", "t")
    assert [desk.kind(), desk.kind()] == [None, FailureKind.LIMITED]


def test_clients_are_told_the_limit_with_the_least_left() -> None:
    desk = Desk(ring(LimitRules(tokens_per_minute=1000), LimitRules(tokens_per_minute=500)))
    lines = desk.admit(prompt=100)
    assert isinstance(lines, bytes)
    assert lines.split(b"\r\n")[:3] == [
        b"x-ratelimit-limit-tokens: 500",
        b"x-ratelimit-remaining-tokens: 400",
        b"x-ratelimit-reset-tokens: 61s",
    ]


def test_a_fallback_costs_what_it_costs() -> None:
    big, small = TokenPrice(10.0, 10.0), TokenPrice(1.0, 1.0)
    desk = Desk(ring(tenant=LimitRules(cost_per_day=1.0), big=big, m=small))
    bill = UsageRecord("r", "k", "t", "m", "big", "chat", 200, AT, 40_000, 10_000, 40_000, 10_000, False)
    desk.ledger.admit(("k", 40_000, 10_000, desk.now), ASK._replace(model="big"))
    desk.ledger.settle(bill)
    # 0.05 is spent: 900,000 tokens of the cheap model cost 0.9, 960,000 would be too much.
    assert desk.kind(prompt=960_000) is FailureKind.OVER_BUDGET
    assert desk.kind(prompt=900_000) is None


def test_short_prompts_with_a_long_template_say_nothing_of_long_ones() -> None:
    habits = TokenEstimator()
    for _ in range(60):
        habits.learn(1, 40, 5)
    assert habits.expect(1, 0)[0] == 40
    assert 10_000 < habits.expect(10_000, 0)[0] < 10_200
    for _ in range(60):
        habits.learn(10_000, 15_000, 5)
    assert habits.expect(10_000, 0)[0] == pytest.approx(15_000, rel=0.05)


def test_models_that_no_configuration_names_share_a_label() -> None:
    counts = DoorCounts(lambda: frozenset({"m"}))
    bill: dict[str, Any] = {"model": "m", "prompt_tokens": 1, "completion_tokens": 2}
    usual = UsageRecord("r", "k", "t", "m", "m", "chat", 200, AT, 0, 0, 1, 2, False)
    for model in ("m", "adapter-1", "adapter-2"):
        counts.used(usual._replace(**bill | {"model": model}))
    rows = {
        sample.labels["model"]: sample.value
        for family in counts.collect()
        if family.name == "cellgate_tenant_tokens"
        for sample in family.samples
        if sample.labels["kind"] == "completion"
    }
    assert rows == {"m": 2, "": 4}
