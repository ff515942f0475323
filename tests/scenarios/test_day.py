"""A short day of churn (`python -m tests.scenarios.day` plays a long one), and what measures it."""

from __future__ import annotations

from collections import Counter, deque

from cellgate.router.board import Board
from cellgate.router.nouns import Rules
from tests.scenarios.day import ACTS, Day
from tests.scenarios.day_sizes import Mark, grown, sizes
from tests.scenarios.plans import STRIKES

HOURS = 0.05


class Kept:
    """Something of the product."""

    def __init__(self) -> None:
        self.some = {"a": [1, 2], "b": [3]}
        self.last = deque([1, 2, 3], maxlen=3)
        self.board = Board(Rules())
        self.told = lambda: self.board


Kept.__module__ = "cellgate.kept"


def test_in_a_short_day_of_churn_nobody_is_lost_and_nothing_grows() -> None:
    day = Day(1, HOURS)
    assert day.wrong == []
    assert day.dealt.keys() & STRIKES.keys()
    assert day.dealt.keys() & ACTS.keys()
    assert day.counts["whole"] > 40


def test_what_is_kept_is_found_wherever_it_is_but_for_what_is_bounded() -> None:
    found = sizes([Kept()])
    assert (found["Kept.some"], found["all Kept"], found["all Board"]) == (5, 1, 1)
    assert "Kept.last" not in found


def test_what_there_is_more_of_has_grown_and_chance_is_no_growth() -> None:
    before = Mark(0.0, Counter({"UnitState.news": 20}), 1000, Counter())
    assert grown(before, Mark(1.0, Counter({"UnitState.news": 25}), 1500, Counter())) == []
    (line,) = grown(before, Mark(1.0, Counter({"UnitState.news": 40}), 1500, Counter()))
    assert line == "UnitState.news: 20 have become 40"
    (line,) = grown(
        before, Mark(1.0, Counter({"UnitState.news": 20}), 10_000, Counter({"cellgate.Lost": 9000}))
    )
    assert line == "9000 more objects are alive, of these: 9000 cellgate.Lost"
