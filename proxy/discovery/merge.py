"""One fleet out of what is configured and what is found. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from proxy.discovery.base import Found
from router.nouns import Cell, Fleet, Unit


class Merged(NamedTuple):
    """The fleet, and who was left out of it as somebody else had the name already: (name, title)."""

    fleet: Fleet
    clashes: tuple[tuple[str, str], ...]


def merge(fixed: Fleet, found: Iterable[tuple[str, Found]]) -> Merged:
    """What is fixed, then what each source (by its title) has found. Who comes first keeps a name."""
    cells: dict[str, Cell] = {cell.name: cell for cell in fixed.cells}
    units: dict[str, Unit] = {unit.name: unit for unit in fixed.units}
    clashes = []
    for title, one in found:
        for cell in one.cells:
            cells.setdefault(cell.name, cell)
        for unit in one.units:
            if units.setdefault(unit.name, unit) is not unit:
                clashes.append((unit.name, title))
    return Merged(Fleet(tuple(cells.values()), tuple(units.values())), tuple(clashes))
