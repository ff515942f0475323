"""What is predicted of one unit more and one fewer, and which is missed least."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cellgate.extras.scaling.demand import (
    ENOUGH,
    WINDOW_S,
    AnsweredRequest,
    Arrival,
    Demand,
    Waits,
    demand_of,
    desired_units,
    least_valued,
    replay_s,
    waits,
)
from cellgate.router.board import Board
from cellgate.router.nouns import Ask, Evidence, Fleet, Rules, Sign, Strength, Unit
from tests.unit.router.fleets import board_up


def demand(count: int = 400, gap_s: float = 0.1, prefill_s: float = 0.3, decode_s: float = 1.0) -> Demand:
    rng = random.Random(1)
    at, arrivals = 0.0, []
    for _ in range(count):
        at += rng.expovariate(1.0 / gap_s)
        arrivals.append(Arrival(at, prefill_s, decode_s))
    return Demand(arrivals, 4, 64, lambda batch: 0.01 + 0.001 * batch, 0.02, None)


def test_more_units_never_mean_longer_waits_for_prompts_seats_and_steps() -> None:
    found = [replay_s(demand(), units) for units in range(1, 9)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 20.0, "one unit has three times the work that it can do"
    assert found[-1] == pytest.approx(0.32, abs=0.01), "eight have next to nothing to wait for"
    long = replace(demand(prefill_s=0.001, decode_s=10.0), step_s=lambda _batch: 0.01)
    assert replay_s(replace(long, slots=100), 4) < 0.1
    assert replay_s(replace(long, slots=20), 4) > 1.0
    slow = replace(demand(prefill_s=0.001, decode_s=4.0), slots=12, step_s=lambda batch: 0.01 * batch)
    assert replay_s(slow, 3) > replay_s(replace(slow, step_s=lambda _batch: 0.01), 3)


def test_predictions_are_scaled_by_what_was_measured_and_without_enough_there_are_none() -> None:
    plain = waits(demand())
    assert plain.now is not None
    scaled = waits(replace(demand(), measured_s=2.0 * plain.now))
    assert [each / other for each, other in zip(scaled, plain, strict=True) if each and other] == [2.0] * 3
    assert waits(demand(ENOUGH - 1)) == waits(replace(demand(), units=0)) == Waits()
    assert waits(replace(demand(), units=1)).fewer is None


def served(at: float, *, is_stream: bool = True, unit: str = "a") -> AnsweredRequest:
    return AnsweredRequest(at + 1.0, at + 3.0 if is_stream else at + 5.0, at + 5.0, 1000, unit, 1.0)


def demand_from(*requests: AnsweredRequest, now: float = 50.0, own: int = 0, foreign: int = 0) -> Demand:
    board = Board(Rules())
    board.configure(Fleet(units=(Unit("a", "c", "http://a", max_in_flight=7),)), 0.0)
    for _ in range(own):
        board.open("a", Ask(), 0.0, retry=False)
    board.units["a"].foreign = foreign
    return demand_of(requests, list(board), now)


def test_requests_are_taken_from_when_they_came_until_they_ended() -> None:
    found = demand_from(*(served(float(n)) for n in range(ENOUGH)))
    assert found.arrivals[0].at == 0.0
    assert found.arrivals[0].decode_s == 2.0
    assert (found.measured_s, found.slots) == (3.0, 7)
    plain = demand_from(*(served(float(n), is_stream=False) for n in range(ENOUGH)))
    assert plain.measured_s is None, "when the first token of a plain answer came is not known"
    assert plain.arrivals[0].decode_s == pytest.approx(4.0 - plain.arrivals[0].prefill_s)


def test_old_requests_and_those_of_other_units_do_not_count_and_other_gates_take_their_part() -> None:
    assert not demand_from(served(0.0), now=WINDOW_S + 1.0).arrivals
    assert not demand_from(served(0.0, unit="gone")).arrivals
    alone, beside = demand_from(served(0.0), own=2), demand_from(served(0.0), own=2, foreign=2)
    assert beside.arrivals[0].prefill_s == 2.0 * alone.arrivals[0].prefill_s


@pytest.mark.parametrize(
    ("found", "usable", "units", "saturated", "desired"),
    [
        (Waits(9.0, 3.0, 1.0), 4, 4, 0.9, 5),
        (Waits(9.0, 3.0, 1.0), 4, 5, 0.9, 5),  # One is on its way.
        (Waits(0.4, 0.3, 0.3), 4, 4, 0.4, 3),
        (Waits(0.4, 0.3, 0.3), 4, 4, 0.6, 4),  # The others would be too full.
        (Waits(1.5, 0.3, 0.3), 4, 4, 0.4, 4),
        (Waits(0.4, 0.3, 0.3), 3, 4, 0.4, 4),
        (Waits(), 4, 4, 0.0, 4),
        (Waits(0.4, 0.3, 0.3), 1, 1, 0.1, 1),  # One was drained since.
    ],
)
def test_one_more_one_fewer_or_as_many(
    found: Waits, usable: int, units: int, saturated: float, desired: int
) -> None:
    assert desired_units(found, usable, units, 2.0, saturated) == desired


# The unit that is missed least.


def board(**blocks: list[int]) -> Board:
    """Usable units that hold these blocks."""
    found = board_up(*(Unit(name, "c", f"http://{name}") for name in blocks))
    for name, held in blocks.items():
        found.units[name].costs.prefixes.record(held)
    assert all(state.is_usable() for state in found)
    return found


def least(found: Board) -> tuple[str, bool] | None:
    """The unit that is missed least, and whether it is worth anything."""
    valued = least_valued(list(found))
    return None if valued is None else (valued.unit, valued.value_s > 0.0)


def test_it_is_worth_the_prefill_of_what_nobody_else_holds_and_one_that_does_not_work_nothing() -> None:
    assert least(board(a=[1, 2, 3], b=[1, 2, 3, 4, 5], c=[4, 5, 6, 7])) == ("a", False)
    found = board(a=[1], b=[2, 3], c=[4, 5, 6])
    assert least(found) == ("a", True)
    found.observe(Evidence("c", Sign.BAD, Strength.FATAL, "readiness", "refused", 2.0))
    assert least(found) == ("c", False)
    found.drain("c", drained=True)
    assert least(found) == ("a", True)
    found.drain("a", drained=True)
    assert least(found) is None, "the last one stays"
    found.observe(Evidence("b", Sign.BAD, Strength.FATAL, "readiness", "refused", 2.0))
    assert least(found) is None, "also when it does not work"
