"""Merges configured and discovered units into one fleet. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cellgate.proxy.discovery.base import Found
from cellgate.router.nouns import Cell, Fleet, Unit


class MergedFleet(NamedTuple):
    """The fleet; and of each found, the names of the units that are not in it because others have them."""

    fleet: Fleet
    left_out: tuple[frozenset[str], ...]


def merge(fixed: Fleet, found: Sequence[Found]) -> MergedFleet:
    """The configured units, then the found ones, in this order. The first unit keeps a name."""
    cells: dict[str, Cell] = {cell.name: cell for cell in fixed.cells}
    units: dict[str, Unit] = {unit.name: unit for unit in fixed.units}
    left_out = []
    for one in found:
        for cell in one.cells:
            cells.setdefault(cell.name, cell)
        left_out.append(frozenset(u.name for u in one.units if units.setdefault(u.name, u) is not u))
    return MergedFleet(Fleet(tuple(cells.values()), tuple(units.values())), tuple(left_out))
