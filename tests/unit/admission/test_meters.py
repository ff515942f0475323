"""Meters: alone, and several that share a counter."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pytest

from cellgate.proxy.admission.limits import Meter, Period

AT = datetime(2026, 12, 31, 23, 59, 30, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(("period", "length_s"), [("minute", 60), ("day", 86_400), ("month", 31 * 86_400)])
def test_windows_are_those_of_the_clock(period: str, length_s: int) -> None:
    begins_at, ends_at = Period(period).window(AT)
    assert ends_at == AT + 30
    assert ends_at - begins_at == length_s
    assert Period(period).window(ends_at)[0] == ends_at


def test_alone_it_takes_what_there_is_and_no_more() -> None:
    meter = Meter(100, Period.MINUTE, AT)
    meter.spent += 60
    assert (meter.has_room(40), meter.has_room(41), meter.left) == (True, False, 40)
    meter.spent -= 10
    assert meter.left == 50
    meter.roll(meter.ends_at, 0)
    assert meter.left == 100


def test_another_limit_holds_at_once() -> None:
    meter = Meter(100, Period.MINUTE, AT)
    meter.spent += 60
    meter.change(50)
    assert not meter.has_room(1)
    meter.change(80)
    assert (meter.has_room(20), meter.has_room(21)) == (True, False)


def take(meter: Meter, total: int, gates: int) -> int:
    """One exchange with the counter; where that is then."""
    amount = meter.to_take(gates)
    meter.took(amount, total + amount)
    return total + amount


@pytest.mark.parametrize("seed", range(10))
def test_gates_that_share_pass_the_limit_within_a_few_requests(seed: int) -> None:
    """Each gate wants more than all of it; each exchange is late by as much as chance has it."""
    rng, gates, limit, request = random.Random(seed), 3, 10_000, 50
    meters = [Meter(limit, Period.MINUTE, AT, gates) for _ in range(gates)]
    total = 0
    for _ in range(4000):
        meter = rng.choice(meters)
        if meter.has_room(request):
            meter.spent += request
        if rng.random() < 0.05:
            total = take(meter, total, gates)
    assert 0.98 * limit <= sum(meter.spent for meter in meters) <= limit + gates * request


@pytest.mark.parametrize("seed", range(5))
def test_one_busy_gate_gets_nearly_all_while_the_others_are_idle(seed: int) -> None:
    rng, gates, limit, request = random.Random(seed), 3, 10_000, 50
    meters = [Meter(limit, Period.MINUTE, AT, gates) for _ in range(gates)]
    total = 0
    for _ in range(4000):
        if meters[0].has_room(request):
            meters[0].spent += request
        if rng.random() < 0.05:
            for meter in meters:
                total = take(meter, total, gates)
    assert 0.98 * limit <= meters[0].spent <= limit + request


def test_a_request_that_is_larger_than_a_slice_passes_where_it_is_free() -> None:
    meter = Meter(1000, Period.MINUTE, AT, 3)
    assert meter.has_room(900)
    meter.spent += 900
    assert not meter.has_room(50)


def test_without_the_counter_each_has_the_whole_limit_and_afterwards_owes_what_it_used() -> None:
    meter, other = (Meter(1000, Period.MINUTE, AT, 2) for _ in range(2))
    total = take(other, take(meter, 0, 2), 2)
    meter.stand_alone()
    meter.spent += 1000
    assert not meter.has_room(1)
    total = take(meter, total, 2)
    total = take(other, total, 2)
    assert total >= 1000
    assert other.left == 0


def test_a_counter_that_has_forgotten_is_told_again() -> None:
    meter = Meter(1000, Period.MINUTE, AT, 2)
    meter.spent += 400
    take(meter, 0, 2)
    total = take(meter, 0, 2)
    assert take(meter, total, 2) >= 400
