"""Engines that are full: of which requests wait inside, though the gate could let them wait in its own queue.

There they would have their order, and go where there is room first. Two reasons are told apart: the KV cache
is full, or the engine runs fewer requests at once than its unit's `max_in_flight` lets there.
"""

from __future__ import annotations

from collections.abc import Callable

from cellgate.proxy.ingress.reasons import KV_FULL
from cellgate.proxy.observe.events import Action
from cellgate.router.nouns import Load
from cellgate.router.unit_state import UnitState

LASTS_S = 10.0
"""What each report in so long a time says is not a burst."""
EMPTIER = 0.05
"""So much below full a cache is not full any more: it does not flap around its bound."""


class FullEngines:
    """Of one gate. `tell` gets the events."""

    def __init__(self, tell: Callable[[Action], None]) -> None:
        self._tell = tell
        self._full_since: dict[str, float] = {}
        self._full_known: set[str] = set()
        self._waits_since: dict[str, tuple[float, int]] = {}

    def look(self, state: UnitState, load: Load) -> None:
        """What this report of an engine says."""
        self._look_at_cache(load)
        self._look_at_queue(state, load)

    def _look_at_cache(self, load: Load) -> None:
        unit = load.unit
        if load.kv_use >= KV_FULL:
            since = self._full_since.setdefault(unit, load.at)
            if load.at - since >= LASTS_S and unit not in self._full_known:
                self._full_known.add(unit)
                waits = f"{load.running} requests run and {load.waiting} wait inside"
                self._tell(
                    Action("kv_full", "gate", unit, f"{unit}, {load.kv_use:.0%} for {LASTS_S:g} s; {waits}")
                )
        elif load.kv_use < KV_FULL - EMPTIER:
            self._full_since.pop(unit, None)
            if unit in self._full_known:
                self._full_known.remove(unit)
                self._tell(Action("kv_full_over", "gate", unit, unit))

    def _look_at_queue(self, state: UnitState, load: Load) -> None:
        unit, most = load.unit, state.unit.max_in_flight
        # The gate could have kept them only if it had sent no more than the engine runs.
        if not load.waiting or not load.running or load.kv_use >= KV_FULL or most <= load.running:
            self._waits_since.pop(unit, None)
            state.waits_inside = ""
            return
        since, ran = self._waits_since.get(unit, (load.at, 0))
        self._waits_since[unit] = since, max(ran, load.running)
        if load.at - since >= LASTS_S:
            runs = f"which runs {max(ran, load.running)} at once"
            wait = "1 request waits" if load.waiting == 1 else f"{load.waiting} requests wait"
            state.waits_inside = f"{wait} inside its engine, {runs}; its max_in_flight is {most}"
