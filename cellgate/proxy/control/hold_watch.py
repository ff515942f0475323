"""Finds out when units stand still on purpose, and acts on it. router/health.py decides what a hold means.

1. An engine is asked before a suspicion counts: as soon as its requests, or a canary, get no answer.
2. When a hold begins, requests without a token move to units that can take them; all others stay.
3. When it ends, a canary is sent at once, and the unit gets requests when it shows work.
"""

from __future__ import annotations

from collections.abc import Callable

from cellgate.probes.canary import Canary
from cellgate.probes.engines import engine
from cellgate.probes.readiness import PauseProbe
from cellgate.proxy.control.prober import Prober
from cellgate.proxy.control.stall_watch import QUIET_S
from cellgate.proxy.observe.events import Action, EventLog
from cellgate.router import health
from cellgate.router.board import Board
from cellgate.router.nouns import EnginePause, Hold
from cellgate.router.unit_state import Lease, UnitState

MOVE_S = 1.0
"""Requests without a token leave a unit on hold after this time without progress: until then it may be
finishing them."""
WAITING_SHARE = 0.5
"""A unit that has had requests without a token for so much of the last seconds (some two in a row) may be
finishing what it has, and take no more."""


class HoldWatch:
    """The holds of one gate. `evict` is called with requests that are to move to other units, `changed`
    whenever a hold has begun or ended.
    """

    def __init__(
        self,
        board: Board,
        prober: Prober,
        events: EventLog,
        now: Callable[[], float],
        *,
        evict: Callable[[tuple[Lease, ...]], None],
        changed: Callable[[], None],
    ) -> None:
        self._board = board
        self._prober = prober
        self._events = events
        self._now = now
        self._evict = evict
        self._changed = changed

    def hear(self, state: UnitState, said: EnginePause) -> None:
        """An engine has said whether it stands still."""
        has_changed = health.hear(state, said)
        if state.hold is None:
            return
        if has_changed and not state.hold.ended_at:
            self._report_begin(state, state.hold)
        elif has_changed:
            self._report_end(state, state.hold)
        if state.hold.ended_at:
            self._prober.look_now(state.unit.name, Canary.name)

    def doubt(self, state: UnitState) -> None:
        """An engine has aborted a request: maybe it is paused, and gets no more until it says so or works."""
        if state.can_hold and state.hold is None:
            state.hold = health.doubt(self._now())
            self._changed()
        self._prober.look_now(state.unit.name, PauseProbe.name)

    def ask(self, state: UnitState) -> None:
        """Its engine has been told to stand still: let it say so."""
        self._prober.look_now(state.unit.name, PauseProbe.name)

    def prove(self, state: UnitState) -> None:
        """Its engine has been told to go on: the unit has to show work before it gets requests."""
        now = self._now()
        if health.is_on(state.hold):
            self.hear(state, EnginePause(state.unit.name, None, now))
        else:
            state.hold = health.doubt(now)
            self._prober.look_now(state.unit.name, Canary.name)

    def tick(self, now: float) -> None:
        """Ask the units that get silent; apply what depends on time."""
        before = now - QUIET_S
        for state in self._board.attention.noted():
            if state.is_in and state.progress_at > before and state.prefilling <= WAITING_SHARE:
                # Nearly all.
                continue
            if state.hold is not None:
                self._pass_time(state, now)
            elif (state.leases or state.prefilling > WAITING_SHARE) and _is_silent(state, now):
                self._ask_if_it_can_say(state)
        for name in self._prober.unanswered(Canary.name, QUIET_S, now):
            found = self._board.units.get(name)
            if found is not None and found.hold is None:
                self._ask_if_it_can_say(found)

    def _ask_if_it_can_say(self, state: UnitState) -> None:
        if engine(state.engine).holds:
            self.ask(state)

    def _pass_time(self, state: UnitState, now: float) -> None:
        before = state.hold
        assert before is not None
        if health.pass_time(state, now, self._board.rules):
            self._report_end(state, before)
            self._prober.look_now(state.unit.name, Canary.name)
        elif state.hold is None:
            self._changed()
        elif health.is_on(state.hold) and now - max(state.progress_at, before.since) > MOVE_S:
            self._move(state, now)

    def _move(self, state: UnitState, now: float) -> None:
        """Move the requests without a token that another unit could take now."""
        others = [other for other in self._board if other.is_usable() and other.has_room(now, 0.0)]
        moving = tuple(
            lease
            for lease in state.leases
            if not (lease.committed or lease.evicted) and any(other.serves(lease.ask) for other in others)
        )
        for lease in moving:
            lease.evicted = True
        if moving:
            self._evict(moving)

    def _report_begin(self, state: UnitState, began: Hold) -> None:
        detail = (
            f"its engine is {began.kind.value}; it gets no requests and is not judged, "
            f"for up to {self._board.rules.hold_limit_s:g} s; {state.in_flight} requests stay in flight there"
        )
        self._events.add(Action("hold", "its engine", state.unit.name, detail))
        self._changed()

    def _report_end(self, state: UnitState, ended: Hold) -> None:
        held_s = self._now() - ended.since
        why = f"it was {ended.kind.value} for {held_s:.1f} s"
        if state.is_hold_spent:
            why += ", which is the limit, and is judged again, whatever its engine says"
        self._events.add(Action("hold_over", "its engine", state.unit.name, f"{why}; a canary is sent"))
        self._changed()


def _is_silent(state: UnitState, now: float) -> bool:
    """Whether its requests have had no answer for a moment; or new ones for a while, before it is known what
    its engine can say.
    """
    if state.leases and now - state.quiet_since >= QUIET_S:
        return True
    return state.prefilling > WAITING_SHARE and not state.can_hold
