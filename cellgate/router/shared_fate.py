"""Units that fail together because of something that they share: a switch, a rack, a zone. Pure.

A place is blamed when every unit with a node there is DOWN, and these are two units or more. Of the places
that explain the same units, the narrowest is named; of those that explain some, the one that explains most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from cellgate.router.nouns import Place, Verdict
from cellgate.router.unit_state import UnitState

LEAST_UNITS = 2


class SharedFate(NamedTuple):
    """A place under which all units are DOWN; they are in the order of their names."""

    place: Place
    units: tuple[str, ...]

    def in_words(self) -> str:
        """For people."""
        names = ", ".join(self.units)
        return f"all {len(self.units)} units with a node under {'/'.join(self.place)} are DOWN: {names}"


def shared_fates(states: Iterable[UnitState]) -> list[SharedFate]:
    """The places that are to blame now, those with most units first. No unit is in two of them."""
    under: dict[Place, set[str]] = defaultdict(set)
    down = set[str]()
    for state in states:
        if state.case.verdict is Verdict.DOWN:
            down.add(state.unit.name)
        for node in state.unit.nodes:
            for depth in range(1, len(node.place) + 1):
                under[node.place[:depth]].add(state.unit.name)
    blamed = [(place, units) for place, units in under.items() if len(units) >= LEAST_UNITS and units <= down]
    blamed.sort(key=lambda found: (-len(found[1]), -len(found[0]), found[0]))
    fates: list[SharedFate] = []
    explained = set[str]()
    for place, units in blamed:
        if not units & explained:
            fates.append(SharedFate(place, tuple(sorted(units))))
            explained |= units
    return fates
