"""Recovery: executes what the planner decides, one task for each attempt, and reports it.

1. Every action is in the audit log first; without the log nothing is done.
2. Right before an action it checks again: a unit that came back, or a gate that must not act, cancels it.
3. Where gates agree on who acts, an attempt is claimed right before its action (leases.py).
4. Time, action and log are passed in, so that a simulation can replace them.

In this order: `Recovery`, `incident`, `reason_to_wait`, `acting_metrics`, `attend`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Metric

from cellgate.extras.operator import plan
from cellgate.extras.operator.action_settings import Remedy
from cellgate.extras.operator.plan import (
    Act,
    Acting,
    AuditRecord,
    Claim,
    Incident,
    NotActingError,
    RecoveryReport,
    RecoveryResult,
    RecoveryState,
    UnitRow,
    ended,
    plan_recovery,
    received,
)
from cellgate.probes.fault_status import rank_words
from cellgate.proxy.config.sources import SOURCES
from cellgate.proxy.control.rank_retry import retry_ranks
from cellgate.proxy.observe.events import Action, ActionKind
from cellgate.proxy.observe.families import gauge
from cellgate.proxy.observe.log import utc
from cellgate.proxy.observe.text import one_line
from cellgate.proxy.process.tasks import end_tasks
from cellgate.router.board import Board
from cellgate.router.departures import is_draining, is_silent_too_long
from cellgate.router.health import shared_fates
from cellgate.router.nouns import PANIC_SHARE, PANIC_UNITS, Evidence, Rules, Verdict
from cellgate.router.unit_state import UnitState

if TYPE_CHECKING:
    from cellgate.proxy.control.plane import Plane


RECOVERY_RETRY_S = 15.0
"""How long an engine's own fault tolerance may take to bring a unit back, before it is restarted."""

_ENDED_WELL = (RecoveryResult.OK, RecoveryResult.RETRIED, RecoveryResult.DRY_RUN, RecoveryResult.CANCELLED)

Counts = MutableMapping[tuple[str, str], int]
"""How many attempts ended, by cell and result."""


@dataclass(frozen=True, slots=True)
class RecoveryPorts:
    """The environment of recovery. `waits` returns why nothing may be done now (empty: it may). `retry` has
    the engine's own fault tolerance recover its ranks; whether they are healthy again. `acting`: which gate
    acts.
    """

    now: Callable[[], float]
    wall: Callable[[], float]
    waits: Callable[[float], str]
    act: Act
    record: AuditRecord
    tell: Callable[[Action], None]
    retry: Callable[[UnitState], Awaitable[bool]]
    acting: Acting


class Recovery:
    """Recovers the units of a board, by the remedies of their cells. To be ticked."""

    def __init__(
        self,
        board: Board,
        remedies: Mapping[str, Remedy],
        ports: RecoveryPorts,
        rng: random.Random,
        counts: Counts,
    ) -> None:
        self.states: dict[str, RecoveryState] = {}
        self._board = board
        self._ports = ports
        self._rng = rng
        self._counts = counts
        self._due = 0.0
        self._reported_waiting = False
        self._received: dict[str, Claim] = {}
        """By unit: attempts of other gates that are not counted yet."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_over = False
        """Whether no attempt may begin any more."""
        self.configure(remedies)

    def configure(self, remedies: Mapping[str, Remedy]) -> None:
        """Use other remedies from now on; running attempts keep the old ones."""
        self._remedies = dict(remedies)
        for cell in remedies:
            for result in RecoveryResult:
                self._counts.setdefault((cell, result.value), 0)

    def tick(self, now: float) -> None:
        """Check all units; must be called at least once a second."""
        if now < self._due or not self._remedies:
            return
        self._due = now + PERIOD_S
        waits, acting = self._waits(now), self._ports.acting
        acting.stand_for(() if waits else self._remedies)
        self._count_others(now)
        ours = {cell for cell in self._remedies if acting.acts_for(cell)}
        decided = plan_recovery(
            self.states, self._rows(), self._remedies, now, may_act=not waits, acting=ours
        )
        self.states = decided.states
        self._report_waiting(waits or acting.trouble, decided.held)
        for units, step in ((decided.abort, self._abort), (decided.begin, self._recover)):
            for unit in units:
                state = self.states[unit]
                remedy = self._remedies[state.cell]
                task = asyncio.create_task(step(state, remedy, self._incident(unit, state, remedy)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def hand_over(self) -> dict[str, Any]:
        """Begin nothing more, and return the remembered state of each unit for JSON."""
        self.is_over = True
        return {unit: asdict(state) for unit, state in self.states.items()}

    def carry_on(self) -> None:
        """The hand-over failed: continue."""
        self.is_over = False

    def take_over(self, known: Mapping[str, Any]) -> None:
        """Take over the state of another gate, which ends its own running attempts."""
        now = self._ports.now()
        for unit, fields in known.items():
            state = RecoveryState(**fields)
            if (remedy := self._remedies.get(state.cell)) is not None:
                is_over = not state.is_running
                self.states[unit] = state if is_over else ended(state, remedy, now, RecoveryResult.CUT_OFF)

    async def close(self) -> None:
        """Begin nothing more; running attempts are ended, and recorded as ended."""
        self.is_over = True
        await end_tasks(*self._tasks)
        await self._ports.acting.close()

    # -- one attempt ---------------------------------------------------------------------------------------

    async def _recover(self, state: RecoveryState, remedy: Remedy, about: Incident) -> None:
        unit, begun_at = about["unit"], self._ports.now()
        try:
            report = await self._attempt(unit, remedy, about)
        except asyncio.CancelledError:
            report = RecoveryReport(RecoveryResult.CUT_OFF, "the gate ended while it was running")
        except Exception as error:
            report = RecoveryReport(RecoveryResult.FAILED, f"the gate's own fault: {error!r}")
        took_s = round(self._ports.now() - begun_at, 3)
        self.states[unit] = ended(self.states[unit], remedy, self._ports.now(), report.result)
        self._count(state.cell, report.result)
        self._report_end(unit, state, remedy, report)
        outcome = {"result": report.result.value, "detail": report.detail, "took_s": took_s}
        await self._record_end(remedy, self._entry("end", about) | outcome | {"output": report.output})

    async def _attempt(self, unit: str, remedy: Remedy, about: Incident) -> RecoveryReport:
        step = {remedy.action.kind: remedy.action.audited()}
        try:
            await self._ports.record(remedy.audit, self._entry("begin", about) | step | {"case": about})
        except OSError as error:
            return RecoveryReport(
                RecoveryResult.UNRECORDED, f"{remedy.audit}: {error.strerror or error}; nothing was done"
            )
        claim = _claim(about, remedy)
        try:
            fence = await self._ports.acting.claim(claim)
        except NotActingError as error:
            return RecoveryReport(RecoveryResult.CANCELLED, f"{error}; nothing was done")
        if why := self._why_not(unit):
            await self._ports.acting.withdraw(claim)
            return RecoveryReport(RecoveryResult.CANCELLED, f"{why}; nothing was done")
        what = remedy.action.in_words()
        nodes = ", ".join(node["name"] for node in about["nodes"])
        what += f" for nodes {nodes}; attempt {about['attempt']} of {about['attempts']}, DOWN for "
        self._report("recovery", unit, f"{what}{about['down_s']:.0f} s: {about['reason']}")
        if remedy.dry_run:
            return RecoveryReport(RecoveryResult.DRY_RUN, "dry_run: nothing was done")
        if about["attempt"] == 1 and await self._is_retried(unit):
            detail = "its engine has recovered by itself (fault tolerance, retry); nothing was restarted"
            return RecoveryReport(RecoveryResult.RETRIED, detail)
        return await self._ports.act(remedy, {**about, "fence": fence})

    def _count_others(self, now: float) -> None:
        """Count the attempts of other gates; on a unit that this gate is at work on, once that is over."""
        self._received |= {claim.unit: claim for claim in self._ports.acting.news()}
        for unit, claim in list(self._received.items()):
            state = self.states.get(unit)
            if state is None or not state.is_running:
                self.states[unit] = received(state, claim, now)
                del self._received[unit]

    async def _is_retried(self, unit: str) -> bool:
        """Whether the engine's own fault tolerance brings the unit back. It is asked before anything is
        restarted; an engine without it costs one request, or two.
        """
        state = self._board.units[unit]
        if state.facts.faults:
            said = ", ".join(map(rank_words, state.facts.faults))
            self._report("recovery", unit, f"its engine says: {said}; it is asked to retry its ranks")
        if not await self._ports.retry(state):
            return False
        self._report(
            "recovery", unit, f"all ranks are healthy again; a canary has {RECOVERY_RETRY_S:g} s to pass"
        )
        for _ in range(int(RECOVERY_RETRY_S / PERIOD_S)):
            if state.case.verdict is not Verdict.DOWN:
                break
            await asyncio.sleep(PERIOD_S)
        return state.case.verdict is not Verdict.DOWN

    async def _abort(self, state: RecoveryState, remedy: Remedy, about: Incident) -> None:
        self._count(state.cell, RecoveryResult.GAVE_UP)
        detail = f"still DOWN after {state.tries} attempts; nothing more is done until it has been UP for a "
        detail += "while, or was drained and undrained; check the unit"
        self._report("recovery_gave_up", about["unit"], detail)
        outcome = {"result": RecoveryResult.GAVE_UP.value, "detail": detail, "case": about}
        await self._record_end(remedy, self._entry("end", about) | outcome)

    async def _record_end(self, remedy: Remedy, entry: dict[str, Any]) -> None:
        try:
            await self._ports.record(remedy.audit, entry)
        except OSError as error:
            self._report("recovery_unrecorded", entry["unit"], f"{remedy.audit}: {error.strerror or error}")

    def _why_not(self, unit: str) -> str:
        """Why a planned attempt must not be made after all."""
        state = self._board.units.get(unit)
        if state is None:
            return "the unit left the configuration"
        if state.drained:
            return "the unit was drained"
        if in_hand := _in_hand(state, self._ports.now(), self._board.rules):
            return in_hand
        if state.case.verdict is not Verdict.DOWN:
            return f"the unit is {state.case.verdict.value}"
        return self._waits(self._ports.now())

    # -- what is seen --------------------------------------------------------------------------------------

    def _waits(self, now: float) -> str:
        return "a hand-over is in progress" if self.is_over else self._ports.waits(now)

    def _rows(self) -> list[UnitRow]:
        unlucky = {unit for common_cause in shared_fates(self._board) for unit in common_cause.units}
        now, rules = self._ports.now(), self._board.rules
        return [
            _row(state, bool(_in_hand(state, now, rules)), has_common_cause=state.unit.name in unlucky)
            for state in self._board
        ]

    def _incident(self, unit: str, state: RecoveryState, remedy: Remedy) -> Incident:
        now = self._ports.now()
        return incident(
            self._board.units[unit],
            action_id=f"{unit}-{self._rng.getrandbits(48):012x}",
            attempt=state.tries,
            down_at=state.down_at if state.down_at is not None else now,
            remedy=remedy,
            now=now,
            wall=self._ports.wall(),
        )

    def _entry(self, step: str, about: Incident) -> dict[str, Any]:
        same = {key: about[key] for key in ("id", "unit", "cell", "attempt")}
        return {"time": utc(self._ports.wall()), "step": step} | same

    # -- what is told --------------------------------------------------------------------------------------

    def _report_end(self, unit: str, state: RecoveryState, remedy: Remedy, report: RecoveryReport) -> None:
        went_well = report.result in _ENDED_WELL
        kind: ActionKind = "recovery_done" if went_well else "recovery_failed"
        match report.result:
            case RecoveryResult.CANCELLED:
                next_step = ""
            case RecoveryResult.REFUSED:
                next_step = f"; it is tried again in {remedy.patience_s(0):g} s, and does not count"
            case _:
                next_step = f"; it is given {remedy.patience_s(state.tries):g} s to come back"
        self._report(kind, unit, report.detail + next_step)

    def _report_waiting(self, waits: str, held: tuple[str, ...]) -> None:
        if held and waits and not self._reported_waiting and not self.is_over:
            self._report("recovery_held", None, f"{waits}; nothing is done about {', '.join(held)}")
        self._reported_waiting = bool(waits) and (self._reported_waiting or bool(held))

    def _report(self, kind: ActionKind, unit: str | None, detail: str) -> None:
        self._ports.tell(Action(kind, "gate", unit, detail))

    def _count(self, cell: str, result: RecoveryResult) -> None:
        key = (cell, result.value)
        self._counts[key] = self._counts.get(key, 0) + 1


def _claim(about: Incident, remedy: Remedy) -> Claim:
    rest_s = remedy.timeout_s + remedy.patience_s(about["attempt"])
    return Claim(about["unit"], about["cell"], "", about["id"], about["attempt"], rest_s)


def _row(state: UnitState, in_hand: bool, *, has_common_cause: bool) -> UnitRow:
    case = state.case
    return UnitRow(
        state.unit.name,
        state.unit.cell,
        case.verdict,
        case.since,
        state.up_since,
        born_at=case.restarted[1] if case.restarted is not None else 0.0,
        drained=state.drained,
        in_hand=in_hand,
        has_common_cause=has_common_cause,
    )


def _in_hand(state: UnitState, now: float, rules: Rules) -> str:
    """Who takes care of the unit, so that recovery must not: a source of units reports that it is being
    removed, or that a node of it does not run; its engine says that it stands still on purpose, or takes
    nothing new and goes on with what it has.
    """
    if any(source in SOURCES for _, source in state.case.faults):
        return "the unit is in the hands of its orchestrator"
    if is_draining(state) and not is_silent_too_long(state, now, rules):
        return f"the unit takes no new requests, and may be finishing the {state.in_flight} that it has"
    if state.kept is not None:
        return "the unit is not configured any more"
    return f"the unit is {state.hold.kind.value}" if state.hold is not None else ""


# The incident that a command or a webhook gets: JSON, and environment variables.


EVIDENCE_KEPT = 16
_RECOVERY_REASON_MAX = 1024


def incident(
    state: UnitState, *, action_id: str, attempt: int, down_at: float, remedy: Remedy, now: float, wall: float
) -> Incident:
    """The case of a unit that is to be recovered, all its nodes as one. Times are ISO 8601 in UTC. `fence` is
    known once the attempt is claimed.
    """
    unit, because = state.unit, state.case.because
    words = sorted({*state.last_evidence.values(), *state.case.window}, key=lambda word: word.at)

    def at(moment: float) -> str:
        return utc(wall - (now - moment))

    def document(word: Evidence) -> dict[str, Any]:
        return {
            "time": at(word.at),
            "sign": word.sign.value,
            "strength": word.strength.name.lower(),
            "source": word.source,
            "node": word.node,
            "reason": word.reason,
        }

    return {
        "id": action_id,
        "unit": unit.name,
        "cell": unit.cell,
        "url": unit.url,
        "nodes": [{"name": node.name, "role": node.role.value, "agent": node.agent} for node in unit.nodes],
        "reason": because.reason if because is not None else "",
        "node": because.node if because is not None else None,
        "source": because.source if because is not None else "",
        "epoch": dict(sorted(state.case.epochs)),
        "since": at(down_at),
        "down_s": round(now - down_at, 3),
        "attempt": attempt,
        "attempts": remedy.attempts,
        "dry_run": remedy.dry_run,
        "fence": 0,
        "evidence": [document(word) for word in words[-EVIDENCE_KEPT:]],
    }


def environment(about: Incident, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a command: the gate's own without its secrets, and what it needs of the unit."""
    epoch = ",".join(f"{reader}={reading}" for reader, reading in about["epoch"].items())
    document = {
        "ID": about["id"],
        "UNIT": about["unit"],
        "CELL": about["cell"],
        "URL": about["url"],
        "NODES": ",".join(node["name"] for node in about["nodes"]),
        "REASON": one_line(about["reason"])[:_RECOVERY_REASON_MAX],
        "NODE": about["node"] or "",
        "EPOCH": epoch,
        "SINCE": about["since"],
        "ATTEMPT": str(about["attempt"]),
        "FENCE": str(about["fence"]),
    }
    # Tokens and passwords of the gate are in such variables, too.
    kept = {name: value for name, value in base.items() if not name.startswith("CELLGATE_")}
    return kept | {f"CELLGATE_{name}": value for name, value in document.items()}


PERIOD_S = 1.0


# When the gate must not act: a gate that is cut off sees a dead fleet, and would restart a healthy one.
#
# Pure.


def reason_to_wait(board: Board, now: float, *, stopping: bool, gate_fault: bool) -> str:
    """Why recovery must not act now; empty: it may."""
    if stopping:
        return "the gate is stopping"
    if board.panic_at is not None:
        return "the gate is in panic"
    if gate_fault:
        return "the gate cannot open connections of its own"
    mute = sum(state.is_unreachable(now) for state in board)
    # Panic ends after a while, and units then go DOWN, which still does not prove that they are.
    units = len(board.units)
    if (mute >= PANIC_UNITS and mute > PANIC_SHARE * units) or mute == units > 1:
        return f"{mute} of {units} units do not answer at all; the gate's own network may be cut off"
    return ""


# Metrics of the agreement of gates on who acts.


def acting_metrics(cells: Callable[[], Collection[str]], acts_for: Callable[[str], bool]) -> Iterator[Metric]:
    """For which cells this gate acts, of those that it stands for."""
    text = "1 while this gate is the one that acts on units of the cell that stay DOWN."
    yield gauge("acting", text, "cell", ((cell, acts_for(cell)) for cell in sorted(cells())))


# Ties recovery to a control plane, its processes and the network. The one place that knows them all.


TROUBLE_S = 10.0
"""A gate that could not open a connection this recently, by its own fault, does not act."""


def attend(plane: Plane, act: Act, acting: Acting) -> Recovery:
    """Begin to recover the units of `plane`; `act` carries out remedies, `acting` knows which gate acts."""
    gate_faults, trouble_at = 0, -TROUBLE_S

    def waits(now: float) -> str:
        nonlocal gate_faults, trouble_at
        if (seen := plane.stall_watch.gate_faults) != gate_faults:
            gate_faults, trouble_at = seen, now
        gate_fault = now - trouble_at < TROUBLE_S
        return reason_to_wait(plane.board, now, stopping=plane.is_stopping(), gate_fault=gate_fault)

    ports = RecoveryPorts(
        plane.now,
        time.time,
        waits,
        act,
        plan.record,
        plane.events.add,
        lambda state: retry_ranks(state, plane.reach.probe_transport(state)),
        acting,
    )
    recovery = Recovery(
        plane.board, plane.settings.remedies, ports, random.Random(), plane.metrics.recoveries
    )
    plane.ticker.looks.append(recovery.tick)
    return recovery
