"""The vigil: what follows from nothing having happened. Looked at on each tick of the gate.

1. A unit that has work and shows none is silent: strong evidence, and its engine's counters are read at once.
2. A gate that lags itself counts no bad news for a while: what came meanwhile is yet to be read.
3. Panic and degradation are the Board's to decide; here they are told.
"""

from __future__ import annotations

from collections.abc import Callable

from cellgate.probes.engine_metrics import EngineMetrics
from cellgate.proxy.control.prober import Watch
from cellgate.proxy.logs.events import Action, ActionKind, EventLog
from cellgate.router.board import Board
from cellgate.router.nouns import Evidence, Sign, Strength
from cellgate.router.outliers import COMPARE_S
from cellgate.router.peers import compare_speeds
from cellgate.router.stall import SOURCE, silence, still_s
from cellgate.router.unit_state import Desk

LAG_S = 0.25
"""A tick that comes so much late shows that the gate itself lags."""
DISTRUST_S = 1.0
HUSH_S = 0.25
"""After so long without a token of ours, the engine's counters are looked at as often."""

_TOLD_S = 10.0
"""The gate's own faults are told once in so long."""


class Vigil:
    """Judges by time."""

    def __init__(self, board: Board, watch: Watch, events: EventLog, now: Callable[[], float]) -> None:
        self._board = board
        self._watch = watch
        self._events = events
        self._now = now
        self.own_troubles = 0
        """How many connections the gate could not open through no fault of a unit."""
        self._compare_at = 0.0
        self._panic_at: float | None = None
        self._lag_told_at = -_TOLD_S
        self._trouble_told_at = -_TOLD_S

    def tick(self, now: float, lag_s: float) -> None:
        """Look at every unit; `lag_s` is how late this tick is."""
        if lag_s > LAG_S:
            self._note_lag(lag_s, now)
        self._board.tick(now)
        for desk in self._board:
            if desk.leases and now - desk.quiet_since >= HUSH_S:
                self._look_into_silence(desk, now)
        if self._board.panic_at != self._panic_at:
            self._note_panic(now)
        if now >= self._compare_at:
            self._compare_at = now + COMPARE_S
            for desk in compare_speeds(self._board.desks.values(), self._board.rules):
                self._note_slowness(desk)

    def own_trouble(self, reason: str) -> None:
        """The gate could not open a connection: out of descriptors, of ports, or of a resolver."""
        self.own_troubles += 1
        if self._now() - self._trouble_told_at > _TOLD_S:
            self._trouble_told_at = self._now()
            self._tell(
                "own_trouble", None, f"{reason}; no unit is blamed, look at the gate's limits and resolver"
            )

    def _look_into_silence(self, desk: Desk, now: float) -> None:
        # The counters say whether the engine moves although nothing of ours does.
        if desk.counters_at:
            self._watch.look_now(desk.unit.name, EngineMetrics.name)
        desk.stands_still(still_s(desk, now))
        found = silence(desk, now, self._board.rules)
        if found is None or now - desk.told_at < found.limit_s:
            return
        desk.told_at = now
        reason = (
            f"nothing has moved for {found.silent_s:.1f} s with {found.waiting} requests there; "
            f"{found.limit_s:.1f} s are allowed"
        )
        self._watch.observe(Evidence(desk.unit.name, Sign.BAD, Strength.STRONG, SOURCE, reason, now))

    def _note_lag(self, lag_s: float, now: float) -> None:
        self._watch.trust_from(now + DISTRUST_S)
        if now - self._lag_told_at > _TOLD_S:
            self._lag_told_at = now
            self._tell(
                "lag",
                None,
                f"a timer fired {lag_s:.2f} s late; bad news is not counted for {DISTRUST_S:g} s; "
                "if this repeats, give the gate more CPU or less traffic",
            )

    def _note_panic(self, now: float) -> None:
        began_at, self._panic_at = self._panic_at, self._board.panic_at
        limit_s = self._board.rules.panic_max_s
        if began_at is None:
            mute = [desk.unit.name for desk in self._board if desk.is_usable() and desk.is_mute(now)]
            self._tell(
                "panic",
                None,
                f"nothing of {len(mute)} units answers any more ({', '.join(mute[:5])}); the gate takes "
                f"itself to be cut off and keeps them for up to {limit_s:g} s; look at its own network",
            )
        else:
            held_s = now - began_at
            why = "the longest allowed" if held_s >= limit_s else "as units answer again"
            self._tell("panic_over", None, f"the rotation was held for {held_s:.1f} s, {why}")

    def _note_slowness(self, desk: Desk) -> None:
        degraded, name = desk.slowness.degraded, desk.unit.name
        if not degraded:
            self._tell("recovered", name, "its tokens come as fast as those of the others")
            return
        self._tell(
            "degraded",
            name,
            f"a token takes {1.0 / (1.0 - degraded):.1f} times as long there as in the other units of cell "
            f"{desk.unit.cell}; its share of requests falls by {degraded:.0%}",
        )

    def _tell(self, kind: ActionKind, unit: str | None, detail: str) -> None:
        self._events.add(Action(kind, "gate", unit, detail))
