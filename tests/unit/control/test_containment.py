"""What containment keeps of units does not outlive them."""

from __future__ import annotations

from typing import Any, cast

from cellgate.proxy.control.containment import Containment
from cellgate.proxy.logs.events import EventLog
from cellgate.router.board import Board
from cellgate.router.flip import Flip
from cellgate.router.nouns import Evidence, Fleet, Rules, Sign, Strength, Unit, Verdict
from tests.scenarios.day_sizes import sizes

PASSED = Evidence("", Sign.GOOD, Strength.STRONG, "canary", "one token", 1.0)


def test_a_thousand_units_that_came_and_went_leave_nothing() -> None:
    board = Board(Rules())
    events = EventLog(float, 2, log=lambda _level, _line: None)
    nobody = cast("Any", None)
    contained = Containment(board, nobody, events, float, nobody, answered=len, ban_s=1.0)
    for number in range(1000):
        name = f"pod-{number}"
        board.configure(Fleet(units=(Unit(name, "a", f"http://{name}"),)), 0.0)
        contained.flipped(Flip(name, "a", Verdict.STARTING, Verdict.UP, 1.0, PASSED))
    assert sizes(contained)["Containment._answered_before"] == 1
