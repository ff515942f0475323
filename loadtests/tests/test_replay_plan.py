"""What the replay runs, and what it says that it cannot."""

from __future__ import annotations

import pytest

from loadtests.gym.cells import Cell
from loadtests.replay.__main__ import SAMPLE
from loadtests.replay.plan import CELLS, PlanError, Timed, plays
from loadtests.replay.plays import Play


def made(timed: Timed, seeds: int = 1) -> list[Play]:
    return list(plays(timed, seeds=seeds, span_s=5.0, trace=SAMPLE, gate={}))


def test_a_load_at_a_rate_is_as_many_requests_as_come_in_the_span() -> None:
    (play,) = made(Timed(Cell("shared_prompt", "equal", -16.0)))
    assert (len(play.requests), play.cell) == (80, "shared_prompt 16/s equal, 16/s")
    (fast,) = made(Timed(Cell("shared_prompt", "equal", -16.0), 4.0))
    assert len(fast.requests) == 320


def test_each_seed_has_requests_of_its_own_and_the_same_ones_again() -> None:
    first, second = made(Timed(Cell("zipf", "two", -10.0)), seeds=2)
    assert [each.at for each in first.requests] != [each.at for each in second.requests]
    again = made(Timed(Cell("zipf", "two", -10.0)), seeds=2)[1]
    assert list(again.bodies.values()) == list(second.bodies.values())


@pytest.mark.parametrize("timed", CELLS, ids=lambda timed: str(timed.cell))
def test_the_plan_can_be_run(timed: Timed) -> None:
    (play,) = made(timed)
    assert play.requests


@pytest.mark.parametrize(
    ("load", "fleet", "reason"),
    [
        ("rag", "far_cell", "several cells"),
        ("rag", "two_gates", "several cells or gates"),
        ("rag", "dies", "one that changes"),
        ("rag", "weights", "weights of their own"),
        ("tenants", "equal", "tenants"),
        ("two_models", "equal", "several models"),
        ("deadlines", "equal", "deadlines"),
    ],
)
def test_what_is_for_the_gym_alone_is_told(load: str, fleet: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        made(Timed(Cell(load, fleet, -2.0)))
