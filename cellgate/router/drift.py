"""Builds that differ within a cell: units of one model that are not the same engine, so configured. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from cellgate.router.engine_nouns import Build
from cellgate.router.unit_state import UnitState

NAMES_MAX = 5
"""Units that are named for each unit; a cell may have thousands."""


def other_builds(states: Iterable[UnitState]) -> dict[str, tuple[str, ...]]:
    """For each unit that differs, some units of its cell and model with another known build.

    Units whose build is unknown, and drained ones, are left out.
    """
    cells: defaultdict[str, defaultdict[Build, list[UnitState]]] = defaultdict(lambda: defaultdict(list))
    for state in states:
        if state.build.key and not state.drained:
            cells[state.unit.cell][state.build._replace(changes=0)].append(state)
    differing = {}
    for builds in cells.values():
        for build, units in builds.items() if len(builds) > 1 else ():
            others = [other for its, found in builds.items() if its.differs(build) for other in found]
            for state in units:
                if names := _sharing(state, others):
                    differing[state.unit.name] = names
    return differing


def _sharing(state: UnitState, others: list[UnitState]) -> tuple[str, ...]:
    """Some of `others` that serve a model of this unit; without known models a unit may serve any."""
    names = []
    for other in others:
        if not (state.models and other.models) or not state.models.isdisjoint(other.models):
            names.append(other.unit.name)
            if len(names) == NAMES_MAX:
                break
    return tuple(names)
