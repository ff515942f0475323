"""Which units are looked at on a tick: in a large fleet only those where time changes something. Pure.

Rules:
1. A small fleet is looked at whole.
2. In a large one these are units with requests, units whose means still fall, and those of which something
   has just changed or been said: whoever changes a unit calls `note`. Of many, some are due on each tick.
3. All others take turns, `ROUND_TICKS` long. They are asked ever more rarely (`rest`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import ceil, inf
from typing import TYPE_CHECKING

from cellgate.router.nouns import Verdict

if TYPE_CHECKING:
    from cellgate.router.cost import Usual
    from cellgate.router.unit_state import UnitState

SMALL = 64
"""So many units are looked at on each tick."""
DUE_AT_ONCE = 32
"""In a large fleet so many are due on a tick: 256 would stop all streams for 25 ms, ..."""
DUE_TICKS = 8
"""... but each of them once in so many ticks."""
ROUND_TICKS = 1000
"""Four minutes."""
USUAL_S = 30.0
"""What is usual of all units of a large fleet is looked at so often."""
REST_PART = 0.5
"""A unit that is not looked at rests: between two questions so much of the time passes that it has rested."""
REST_AFTER_S = 1.0 / REST_PART
"""So long it is asked as often as others."""
WOKEN_AT_ONCE = 16
"""All of a unit is asked when it rests no more: of so many on a tick. Of 250 that get their first requests in
one moment, the questions would come before the first tokens.
"""
_UP = Verdict.UP
STAYS_S = 5.0
"""So long a unit is looked at after something was said of it."""
STILL_LOAD, STILL_ERRORS = 0.05, 0.01
"""Means that are less change nothing any more: of requests, which count as none then, and of errors."""


class Attention:
    """Of one Board. `fleet` are all its units, `units` those that are looked at since the last tick, `due`
    those of them whose turn it is: once in `due_ticks`. `usual` is what was usual of all when that was last
    looked at.
    """

    def __init__(self) -> None:
        self.fleet: Mapping[str, UnitState] = {}
        self.units: list[UnitState] = []
        self.due: list[UnitState] = []
        self.due_ticks = 1
        self.is_large = False
        self.usual: Usual | None = None
        self.usual_at = -inf
        self._until: dict[UnitState, float] = {}
        self._turns: list[UnitState] = []
        self._due: list[UnitState] = []
        """Those that are still to come in this round of `due`."""
        self._woken: deque[tuple[UnitState, float]] = deque()
        """Units that are looked at, and since when they had been calm."""
        self._rested: dict[UnitState, float] = {}
        """Since when those have rested that are late with an answer or have requests, and of which nothing
        else was said.
        """
        self._news: dict[UnitState, None] = {}
        """Units of which something may have changed since `news` was asked, beside those that are noted."""

    def configure(self, fleet: Mapping[str, UnitState], now: float) -> None:
        """These are all units from now on."""
        self.fleet, self._turns, self._due = fleet, [], []
        self.units = self.due = list(fleet.values())
        self.due_ticks = 1
        self.is_large, self.usual = len(fleet) > SMALL, None
        self._until = dict.fromkeys(self.units, now) if self.is_large else {}
        self._rested, self._news = {}, {}
        for state in self.units:
            state.calm_since = inf

    def note(self, state: UnitState, until: float = 0.0) -> None:
        """Something has changed of a unit: it is looked at, at least until then."""
        if self.is_large:
            if self._rested:
                self._rested.pop(state, None)
            self._wake(state, until)

    def look_at(self, state: UnitState, now: float) -> None:
        """A unit is late with an answer, or gets a request: it is looked at. When that is over, and nothing
        was said of it, it rests as it has before.
        """
        if self.is_large:
            if state.calm_since < inf:
                self._rested[state] = state.calm_since
            self._wake(state, now)

    def _wake(self, state: UnitState, until: float) -> None:
        if self._until.get(state, -1.0) < until:
            self._until[state] = until
        if state.calm_since < inf:
            self._woken.append((state, state.calm_since))
            state.calm_since = inf

    def tell(self, state: UnitState) -> None:
        """Something is known of a unit that others may want to hear; it goes on resting."""
        if self.is_large:
            self._news[state] = None

    def news(self) -> list[UnitState]:
        """The units of which something may have changed since the last call."""
        if not self.is_large:
            return self.units
        news, self._news = self._news, {}
        return list(news | self._until)

    def woken(self, now: float) -> list[UnitState]:
        """Some of the units that rested, and are looked at; not those whose request has ended meanwhile."""
        found: list[UnitState] = []
        while self._woken and len(found) < WOKEN_AT_ONCE:
            state, calm_since = self._woken.popleft()
            if state.calm_since < inf or now - calm_since <= REST_AFTER_S:
                continue
            if state.leases or state.asked_at < inf or state not in self._rested:
                found.append(state)
        return found

    def noted(self) -> list[UnitState]:
        """The units that do not only take turns."""
        return list(self._until) if self.is_large else self.units

    def tick(self, now: float) -> list[UnitState]:
        """The units that are due now."""
        if not self.is_large:
            return self.due
        known, rested = self._until, self._rested
        for state, since in rested.items():
            if state.calm_since == inf and not (state.leases or state.foreign) and now > known[state]:
                # Its means still fall, but there is nothing more to ask it than before.
                state.calm_since = since
        due = self._next_due()
        for state in [state for state in due if now > known[state] and is_still(state)]:
            del known[state]
            self._news[state] = None
            state.batch = state.prefilling = 0.0
            state.calm_since = rested.pop(state, now)
        others = [state for state in self._next() if state not in known]
        self.units = [*known, *others]
        self.due = [*(state for state in due if state in known), *others]
        return self.due

    def _next_due(self) -> list[UnitState]:
        """Of the units that do not only take turns, some."""
        if not self._due:
            self._due = list(self._until)
            self.due_ticks = min(ceil(len(self._due) / DUE_AT_ONCE), DUE_TICKS) or 1
        share = max(DUE_AT_ONCE, ceil(len(self._until) / DUE_TICKS))
        due = self._due[-share:]
        del self._due[-share:]
        return due

    def _next(self) -> list[UnitState]:
        """Those whose turn it is."""
        if not self._turns:
            self._turns = list(self.fleet.values())
        share = ceil(len(self.fleet) / ROUND_TICKS)
        turn = self._turns[-share:]
        del self._turns[-share:]
        return turn


def rest(state: UnitState, now: float) -> float:
    """How many times as long as usual the pauses between questions of a unit may be."""
    rested_s = now - state.calm_since
    return REST_PART * rested_s if rested_s > REST_AFTER_S and state.case.verdict is _UP else 1.0


def is_still(state: UnitState) -> bool:
    """Whether time changes nothing of a unit as long as nothing is said of it."""
    if state.retired:
        return True
    return not (
        state.leases
        or state.hold is not None
        or state.batch > STILL_LOAD
        or state.prefilling > STILL_LOAD
        or state.foreign
        or state.learnt_limit < state.unit.max_in_flight
        or state.restart_suspected_at >= 0.0
        or state.outlier.degraded
        or state.costs.errors.last_share > STILL_ERRORS
    )
