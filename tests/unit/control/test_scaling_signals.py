"""How many units a gate asks for, right after one has gone."""

from __future__ import annotations

import asyncio
from typing import Any

from cellgate.proxy.control.scaling import Scaling
from cellgate.router.board import Board
from cellgate.router.nouns import Evidence, Fleet, Rules, Sign, Strength, Unit
from cellgate.router.queue import FairRules, Queue

GOAL_S = 2.0


class Pool:
    """Usable units that have little to do, and what is said of them."""

    def __init__(self, units: int) -> None:
        self.board = Board(Rules())
        names = [f"u{n}" for n in range(units)]
        self.board.configure(Fleet(units=tuple(Unit(name, "c", f"http://{name}") for name in names)), 0.0)
        for name in names:
            self.board.observe(Evidence(name, Sign.GOOD, Strength.STRONG, "canary", "a token", 1.0))
        self.scaling = Scaling(self.board, Queue(FairRules()))
        for at in range(60):
            self.scaling.answered.append((float(at), at + 0.1, at + 0.5, 10, names[at % units]))
        self.scaling.tick(60.0)
        self.scaling.tick(60.25)

    def view(self) -> dict[str, Any]:
        (only,) = asyncio.run(self.scaling.view(GOAL_S))["pools"]
        found: dict[str, Any] = only
        return found


def test_one_unit_fewer_is_asked_for_once() -> None:
    pool = Pool(4)
    assert pool.view()["desired_units"] == 3
    pool.board.drain("u0", drained=True)
    found = pool.view()
    assert found["desired_units"] == 3
    assert found["wait_p90_s"]["fewer"] is None
    assert found["wait_p90_s"]["now"] is not None


def test_of_two_units_the_last_one_stays() -> None:
    pool = Pool(2)
    assert pool.view()["desired_units"] == 1
    pool.board.drain("u0", drained=True)
    assert pool.view()["desired_units"] == 1
