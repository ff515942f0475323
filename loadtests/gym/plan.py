"""Which cells the gym runs when nobody names any, and which limits hold where."""

from __future__ import annotations

from loadtests.gym.cells import Cell
from loadtests.gym.fleets import FLEETS
from loadtests.gym.loads import LOADS

UTILISATIONS = (0.1, 0.5, 0.8, 0.95)
UNEVEN: frozenset[str] = frozenset()
"""Loads whose prefixes repeat unevenly: where a cache is worth going to."""
UNEQUAL: frozenset[str] = frozenset()
"""Fleets whose units differ in speed."""
ISSUE = Cell("shared_prompt", "equal", -16.0)
"""Four units with 64 seats, one system prompt, long answers, 16 requests a second."""
QUICK = (ISSUE, Cell("shared_prompt_ramp", "equal", -16.0))
_PROBES = ("shared_prompt",)
"""On each fleet these run."""


def cells() -> list[Cell]:
    """All loads at all utilisations on equal units; some of them on all fleets."""
    everywhere = [Cell(load, "equal", much) for load in LOADS for much in UTILISATIONS]
    fleets = [
        Cell(load, fleet, much)
        for fleet in FLEETS
        if fleet != "equal"
        for load in _PROBES
        for much in (0.5, 0.8)
    ]
    return [ISSUE, *everywhere, *fleets]


def quick_cells() -> list[Cell]:
    """A few."""
    return list(QUICK)
