"""How much of the comparison of stacks is done in one turn of the loop."""

from __future__ import annotations

from typing import Any, cast

import pytest

from cellgate.proxy.control.comparisons import STACK_PERIOD_S, STEPS_A_TURN, StackWatch
from cellgate.router import comparisons
from cellgate.router.board import Board
from cellgate.router.nouns import Cell, Fleet, Node, NodeFacts, Role, Rules, Unit

TURNS = 10
UNITS = STEPS_A_TURN * (TURNS // 2 - 1)
USUAL = {"program": "vllm", "driver nvidia": "570"}


class Site:
    """Units of one cell, whose stacks are compared; `reads` counts stacks that are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.reads = 0.0, 0
        units = tuple(
            Unit(f"u{n}", "c", f"http://u{n}", models=("m",), nodes=(Node("n", Role.LEADER),))
            for n in range(UNITS)
        )
        self.board = Board(Rules())
        self.board.configure(Fleet((Cell("c"),), units), 0.0)
        events: Any = self
        self.watch = StackWatch(self.board, events, lambda _: None)
        read = comparisons.software_of

        def counted(stack: comparisons.Stack) -> comparisons.Software:
            self.reads += 1
            return read(stack)

        monkeypatch.setattr(comparisons, "software_of", counted)

    def add(self, *_: object) -> None:
        """An event."""

    def report(self, **others: str) -> None:
        """All units report; `others` have another driver."""
        for name, state in self.board.units.items():
            stack = {**USUAL, "driver nvidia": others.get(name, USUAL["driver nvidia"])}
            state.facts.take(NodeFacts(name, "n", self.now, stack))

    def turns(self) -> list[int]:
        """One comparison: how many stacks are read in each turn."""
        self.now += STACK_PERIOD_S
        found = []
        for _ in range(TURNS):
            before = self.reads
            self.watch.tick(self.now)
            found.append(self.reads - before)
        return found


def test_one_turn_reads_a_bounded_number_of_stacks_and_none_again_that_has_not_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = Site(monkeypatch)
    site.report()
    turns = site.turns()
    assert (max(turns), sum(turns)) == (STEPS_A_TURN, UNITS)
    site.report(u3="550")
    assert sum(site.turns()) == 1
    odd = {name: state.facts.odd for name, state in site.board.units.items() if state.facts.odd}
    assert odd == {"u3": "driver nvidia 550 (u0: 570)"}


def test_a_unit_that_goes_while_stacks_are_compared_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(monkeypatch)
    site.report(u3="550")
    site.now += STACK_PERIOD_S
    site.watch.tick(site.now)
    kept = tuple(state.unit for state in site.board if state.unit.name != "u3")
    site.board.configure(Fleet((Cell("c"),), kept), site.now)
    site.turns()
    site.turns()
    assert not any(state.facts.odd for state in site.board)
    assert len(cast("Any", site.watch)._stacks._units) == UNITS - 1
