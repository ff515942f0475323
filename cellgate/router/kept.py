"""Make before break: the succession of fleets. Units that one no longer has stay until one of its own is up.
Pure.

1. A model (or an adapter) that the new fleet is to serve, while none of its units does, keeps the units that
   serve it now. They get its requests only as long as that is so.
2. They stay while they are in rotation, and out of it for the time of a drain at most. What an operator has
   drained goes at once, and so does what no unit of the new fleet is to serve.
3. An address that the new fleet gives to a unit is that unit's. If it had another name, what is known of it
   goes on under the new one; a canary shows first whether it is still the same.

In this order: `succession`, `_Coming`, `kept_words`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from cellgate.router.nouns import Fleet, Kept, ServingRole, Unit
from cellgate.router.unit_state import UnitState

_PREFILL: ServingRole = "prefill"


def succession(
    states: Collection[UnitState], wanted: Fleet, before: Fleet, now: float, drain_s: float
) -> Succession:
    """What follows when the fleet `wanted` comes after `before`, of which these are the units."""
    coming = _Coming(states, wanted)
    owners = {unit.url: unit.name for unit in wanted.units}
    going = [state for state in states if state.unit.name not in coming.staying]
    heirs = {
        name: state
        for state in going
        if (name := owners.get(state.unit.url)) is not None
        and name not in coming.staying
        and state.is_usable()
    }
    leaving = [each for each in going if each.unit.url not in owners and _may_stay(each, now, drain_s)]
    has_prefill = any(state.unit.role == _PREFILL for state in leaving)
    taken = {*(unit.name for unit in wanted.units), *(state.unit.name for state in leaving)}
    kept: dict[str, Kept] = {}
    units: list[Unit] = []
    for state in leaving:
        since = state.kept.since if state.kept is not None else now
        lacking = coming.lacking(state, has_prefill=has_prefill, waits_for_adapters=now - since < drain_s)
        if not lacking:
            continue
        name = state.unit.name
        if any(unit.name == name for unit in wanted.units):
            name = _free(name, taken)
            taken.add(name)
            heirs[name] = state
        until = dict.fromkeys(unit for names in lacking.values() for unit in names)
        kept[name] = Kept(since, tuple(sorted(filter(None, lacking))), tuple(until))
        units.append(replace(state.unit, name=name))
    return Succession(_with(wanted, before, units), kept, heirs)


class Succession(NamedTuple):
    """A fleet with the units that are kept, by name; and of whom a unit takes over what is known."""

    fleet: Fleet
    kept: Mapping[str, Kept] = {}
    heirs: Mapping[str, UnitState] = {}


def _may_stay(state: UnitState, now: float, drain_s: float) -> bool:
    """Whether a unit that the fleet no longer has may serve still, or come back in a moment."""
    if state.drained:
        return False
    return state.is_usable() or (state.kept is not None and now - state.kept.since < drain_s)


def _free(name: str, taken: Collection[str]) -> str:
    """A name for a unit whose own one belongs to another now."""
    found, number = f"{name}.old", 1
    while found in taken:
        number += 1
        found = f"{name}.old{number}"
    return found


def _with(wanted: Fleet, before: Fleet, units: Iterable[Unit]) -> Fleet:
    """The wanted fleet with these units, and their cells."""
    all_units = (*wanted.units, *units)
    known, needed = {cell.name for cell in wanted.cells}, {unit.cell for unit in all_units}
    cells = (cell for cell in before.cells if cell.name in needed - known)
    return Fleet((*wanted.cells, *cells), all_units) if len(all_units) > len(wanted.units) else wanted


class _Coming:
    """What the units of a new fleet serve, or are to serve. `staying` are those that are known already."""

    def __init__(self, states: Iterable[UnitState], wanted: Fleet) -> None:
        urls = {unit.name: unit.url for unit in wanted.units}
        self.staying = {s.unit.name: s for s in states if urls.get(s.unit.name) == s.unit.url}
        self._wanted = wanted.units
        self._known: dict[tuple[str, str, bool], tuple[str, ...]] = {}

    def lacking(
        self, state: UnitState, *, has_prefill: bool, waits_for_adapters: bool
    ) -> dict[str, tuple[str, ...]]:
        """The models of a unit that nothing serves yet, and what is to serve each. An empty name: any."""
        found = {}
        for model in sorted(state.models) or ("",):
            base = state.adapters.bases.get(model, "") if waits_for_adapters else ""
            key = model, base, has_prefill
            if key not in self._known:
                self._known[key] = self._awaited(model, base, has_prefill)
            if self._known[key]:
                found[model] = self._known[key]
        return found

    def _awaited(self, model: str, base: str, has_prefill: bool) -> tuple[str, ...]:
        """The units that are to serve a model; none if one does, or none ever will. An adapter may be loaded
        where its `base` is.
        """
        of_model = [unit for unit in self._wanted if self._may_serve(unit, model, base)]
        answering = [unit for unit in of_model if unit.role != _PREFILL]
        prefilling = [unit for unit in of_model if unit.role == _PREFILL]
        is_answered = any(self._serves(unit, model) for unit in answering)
        is_prefilled = any(self._serves(unit, model) for unit in prefilling)
        needs = has_prefill or any(self._needs_prefiller(unit) for unit in answering)
        lacking = [] if is_answered else answering
        if needs and not is_prefilled and answering:
            lacking = [*lacking, *prefilling]
        return tuple(unit.name for unit in lacking)

    def _models(self, unit: Unit) -> Collection[str]:
        state = self.staying.get(unit.name)
        return state.models if state is not None else unit.models

    def _may_serve(self, unit: Unit, model: str, base: str) -> bool:
        models = self._models(unit)
        return not (model and models) or model in models or base in models

    def _serves(self, unit: Unit, model: str) -> bool:
        state = self.staying.get(unit.name)
        return state is not None and state.is_usable() and state.serves_model(model or None)

    def _needs_prefiller(self, unit: Unit) -> bool:
        state = self.staying.get(unit.name)
        return state is not None and state.needs_prefiller


LISTED = 4
"""So many names are written out."""


def kept_words(kept: Kept) -> str:
    """Until when a unit is kept, and why."""
    verb = "is" if len(kept.until) == 1 else "are"
    what = f"nothing else serves {listed(kept.models)} yet" if kept.models else "nothing else is up yet"
    return f"until {listed(kept.until, 'or')} {verb} up, because {what}"


def listed(names: Iterable[str], word: str = "and") -> str:
    """Names in a sentence: `a1`, `a1 and a2`, `a1, a2, a3, a4 and 96 more`."""
    every = list(names)
    shown, left = every[:LISTED], len(every) - LISTED
    last = f"{left} more" if left > 0 else shown.pop() if shown else ""
    return f"{', '.join(shown)} {word} {last}" if shown else last
