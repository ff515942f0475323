"""What is told of a model's capacity, and of starts that take too long: once, with the cause, and no blame of
what an operator wanted.
"""

from __future__ import annotations

from typing import Any

import pytest

from cellgate.proxy.control.model_capacity import (
    CAPACITY_MODELS_MAX,
    CAPACITY_OF_UNIT,
    HOUR_S,
    LEAST_S,
    UNKNOWN_S,
    Capacity,
    Starts,
)
from cellgate.proxy.observe.events import Action
from cellgate.router.board import Board
from cellgate.router.nouns import Cell, Evidence, Fleet, Models, Rules, Sign, Strength, Unit


class Gate:
    """Three units of `tiny`, a, b and c."""

    def __init__(self) -> None:
        self.board, self.now = Board(Rules(passes=1)), 1000.0
        self.told: list[Action] = []
        self.capacity = Capacity(self.board, self.told.append, lambda: self.now)
        self.starts = Starts(self.board, self.told.append)
        self.configure("a", "b", "c")
        self.serve("tiny", "a", "b", "c")

    def configure(self, *names: str) -> None:
        units = tuple(Unit(name, "cell", f"http://{name}") for name in names)
        self.board.configure(Fleet((Cell("cell"),), units), self.now)

    def serve(self, model: str, *names: str) -> None:
        for name in names:
            self.board.set_models(Models(name, (model,), self.now))
            self.say(name, Sign.GOOD, Strength.STRONG, "one token")
        self.look()

    def say(self, name: str, sign: Sign, strength: Strength, reason: str, epoch: str | None = None) -> None:
        found = self.board.observe(Evidence(name, sign, strength, "canary", reason, self.now, epoch))
        if found.flip is not None:
            self.starts.flipped(found.flip)

    def look(self, after_s: float = 2.0) -> None:
        self.now += after_s
        self.capacity.tick(self.now)
        self.starts.tick(self.now)

    def lines(self) -> list[str]:
        lines = [action.detail for action in self.told]
        self.told.clear()
        return lines

    def model(self, name: str) -> dict[str, Any]:
        return next(each for each in self.capacity.view() if each["name"] == name)


def test_a_unit_that_goes_down_is_told_with_its_reason_and_again_when_it_is_back() -> None:
    gate = Gate()
    assert gate.lines() == [], "its units' own events tell of the beginning"
    gate.say("c", Sign.BAD, Strength.FATAL, "refused")
    gate.look()
    assert gate.lines() == [
        "tiny: 2 units serve it now, 3 at most in the last hour; c left: down: refused (source canary)"
    ]
    gate.look(60.0)
    assert gate.model("tiny")["why"][:3] == [
        "tiny: 2 units serve it now, 3 at most in the last hour.",
        "In rotation: a, b.",
        "c is missing, for 1m 0s: down: refused (source canary)",
    ]
    gate.serve("tiny", "c")
    gate.serve("tiny", "c")
    assert gate.lines() == ["tiny: 3 units serve it now, 3 at most in the last hour; c serves it again"]
    assert gate.model("tiny")["missing"] == []


def test_a_unit_that_has_another_name_after_each_restart_leaves_room_for_what_others_serve() -> None:
    gate = Gate()
    for number in range(CAPACITY_MODELS_MAX + 10):
        gate.serve(f"m{number}", "c")
    assert len(gate.capacity.view()) <= CAPACITY_OF_UNIT
    gate.serve("new", "b")
    assert gate.model("new")["serving"] == ["b"]
    gate.look(HOUR_S + 60.0)
    gate.serve("last", "c")
    assert gate.model("last")["serving"] == ["c"], "old names are forgotten"


def test_an_engine_that_comes_up_with_another_model_is_not_silent() -> None:
    gate = Gate()
    gate.say("c", Sign.BAD, Strength.FATAL, "refused")
    gate.look()
    gate.lines()
    gate.serve("large", "c")
    assert gate.lines() == [
        "tiny: 2 units serve it now, 3 at most in the last hour; c: it came up with another model: large"
    ]
    why = gate.model("tiny")["why"]
    assert why[-1] == "You can start the engine of c with tiny again, or drain the unit."
    assert (gate.model("large")["units"], gate.model("large")["missing"]) == (1, [])
    # Its way back leaves nothing behind.
    gate.serve("tiny", "c")
    assert gate.model("large")["missing"] == gate.model("tiny")["missing"] == []
    gate.serve("large", "c")
    # For an hour it is missing there; then it is a unit of the other model.
    gate.configure("a", "b", "c")
    gate.look(HOUR_S - 60.0)
    assert gate.model("tiny")["missing"]
    gate.configure("a", "b", "c")
    gate.look(120.0)
    assert gate.model("tiny")["missing"] == []


@pytest.mark.parametrize("by", ["drain", "removal"])
def test_what_an_operator_takes_out_is_told_and_not_missed(by: str) -> None:
    gate = Gate()
    if by == "drain":
        gate.board.drain("c", drained=True)
    else:
        gate.configure("a", "b")
    gate.look()
    (line,) = gate.lines()
    assert line.startswith("tiny: 2 units serve it now, 3 at most in the last hour; c left: ")
    assert gate.model("tiny")["missing"] == []
    gate.look(2.0 * HOUR_S)
    assert gate.model("tiny")["most_last_hour"] == 2


def test_a_start_is_late_after_twice_what_the_slowest_in_its_cell_took_and_says_the_last_reason() -> None:
    gate = Gate()
    assert gate.starts.limit_s("cell") == UNKNOWN_S
    gate.say("b", Sign.BAD, Strength.FATAL, "refused")
    gate.now += 100.0
    gate.say("b", Sign.GOOD, Strength.STRONG, "one token")
    gate.say("b", Sign.GOOD, Strength.STRONG, "one token")
    assert gate.starts.limit_s("cell") == 200.0
    gate.say("a", Sign.GOOD, Strength.STRONG, "one token", "e1")
    gate.say("a", Sign.NEUTRAL, Strength.WEAK, "the canary was refused: HTTP 404", "e2")
    gate.look(190.0)
    gate.lines()
    gate.look(20.0)
    (line,) = gate.lines()
    assert line.startswith("for 3m 30s, of 3m 20s at most; last: ")
    (family,) = gate.starts.collect()
    assert [sample.labels["unit"] for sample in family.samples] == ["a"]
    gate.look(60.0)
    assert gate.lines() == [], "it is told once"
    gate.serve("tiny", "a")
    gate.look(20.0)
    (family,) = gate.starts.collect()
    assert family.samples == []


def test_a_unit_that_starts_again_and_again_is_late_as_one_that_never_gets_that_far() -> None:
    gate = Gate()
    for number in range(40):
        gate.say("a", Sign.GOOD if number == 0 else Sign.NEUTRAL, Strength.WEAK, "", f"e{number}")
        gate.look(50.0)
    assert [action.unit for action in gate.told if action.kind == "start_overdue"] == ["a"]
    assert UNKNOWN_S > LEAST_S
