"""Fleets: how many units, how fast and how large, in which cells, behind how many gates."""

from __future__ import annotations

from dataclasses import replace

from loadtests.gym.engine import Model
from loadtests.gym.nouns import Fleet, Place
from router.nouns import Unit

MODEL = Model()


def fleet(name: str, models: list[Model], gates: int = 1) -> Fleet:
    """Units with a model of speed each, all in one cell."""
    return Fleet(name, tuple(Place(model, unit_of(n)) for n, model in enumerate(models)), gates=gates)


def unit_of(number: int, cell: str = "a", weight: float = 1.0) -> Unit:
    """A unit as the gate is told of it."""
    return Unit(f"u{number}", cell, f"http://u{number}", weight=weight)


FLEETS: dict[str, Fleet] = {
    each.name: each
    for each in (
        fleet("equal", [MODEL] * 4),
        fleet("two", [MODEL] * 2),
        fleet("seats_8", [replace(MODEL, seats=8)] * 4),
        fleet("two_gates", [MODEL] * 4, gates=2),
        fleet("four_gates", [MODEL] * 4, gates=4),
    )
}
