"""The state of units for a successor, so that it is ready at once and keeps all drains.

Times are `loop.time()`, which is one clock for all processes of a machine. What is measured on traffic
(rates, prefixes) is measured again. A view of another version is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from cellgate.probes.gate_word import GATE_EPOCHS
from cellgate.router.board import Board
from cellgate.router.engine_nouns import Build
from cellgate.router.hold_nouns import Hold, HoldKind
from cellgate.router.nouns import Case, Evidence, Sign, Strength, Verdict
from cellgate.router.unit_state import UnitState

VERSION = 1
SOURCE = "predecessor"

_COUNTED_HERE = (GATE_EPOCHS,)
"""Readers of epochs whose numbers restart with each process of the gate."""

KnownUnit = dict[str, Any]


def view_of(board: Board) -> KnownUnit:
    """What is known of all units."""
    return {"version": VERSION, "units": [known_of(state) for state in board]}


def drained(board: Board) -> list[str]:
    """The names of the units that are drained."""
    return [state.unit.name for state in board if state.drained]


def known_of(state: UnitState) -> KnownUnit:
    """The state of one unit for JSON."""
    case, hold = state.case, state.hold
    return {
        "name": state.unit.name,
        "url": state.unit.url,
        "verdict": case.verdict.value,
        "since": case.since,
        "epochs": [epoch for epoch in case.epochs if epoch[0] not in _COUNTED_HERE],
        "reborn": case.reborn,
        "passes": case.passes,
        "reason": case.because.reason if case.because is not None else "",
        "drained": state.drained,
        "hold": None if hold is None else (hold.kind.value, hold.since, hold.ended_at),
        "models": sorted(state.models),
        "cards": state.cards,
        "engine": state.engine,
        "build": list(state.build),
        "faults": [list(fault) for fault in case.faults if not fault[0]],
        "life_at": state.life_at,
        "risen_at": state.risen_at,
    }


class InheritedView:
    """The state from a predecessor, applied to units when they appear on the Board."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        is_read = known["version"] == VERSION
        self._left: dict[str, KnownUnit] = {unit["name"]: unit for unit in known["units"]} if is_read else {}
        self._used = [name for name, unit in self._left.items() if _was_usable(unit)]

    def apply(self, board: Board) -> None:
        """Apply the known state to units that have appeared since."""
        for name in self._left.keys() & board.units.keys():
            unit, state = self._left.pop(name), board.units[name]
            if unit["url"] == state.unit.url:
                take_over(state, unit)

    def is_warm(self, board: Board, *, may_come: bool) -> bool:
        """Whether the gate may take over: it can use a unit, if the predecessor could, and has evidence of
        every unit that both use. `may_come`: wait for units that are not on the Board yet.
        """
        if not self._used:
            return True
        states = [board.units[name] for name in self._used if name in board.units]
        if may_come and len(states) < len(self._used):
            return False
        heard = all(state.heard_at > 0.0 for state in states if state.is_usable())
        return heard and any(state.is_usable() for state in board)


def _was_usable(unit: KnownUnit) -> bool:
    is_out = unit["drained"] or unit.get("hold") is not None
    return unit["verdict"] in (Verdict.UP.value, Verdict.SUSPECT.value) and not is_out


def take_over(state: UnitState, unit: KnownUnit) -> None:
    """Apply the result of `known_of` from another process to a unit."""
    verdict, since = Verdict(unit["verdict"]), unit["since"]
    sign = Sign.GOOD if verdict is Verdict.UP else Sign.BAD
    because = Evidence(state.unit.name, sign, Strength.STRONG, SOURCE, unit["reason"], since)
    epochs = tuple((reader, reading) for reader, reading in unit["epochs"])
    reborn = None if unit["reborn"] is None else (unit["reborn"][0], unit["reborn"][1])
    # Faults of nodes are reported again by their sources.
    faults = frozenset((node, source) for node, source in unit.get("faults", ()))
    state.case = Case(verdict, since, epochs, reborn, passes=unit["passes"], faults=faults, because=because)
    state.drained = unit["drained"]
    state.hold = _hold_of(unit.get("hold"))
    state.life_at, state.risen_at = unit["life_at"], unit["risen_at"]
    # The configuration takes precedence over detected values.
    state.models = state.models or frozenset(unit["models"])
    state.cards = state.cards or unit.get("cards", {})
    state.engine = state.engine or unit["engine"]
    state.build = Build(*unit.get("build", ()))


def _hold_of(known: Sequence[Any] | None) -> Hold | None:
    """A hold that another process has known. It lasts until this one hears of it, or reaches its limit."""
    if known is None:
        return None
    kind, since, ended_at = known
    return Hold(HoldKind(kind), since, inf, ended_at)
