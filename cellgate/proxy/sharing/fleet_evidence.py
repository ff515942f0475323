"""Applies the reports of other gates to the Board: their verdicts become evidence, their numbers load.

1. A report is believed as it is, because that gate runs the canaries. But a unit that this gate could not
   reach itself comes back only by this gate's own probe (probes/gate_word.py).
2. A drain or a hold at the other gate is one here, and ends with it.
3. A unit that is now reached through another gate is the same unit, and keeps its measured values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile

from cellgate.probes.gate_word import GATE_EPOCHS
from cellgate.proxy.logs.events import Action
from cellgate.proxy.sharing.fleet_units import USABLE, FleetUnit
from cellgate.proxy.sharing.unit_report import UnitReport
from cellgate.router.board import Board
from cellgate.router.hold import is_on
from cellgate.router.hold_nouns import Quiescence
from cellgate.router.judge import CANARY_SOURCE
from cellgate.router.nouns import Case, Evidence, Load, Sign, Strength, Verdict
from cellgate.router.unit_state import UnitState

_CUT = 256
"""Published epochs are cut to this many characters: the last one may be incomplete."""


class FleetEvidence:
    """Applies reports to a Board. `observe` takes evidence, `drain` drains a unit, `tell` records the
    event, `hear` takes whether a unit stands still on purpose.
    """

    def __init__(
        self,
        board: Board,
        observe: Callable[[Evidence], object],
        drain: Callable[[str, bool], object],
        tell: Callable[[Action], None],
        hear: Callable[[UnitState, Quiescence], object],
    ) -> None:
        self._board = board
        self._observe = observe
        self._drain = drain
        self._tell = tell
        self._hear = hear
        self._states: dict[str, UnitState] = {}
        self._drained: dict[str, str] = {}
        """Units that are drained at a gate, and which gate."""
        self._epochs: dict[str, tuple[str, str, int]] = {}
        """By unit: the gate of the last epoch, that epoch, and the number of the incarnation."""

    def take(self, fleet_unit: FleetUnit, now: float) -> None:
        """Apply the report of one unit, if it is on the Board."""
        state = self._board.units.get(fleet_unit.name)
        if state is None:
            return
        before, self._states[fleet_unit.name] = self._states.get(fleet_unit.name, state), state
        if before is not state:
            _carry_over(before, state)
        # The engine and models; the address is in its unit.
        state.engine = fleet_unit.latest.report.engine or state.engine
        if fleet_unit.gone_since is None:
            self._take_load(state, fleet_unit)
            self._take_epoch(state, fleet_unit.latest.report, now)
            self._take_drain(fleet_unit)
            self._take_hold(state, fleet_unit.latest.report, now)
        for evidence in _words(state, fleet_unit, self._board.rules.passes, now):
            self._observe(evidence)
        if before is not state:
            # It has not restarted, so no slow start is needed.
            state.risen_at = before.risen_at

    def keep(self, names: set[str]) -> None:
        """Forget all other units."""
        for kept in (self._states, self._drained, self._epochs):
            for name in kept.keys() - names:
                del kept[name]

    def _take_load(self, state: UnitState, fleet_unit: FleetUnit) -> None:
        report, at = fleet_unit.latest.report, fleet_unit.latest.at
        state.heard_at = max(state.heard_at, at)
        if (lived_at := fleet_unit.latest.lived_at()) is not None:
            state.life_at = max(state.life_at, lived_at)
        if state.load is not None and state.load.at >= at:
            return
        running = report.running if report.running is not None else fleet_unit.in_flight
        # Requests in flight at its gates that the engine does not report yet will reach it in a moment.
        waiting = max(report.waiting or 0, fleet_unit.in_flight - running)
        sent_since = sum(1 for _ in takewhile(lambda lease: lease.opened_at > at, reversed(state.leases)))
        own = state.in_flight - sent_since
        self._board.report(Load(fleet_unit.name, at, running, waiting, report.kv_use or 0.0, own))

    def _take_epoch(self, state: UnitState, report: UnitReport, now: float) -> None:
        name = state.unit.name
        gate, known, incarnation = self._epochs.get(name, ("", "", 1))
        if report.epoch and gate == report.gate and _is_other(known, report.epoch):
            incarnation += 1
        if report.epoch:
            self._epochs[name] = (report.gate, report.epoch, incarnation)
        if dict(state.case.epochs).get(GATE_EPOCHS) != str(incarnation):
            reason, epoch = f"gate {report.gate} reads the epoch {report.epoch}", str(incarnation)
            self._observe(Evidence(name, Sign.NEUTRAL, Strength.WEAK, GATE_EPOCHS, reason, now, epoch=epoch))

    def _take_drain(self, fleet_unit: FleetUnit) -> None:
        report, name = fleet_unit.latest.report, fleet_unit.name
        wanted, known = (
            fleet_unit.drained_by or (report.gate if report.stopping else ""),
            self._drained.get(name, ""),
        )
        if bool(wanted) is bool(known):
            return
        self._drained[name] = wanted
        self._drain(name, bool(wanted))
        why = "it is stopping, and no other gate has the unit" if wanted and not fleet_unit.drained_by else ""
        self._tell(Action("drain" if wanted else "undrain", f"gate {wanted or known}", name, why))

    def _take_hold(self, state: UnitState, report: UnitReport, now: float) -> None:
        if report.hold is not None or is_on(state.hold):
            self._hear(state, Quiescence(state.unit.name, report.hold, now))


def _words(state: UnitState, fleet_unit: FleetUnit, passes: int, now: float) -> Iterator[Evidence]:
    """The evidence that brings the case of a unit to the verdict of its gate, to be observed in order."""
    report, at = fleet_unit.latest.report, fleet_unit.latest.at
    reason = f"{report.verdict.value} at its gate" + (f": {report.reason}" if report.reason else "")

    def word(sign: Sign, strength: Strength, source: str, why: str) -> Evidence:
        return Evidence(fleet_unit.name, sign, strength, source, why, now)

    source = f"gate {report.gate}"
    if fleet_unit.gone_since is not None:
        if state.case.verdict is not Verdict.DOWN:
            why = "its gate sends no more reports and is not ready; no other gate has the unit"
            yield word(Sign.BAD, Strength.FATAL, source, why)
    elif report.verdict not in USABLE:
        is_due = state.case.verdict in USABLE or report.verdict is Verdict.DOWN
        if is_due and state.case.verdict is not Verdict.DOWN:
            yield word(Sign.BAD, Strength.FATAL, source, reason)
    elif not is_own_finding(state.case) and not _is_newer_doubt(state.case, report, at):
        for _ in range(passes + 1):
            if state.case.verdict is not Verdict.UP:
                yield word(Sign.GOOD, Strength.STRONG, CANARY_SOURCE, f"{source}: {reason}")
        if report.verdict is Verdict.SUSPECT:
            yield word(Sign.BAD, Strength.STRONG, source, reason)


def is_own_finding(case: Case, strength: Strength = Strength.WEAK) -> bool:
    """Whether the unit is down by evidence of this gate itself, of at least this strength."""
    if case.verdict not in (Verdict.DOWN, Verdict.PROBATION) or case.because is None:
        return False
    return case.because.strength >= strength and not case.because.source.startswith("gate ")


def _is_newer_doubt(case: Case, report: UnitReport, at: float) -> bool:
    """Whether the unit is suspected, and its gate has not reported it as healthy since."""
    return case.verdict is Verdict.SUSPECT and (report.verdict is Verdict.SUSPECT or at <= case.since)


def _is_other(known: str, read: str) -> bool:
    """Whether a process in the known epoch has ended. New ones may be added one after another."""
    before = known.split(",")
    if len(known) >= _CUT:
        before.pop()
    return known != "" and not set(before) <= set(read.split(","))


def _carry_over(before: UnitState, state: UnitState) -> None:
    state.drained = before.drained
    state.step_times, state.costs, state.gaps_ms = before.step_times, before.costs, before.gaps_ms
