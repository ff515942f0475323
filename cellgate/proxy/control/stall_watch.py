"""Checks on each tick of the gate what depends on time: stalls, panic, outliers.

1. A unit that has work and makes no progress stalls: strong evidence, and its engine's counters are read at
   once.
2. A gate that lags counts no bad evidence for a while, because good evidence may not have been read yet.
3. The Board decides about panic and degraded units; this module reports them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from math import inf

from cellgate.probes.canary import AWAKE_S, Canary
from cellgate.probes.engine_metrics import EngineMetrics
from cellgate.probes.readiness import Readiness
from cellgate.proxy.control.prober import PEERS_ASKED, Prober
from cellgate.proxy.observe.events import Action, ActionKind, EventLog
from cellgate.router.attention import rest
from cellgate.router.board import Board
from cellgate.router.fleet_learning import comparing_speeds
from cellgate.router.health import Stall, find_rank_stall, find_stall, is_on, still_s
from cellgate.router.judge import STALL_SOURCE
from cellgate.router.nouns import PANIC_MAX_S, PANIC_UNITS, USABLE, Evidence, Sign, Strength, Verdict
from cellgate.router.outliers import COMPARE_S, UNREACHABLE_S
from cellgate.router.unit_state import UnitState
from cellgate.router.uses import use_of

LAG_S = 0.25
"""A tick that is this late shows that the gate lags."""
DISTRUST_S = 1.0
QUIET_S = 0.25
"""After this time without a token, the engine's counters are read this often."""
ASK_ALL_S = 2.0
"""Units that rest are all asked at most this often."""
ASK_SOME_S, RESTING_ASKED = 1.0, 4
"""And so many of them, so often."""
AWAKE_AT_ONCE = 16
"""On a tick so many units get a canary beside the first request they have had for long: of 250 that get one
in one moment nearly all have answered it on the next tick.
"""
CONCURRENT_S = 5.0
"""A unit gets a canary for a request that hangs at most this often."""

_REPORT_EVERY_S = 10.0
"""Faults of the gate are reported at most once in this time."""


class StallWatch:
    """The checks of one gate."""

    def __init__(self, board: Board, watch: Prober, events: EventLog, now: Callable[[], float]) -> None:
        self._board = board
        self._prober = watch
        self._events = events
        self._now = now
        self.gate_faults = 0
        """How many connections the gate could not open by its own fault."""
        self._asked_at: dict[str, float] = {}
        """When a unit was last sent a canary beside its requests."""
        self._waits_at: dict[frozenset[str], float] = {}
        """By models: when peers were last looked at for long waits."""
        self._compare_at = self._ask_all_at = self._ask_some_at = 0.0
        self._comparison: Iterator[list[UnitState]] | None = None
        """What is left of comparing speeds."""
        self._awake_left = AWAKE_AT_ONCE
        self._silent: dict[str, UnitState] = {}
        """Units that show nothing, of which it is not known whether they pause."""
        self._panic_at: float | None = None
        self._lag_reported_at = -_REPORT_EVERY_S
        self._fault_reported_at = -_REPORT_EVERY_S

    def tick(self, now: float, lag_s: float) -> None:
        """Check every unit; `lag_s` is how late this tick is."""
        if lag_s > LAG_S:
            self._report_lag(lag_s, now)
        unheard = self._prober.unheard(QUIET_S, now)
        for state in unheard:
            self._board.attention.look_at(state, now)
        if unheard and self._board.attention.is_large:
            self._ask_resting(len(unheard), now)
        for state in self._board.attention.woken(now):
            self._prober.wake(state.unit.name)
        self._board.tick(now)
        self._awake_left = AWAKE_AT_ONCE
        for state in self._quiet_or_due(now):
            self._check(state, now)
        if self._silent:
            self._learn_pauses()
        if self._board.panic_at != self._panic_at:
            self._report_panic(now)
        self._compare_speeds(now)

    def _quiet_or_due(self, now: float) -> Iterable[UnitState]:
        """Of the units that are looked at, those that may stand still, and those whose turn it is."""
        attention, before = self._board.attention, now - QUIET_S
        if len(attention.due) == len(attention.units):
            return attention.due
        quiet = [
            state
            for state in attention.units
            if (state.progress_at <= before or state.ranks.count if state.leases else state.asked_at < inf)
        ]
        return dict.fromkeys(chain(quiet, attention.due))

    def _check(self, state: UnitState, now: float) -> None:
        is_held = is_on(state.hold)
        if state.case.verdict is Verdict.UP and not is_held:
            if state.leases:
                self._ask_beside(state, now)
            elif state.is_unreachable(now):
                self._ask_mute(state, now)
        if state.leases and now - state.quiet_since >= QUIET_S and not is_held:
            self._check_stall(state, now)
        elif state.leases and state.ranks.count:
            self._check_ranks(state, now)

    def _compare_speeds(self, now: float) -> None:
        if self._comparison is None and now >= self._compare_at:
            self._compare_at = now + COMPARE_S
            self._comparison = comparing_speeds(self._board.attention.units)
        if self._comparison is not None:
            changed = next(self._comparison, None)
            for state in changed or ():
                self._report_outlier(state)
            if changed is None:
                self._comparison = None

    def gate_fault(self, reason: str) -> None:
        """The gate could not open a connection: no file descriptors, no ports, or no resolver."""
        self.gate_faults += 1
        if self._now() - self._fault_reported_at > _REPORT_EVERY_S:
            self._fault_reported_at = self._now()
            self._report(
                "gate_fault",
                None,
                f"{reason}; no unit is blamed; check the gate's file descriptor limit and its resolver",
            )

    def _check_stall(self, state: UnitState, now: float) -> None:
        # The counters show whether the engine works on requests of others.
        if state.counters_at:
            self._prober.look_now(state.unit.name, EngineMetrics.name)
        state.is_alone = self._board.is_alone(state, now)
        state.record_stall(still_s(state, now))
        if now - state.quiet_since >= self._board.rules.silent_min_s:
            self._watch_pause(state)
            if state.is_alone:
                state.overtaken.still_at = now
                self._ask_peers(state, now)
            elif not state.counters_at and self._waits_at.get(state.models) != now:
                # All that are alike learn from one look on a tick.
                self._waits_at[state.models] = now
                self._board.learn_waits(state, now)
        found = find_stall(state, now, self._board.rules)
        if found is None:
            self._check_ranks(state, now)
        else:
            self._report_stall(state, found, "", now)

    def _watch_pause(self, state: UnitState) -> None:
        if state.pauses.since != state.quiet_since:
            state.pauses.watch(state.quiet_since, state.case.restarted)
            self._silent[state.unit.name] = state

    def _learn_pauses(self) -> None:
        """Learn from those that have gone on: of those of one pool the longest."""
        longest: dict[str, tuple[float, float]] = {}
        for name, state in list(self._silent.items()):
            if state.leases and state.quiet_since == state.pauses.since:
                continue
            del self._silent[name]
            if pause_s := state.pauses.end(state.progress_at, state.case.restarted):
                pool = self._board.pools.of_unit(name)
                longest[pool] = max(longest.get(pool, (0.0, 0.0)), (pause_s, state.progress_at))
        for pool, (pause_s, at) in longest.items():
            self._board.learn_pause(pool, pause_s, at)

    def _ask_peers(self, state: UnitState, now: float) -> None:
        """Nothing shows that others do better than a silent unit: those without requests can say so."""
        idle = (other for other in self._board.peers(state) if not other.leases)
        for other in islice(idle, PEERS_ASKED):
            asked_at = self._asked_at.get(other.unit.name, -CONCURRENT_S)
            if asked_at < state.quiet_since and now - asked_at >= CONCURRENT_S:
                self._asked_at[other.unit.name] = now
                self._prober.look_now(other.unit.name, Canary.name)

    def _check_ranks(self, state: UnitState, now: float) -> None:
        if state.ranks.count and (found := find_rank_stall(state, now, self._board.rules)) is not None:
            rank, stall = found
            self._report_stall(state, stall, f"data parallel rank {rank} ", now)

    def _ask_beside(self, state: UnitState, now: float) -> None:
        """Send a canary beside requests: to a unit that gets its first one after a while, and in the way of
        one that hangs while later ones are answered.
        """
        name, lease, asked_at = state.unit.name, None, self._asked_at.get(state.unit.name, -CONCURRENT_S)
        is_dark = now - state.progress_at >= AWAKE_S and now - state.work_at >= QUIET_S
        if is_dark and asked_at < state.quiet_since and self._awake_left:
            self._awake_left -= 1
            lease = next(iter(state.leases))
        elif now - asked_at >= CONCURRENT_S:
            lease = self._board.uses.hanging(state, now)
        if lease is not None:
            self._asked_at[name] = now
            state.asks_next = use_of(lease.ask)
            self._prober.look_now(name, Canary.name)

    def _ask_resting(self, unheard: int, now: float) -> None:
        """Units do not answer: is it them, or is the gate cut off? Some of those that rest can tell; and of
        several, all.
        """
        is_several = unheard >= PANIC_UNITS
        if now < (self._ask_all_at if is_several else self._ask_some_at):
            return
        self._ask_some_at = now + ASK_SOME_S
        self._ask_all_at = now + ASK_ALL_S if is_several else self._ask_all_at
        resting = (s for s in self._board if now - s.answered_at > UNREACHABLE_S and rest(s, now) > 1.0)
        for state in resting if is_several else islice(resting, RESTING_ASKED):
            self._prober.look_now(state.unit.name, Readiness.name)

    def _ask_mute(self, state: UnitState, now: float) -> None:
        """Send a canary to an idle unit that does not answer probes any more, once."""
        name = state.unit.name
        if self._asked_at.get(name, -1.0) < max(state.answered_at, state.progress_at):
            self._asked_at[name] = now
            self._prober.look_now(name, Canary.name)

    def _report_stall(self, state: UnitState, found: Stall, whose: str, now: float) -> None:
        if now - state.stall_reported_at < found.limit_s or state.case.verdict not in USABLE:
            return
        state.stall_reported_at = now
        reason = (
            f"{whose}stalled for {found.stalled_s:.1f} s with {found.waiting} requests in flight; "
            f"the limit is {found.limit_s:.1f} s"
        )
        self._prober.observe(Evidence(state.unit.name, Sign.BAD, Strength.STRONG, STALL_SOURCE, reason, now))

    def _report_lag(self, lag_s: float, now: float) -> None:
        self._prober.trust_from(now + DISTRUST_S)
        if now - self._lag_reported_at > _REPORT_EVERY_S:
            self._lag_reported_at = now
            self._report(
                "lag",
                None,
                f"a timer fired {lag_s:.2f} s late; evidence against units is not counted for "
                f"{DISTRUST_S:g} s; if this repeats, give the gate more CPU or less traffic",
            )

    def _report_panic(self, now: float) -> None:
        began_at, self._panic_at = self._panic_at, self._board.panic_at
        limit_s = PANIC_MAX_S
        if began_at is None:
            mute = [
                state.unit.name for state in self._board if state.is_usable() and state.is_unreachable(now)
            ]
            self._report(
                "panic",
                None,
                f"{len(mute)} units do not answer at all ({', '.join(mute[:5])}); the gate assumes that its "
                f"own network is cut off and keeps them in rotation for up to {limit_s:g} s; check it",
            )
        else:
            held_s = now - began_at
            why = "which is the limit" if held_s >= limit_s else "until units answered again"
            self._report("panic_over", None, f"units were kept in rotation for {held_s:.1f} s, {why}")

    def _report_outlier(self, state: UnitState) -> None:
        degraded, name = state.outlier.degraded, state.unit.name
        if not state.slow_since or not degraded:
            state.slow_since = self._now() if degraded else 0.0
        if not degraded:
            self._report("recovered", name, "its tokens are as fast as those of the others")
            return
        self._report(
            "degraded",
            name,
            f"a token takes {1.0 / (1.0 - degraded):.1f} times as long there as on the other units of cell "
            f"{state.unit.cell}; its share of requests falls by {degraded:.0%}",
        )

    def _report(self, kind: ActionKind, unit: str | None, detail: str) -> None:
        self._events.add(Action(kind, "gate", unit, detail))
