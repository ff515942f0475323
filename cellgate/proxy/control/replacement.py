"""Units that the configuration has no more are kept until others are up in their place (router/kept.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal

from cellgate.proxy.observe.events import Action, EventLog
from cellgate.router.board import Board, Changes
from cellgate.router.kept import Succession, kept_words, listed, succession
from cellgate.router.nouns import Fleet, Kept
from cellgate.router.unit_state import UnitState


class Replacement:
    """The fleet of one gate: what was wanted last, and what is kept besides.

    `drain_s` is for how long a kept unit may be out of rotation; `again` has the gate apply the wanted fleet
    again. `keeps`: False where units come and go with the gates that they are reached through.
    """

    def __init__(
        self, board: Board, events: EventLog, drain_s: float, again: Callable[[Fleet], object], *, keeps: bool
    ) -> None:
        self._board = board
        self._events = events
        self._drain_s = drain_s
        self._again = again
        self._keeps = keeps
        self._wanted = self._applied = Fleet()
        self._kept: Mapping[str, Kept] = {}

    def configure(self, wanted: Fleet, now: float) -> tuple[Fleet, Changes]:
        """Apply a fleet to the Board, with what is kept; returns all of it, and what has changed."""
        found, before = self._follow(wanted, now), dict(self._board.units)
        self._wanted, self._applied = wanted, found.fleet
        changes = self._board.configure(found.fleet, now, found.kept, found.heirs)
        over = {name: each for name, each in self._kept.items() if name not in found.kept}
        new = {name: each for name, each in found.kept.items() if name not in self._kept}
        self._kept = found.kept
        if new:
            until = dict.fromkeys(unit for each in new.values() for unit in each.until)
            models = {model for each in new.values() for model in each.models}
            words = kept_words(Kept(now, tuple(sorted(models)), tuple(until)))
            self._add("kept", new, f"kept {words}")
        if over:
            reasons = dict.fromkeys(self._why_over(name, each, before) for name, each in over.items())
            self._add("kept_over", over, f"gone: {'; '.join(reasons)}")
        return found.fleet, changes

    def look(self, now: float) -> None:
        """Let go what need not be kept any longer."""
        if self._kept and self._follow(self._wanted, now).kept != self._kept:
            self._again(self._wanted)

    def _follow(self, wanted: Fleet, now: float) -> Succession:
        if not self._keeps:
            return Succession(wanted)
        return succession(self._board.units.values(), wanted, self._applied, now, self._drain_s)

    def _why_over(self, name: str, kept: Kept, before: Mapping[str, UnitState]) -> str:
        units = self._board.units
        if up := [each for each in kept.until if each in units and units[each].is_usable()]:
            return f"{listed(up)} {'is' if len(up) == 1 else 'are'} up"
        if name in before and before[name].drained:
            return "drained by an operator"
        if name in before and not before[name].is_usable():
            return f"not in rotation itself for {self._drain_s:g} s"
        return "nothing is to come in its place any more, or its address is another unit's now"

    def _add(self, kind: Literal["kept", "kept_over"], units: Collection[str], detail: str) -> None:
        only = next(iter(units)) if len(units) == 1 else None
        who = "it is" if only is not None else f"{listed(units)} are"
        self._events.add(Action(kind, "gate", only, f"{who} {detail}"))
