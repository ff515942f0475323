"""Rolling at one gate: it keeps units of the roll drained, and takes its steps when it is the conductor.

1. A step is written down before it is done. So another gate can go on with it, and a gate that is no longer
   the conductor is refused before it does anything.
2. Every gate keeps out of rotation what the roll says, whoever conducts: also a unit that comes back at
   another address. It drains each of them once, so that an operator can undrain one that has failed.
3. Time, commands, log and store are passed in, so that a simulation can replace them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from cellgate.extras.operator import plan
from cellgate.extras.operator.action_settings import Remedy, RollPolicy
from cellgate.extras.operator.plan import Act, NotActingError, RecoveryReport, RecoveryResult
from cellgate.extras.operator.recovery import incident
from cellgate.extras.operator.roll_plan import (
    OUT,
    CommandEnd,
    Order,
    OrderError,
    Phase,
    Roll,
    RollRow,
    RollStore,
    UnitRoll,
    advance,
    carried_out,
    order_document,
    read_order,
    read_roll,
    roll_document,
    roll_view,
    why_not_now,
)
from cellgate.proxy.observe.events import Action, ActionKind
from cellgate.proxy.observe.log import utc
from cellgate.proxy.process.tasks import end_tasks
from cellgate.router.board import Board
from cellgate.router.cost_model import NO_REMOTE_LOAD, RemoteLoad
from cellgate.router.known_answers import is_implausible
from cellgate.router.nouns import Verdict
from cellgate.router.unit_state import UnitState

if TYPE_CHECKING:
    from cellgate.proxy.control.plane import Plane


ROLL_PERIOD_S = 0.5
WRITE_AGAIN_MS = 60 * 1000
"""A roll that keeps units out, or goes on, is written again so often: gates that begin later must find one
that is not old, and Redis forgets what is a day old.
"""
ORDERS_A_LOOK = 16
"""So many orders are carried out in one look."""

RunAction = Callable[[RollPolicy, Roll, UnitRoll, int], Awaitable[RecoveryReport]]
"""Runs the command for a unit, with a fencing token, within `timeout_s`."""


@dataclass(frozen=True, slots=True)
class RollPorts:
    """The environment of a roll. `rows` is what is seen of all units; those that are watched are compared
    with the others of their cell. `known` are all units with their cells, in order; `waits` returns why this
    gate must not conduct; `state_of` has a unit of the Board; `record` appends to the audit log; `ask_answer`
    asks a unit the known prompt.
    """

    now: Callable[[], float]
    wall: Callable[[], float]
    rows: Callable[[Collection[str]], Iterable[RollRow]]
    known: Callable[[], Sequence[tuple[str, str]]]
    waits: Callable[[float], str]
    state_of: Callable[[str], UnitState | None]
    set_drain: Callable[[str, bool], object]
    act: RunAction
    record: Callable[[str, Mapping[str, Any]], Awaitable[None]]
    ask_answer: Callable[[str], None]
    tell: Callable[[Action], None]
    new_id: Callable[[], str]


class _Held(NamedTuple):
    """A unit that this gate keeps out of rotation: the state that it has drained, for which roll and in which
    direction, and whether it stays drained after that, because an operator had drained it here.
    """

    state: UnitState
    turn: tuple[str, bool]
    stays: bool


class Roller:
    """Rolls the units of a board by a policy. To be ticked."""

    def __init__(self, policy: RollPolicy, store: RollStore, ports: RollPorts) -> None:
        self.roll: Roll | None = None
        self.is_over = False
        """Whether this gate is about to end, and conducts no more."""
        self._policy = policy
        self._store = store
        self._ports = ports
        self._due = 0.0
        self._text = b""
        self._written_ms = 0
        self._out: dict[str, tuple[UnitRoll, tuple[str, bool]]] = {}
        self._held: dict[str, _Held] = {}
        self._ends: dict[str, tuple[int, CommandEnd]] = {}
        """How the last command of each unit has ended here, and when it was begun."""
        self._look: asyncio.Task[None] | None = None
        self._commands: set[asyncio.Task[None]] = set()

    def tick(self, now: float) -> None:
        """Look at the roll; must be called at least once a second."""
        if now < self._due:
            return
        self._due = now + ROLL_PERIOD_S
        self._store.stand(willing=not self.is_over and not self._ports.waits(now))
        self._read()
        if self._store.conducts() and (self._look is None or self._look.done()):
            self._look = asyncio.create_task(self._lead())

    def keep_out(self) -> None:
        """Drain units that the roll has out of rotation: each once, and again when it has become another one,
        or is to go back. Must be called with each new fleet: one canary brings a new unit UP.
        """
        for unit, (each, turn) in self._out.items():
            state, held = self._ports.state_of(unit), self._held.get(unit)
            if state is None or (held is not None and held.state is state and held.turn == turn):
                continue
            stays = held.stays if held is not None else each.was_drained and state.drained
            self._held[unit] = _Held(state, turn, stays)
            self._ports.set_drain(unit, True)

    async def order(self, order: Order) -> None:
        """Ask for something. Raises OrderError."""
        self._read()
        why = why_not_now(order, self.roll, self._policy, self._ports.known(), self._failed())
        if why or self._store.trouble:
            raise OrderError(why or self._store.trouble)
        try:
            await self._store.ask(order_document(replace(order, id=self._ports.new_id())))
        except NotActingError as error:
            raise OrderError(str(error)) from error

    def shown(self) -> dict[str, Any] | None:
        """The roll for people; None: there is none."""
        if self.roll is None:
            return None
        return roll_view(self.roll, self._store.leader, self._store.clock_ms())

    async def close(self) -> None:
        """Conduct no more; a running command is ended."""
        self.is_over = True
        await end_tasks(*self._commands, *([self._look] if self._look is not None else []))

    # -- every gate ----------------------------------------------------------------------------------------

    def _failed(self) -> list[UnitRoll]:
        """The units that have failed and that nobody has undrained here."""
        return [
            each
            for unit, (each, _) in self._out.items()
            if each.phase is Phase.FAILED and unit in self._held and self._held[unit].state.drained
        ]

    def _read(self) -> None:
        """Apply what was written last."""
        text = self._store.latest()
        if text and text != self._text:
            self._text = text
            try:
                self._apply(read_roll(text))
            except ValueError as error:
                self._tell("roll_failed", f"the roll in Redis cannot be read ({error}); this gate ignores it")

    def _apply(self, roll: Roll) -> None:
        self.roll = roll
        self._out = {each.unit: (each, (roll.id, each.back)) for each in roll.units if each.phase in OUT}
        for unit in sorted(self._held.keys() - self._out.keys()):
            if not self._held.pop(unit).stays:
                self._ports.set_drain(unit, False)
        self.keep_out()

    # -- the conductor -------------------------------------------------------------------------------------

    async def _lead(self) -> None:
        try:
            for _ in range(ORDERS_A_LOOK):
                if (text := await self._store.asked()) is None:
                    break
                await self._carry_out(text)
                await self._store.done(text)
            if self.roll is not None and not self.roll.is_over():
                await self._advance(self.roll)
            await self._write_again()
        except NotActingError:
            # Another gate conducts, or none is known to: what was not written is not done.
            return

    async def _carry_out(self, text: bytes) -> None:
        """Carry an order out, once: a gate that has written it down may have died before it said so."""
        try:
            order = read_order(text)
            if order.id and self.roll is not None and order.id == self.roll.order:
                return
            known, failed, now_ms = self._ports.known(), self._failed(), self._store.clock_ms()
            roll = carried_out(order, self.roll, self._policy, known, failed, self._ports.new_id(), now_ms)
        except (ValueError, OrderError) as error:
            self._tell("roll_failed", f"an order was refused: {error}")
            return
        await self._write(roll)
        self._tell("roll", f"{order.verb} of roll {roll.id} by {order.by}: {len(roll.units)} units")

    async def _advance(self, before: Roll) -> None:
        now_ms = self._store.clock_ms()
        watched = {each.unit for each in before.units if each.phase in (Phase.PROVING, Phase.SOAKING)}
        rows = list(self._ports.rows(watched))
        self._ask_for_answers(before, rows)
        step = advance(before, self._policy, rows, self._ends_of(before), now_ms)
        if step.roll == before:
            return
        fence = await self._write(step.roll)
        self._tell_steps(before, step.roll)
        for each in step.act:
            task = asyncio.create_task(self._run(step.roll, each, fence))
            self._commands.add(task)
            task.add_done_callback(self._commands.discard)

    def _ends_of(self, roll: Roll) -> dict[str, CommandEnd]:
        """The ends of commands that the roll has begun last: another gate may have begun one meanwhile."""
        begun_ms = {each.unit: each.acted_ms for each in roll.units}
        return {unit: end for unit, (at_ms, end) in self._ends.items() if at_ms == begun_ms.get(unit)}

    def _ask_for_answers(self, roll: Roll, rows: Sequence[RollRow]) -> None:
        """Let units that are to prove themselves answer the known prompt."""
        proving = {each.unit for each in roll.units if each.phase is Phase.PROVING}
        for row in rows:
            if row.unit in proving and row.verdict is Verdict.UP and not row.answered:
                self._ports.ask_answer(row.unit)

    async def _write_again(self) -> None:
        """Nobody else may forget the roll. A failed unit that was undrained here is in nobody's way."""
        if self.roll is None or self._store.clock_ms() - self._written_ms < WRITE_AGAIN_MS:
            return
        if not self.roll.is_over() or any(held.state.drained for held in self._held.values()):
            await self._write(self.roll)

    async def _write(self, roll: Roll) -> int:
        text = roll_document(roll)
        fence = await self._store.write(text)
        self._text, self._written_ms = text, self._store.clock_ms()
        self._apply(roll)
        return fence

    async def _run(self, roll: Roll, each: UnitRoll, fence: int) -> None:
        self._ends.pop(each.unit, None)
        about = {"roll": roll.id, "unit": each.unit, "cell": each.cell, "back": each.back, "fence": fence}
        try:
            await self._record("begin", about)
            if roll.dry_run:
                report = RecoveryReport(RecoveryResult.DRY_RUN, "dry_run: nothing was done")
            else:
                report = await self._ports.act(self._policy, roll, each, fence)
        except OSError as error:
            why = f"{self._policy.audit}: {error.strerror or error}; nothing was done"
            report = RecoveryReport(RecoveryResult.UNRECORDED, why)
        except asyncio.CancelledError:
            report = RecoveryReport(RecoveryResult.CUT_OFF, "the gate ended while it was running")
        except Exception as error:
            report = RecoveryReport(RecoveryResult.FAILED, f"the gate's own fault: {error!r}")
        is_ok = report.result in (RecoveryResult.OK, RecoveryResult.DRY_RUN)
        self._ends[each.unit] = each.acted_ms, CommandEnd(is_ok, report.detail)
        outcome = {"result": report.result.value, "detail": report.detail, "output": report.output}
        try:
            await self._record("end", about | outcome)
        except OSError as error:
            self._tell("roll_failed", f"{self._policy.audit}: {error.strerror or error}", each.unit)

    async def _record(self, step: str, about: Mapping[str, Any]) -> None:
        await self._ports.record(self._policy.audit, {"time": utc(self._ports.wall()), "step": step, **about})

    # -- what is told --------------------------------------------------------------------------------------

    def _tell_steps(self, before: Roll, after: Roll) -> None:
        was = {each.unit: each for each in before.units}
        for each in after.units:
            if each.phase is not was[each.unit].phase:
                way = "back, " if each.back else ""
                why = f": {each.reason}" if each.phase is Phase.FAILED or each.back else ""
                kind: ActionKind = "roll_failed" if each.phase is Phase.FAILED else "roll"
                self._tell(kind, f"roll {after.id}: {way}{each.phase.value}{why}", each.unit)
        if after.status is not before.status:
            self._tell("roll", f"roll {after.id} is {after.status.value}. {after.reason}".strip())

    def _tell(self, kind: ActionKind, detail: str, unit: str | None = None) -> None:
        self._ports.tell(Action(kind, "gate", unit, detail))


# Ties a roll to a control plane and its processes. The one place that knows them all.


LEAST_SLOWER = 0.5
COMPARED_WITH = 2
"""So many other units are asked the known prompt, if they have not answered it."""


def roll_units(plane: Plane, policy: RollPolicy, store: RollStore, run: Act) -> Roller:
    """Be ready to roll the units of `plane`; `run` carries out what the policy says."""
    board = plane.board

    def rows(watched: Collection[str]) -> Iterator[RollRow]:
        return _rows(plane, watched, store.clock_ms())

    def known() -> list[tuple[str, str]]:
        units = [(state.unit.name, state.unit.cell) for state in board]
        return sorted(units, key=_number, reverse=True) if policy.highest_first else units

    def waits(_now: float) -> str:
        if plane.is_stopping():
            return "the gate is stopping"
        return "the gate is in panic" if board.panic_at is not None else ""

    ports = RollPorts(
        plane.now,
        time.time,
        rows,
        known,
        waits,
        lambda unit: board.units.get(unit),
        plane.set_drain,
        partial(_act, plane, run),
        plan.record,
        partial(_ask_answer, plane),
        plane.events.add,
        lambda: f"{random.getrandbits(32):08x}",
    )
    roller = Roller(policy, store, ports)
    plane.ticker.looks.append(roller.tick)
    plane.on_fleet.append(lambda _fleet: roller.keep_out())
    return roller


async def _act(
    plane: Plane, run: Act, policy: RollPolicy, roll: Roll, each: UnitRoll, fence: int
) -> RecoveryReport:
    """Run the command of a unit."""
    action = policy.undo if each.back else policy.action
    if action is None:
        return RecoveryReport(RecoveryResult.FAILED, "no undo is configured; nothing was done")
    remedy = Remedy(policy.audit, action, timeout_s=policy.timeout_s)
    now, state = plane.now(), plane.board.units.get(each.unit)
    if state is None:
        return RecoveryReport(RecoveryResult.FAILED, "it is not there; nothing was done")
    about = incident(
        state,
        action_id=f"{roll.id}-{each.unit}{'-back' if each.back else ''}",
        attempt=1,
        down_at=now,
        remedy=remedy,
        now=now,
        wall=time.time(),
    )
    reason = f"roll {roll.id}{', back' if each.back else ''}"
    return await run(remedy, {**about, "reason": reason, "fence": fence})


def _ask_answer(plane: Plane, unit: str) -> None:
    """Ask a unit the known prompt, and some of its cell that have not answered, to compare with."""
    answers = plane.extras.get("answers")
    if answers is None:
        return
    asked = plane.board.units[unit]
    others = [state for state in _beside(plane.board, asked) if state.is_usable()]
    for state in (asked, *others[:COMPARED_WITH]):
        if state.answers is None:
            answers.ask_now(state)


def _number(unit: tuple[str, str]) -> int:
    """The number at the end of a unit's name: of its group in a set."""
    number = unit[0].rpartition("-")[2]
    return int(number) if number.isdigit() else 0


def _rows(plane: Plane, watched: Collection[str], clock_ms: int) -> Iterator[RollRow]:
    board, now = plane.board, plane.now()
    nobody_asks = not plane.settings.known_answer.every_s or "answers" not in plane.extras
    for state in board:
        row = _row(board, state, now, clock_ms)
        if state.unit.name in watched:
            row = _compared(board, state, row)
        yield row._replace(answered=row.answered or nobody_asks)


def _row(board: Board, state: UnitState, now: float, clock_ms: int) -> RollRow:
    case, remote_load = state.case, _remote_load(board, state)
    renewed_at = max(state.up_since, case.restarted[1] if case.restarted is not None else 0.0)
    return RollRow(
        state.unit.name,
        state.unit.cell,
        case.verdict,
        usable=state.is_usable(),
        in_flight=state.in_flight + remote_load.in_flight,
        renewed_ms=clock_ms - round(1000.0 * (now - renewed_at)) if renewed_at else 0,
        errors=max(state.costs.errors.share(now), remote_load.errors),
        degraded=max(state.outlier.degraded, remote_load.degraded),
        differs=state.has_odd_answers(),
        version=state.build.version,
        drained=state.drained or remote_load.drained,
    )


def _compared(board: Board, state: UnitState, row: RollRow) -> RollRow:
    """The row of a unit beside the others of its cell: its speed, and its answer to the known prompt."""
    others = _beside(board, state)
    slower = slower_than_cell(_gap_s(board, state), [_gap_s(board, other) for other in others])
    answered, differs = _known_answer(state, others)
    return row._replace(degraded=max(row.degraded, slower), answered=answered, differs=row.differs or differs)


def _beside(board: Board, state: UnitState) -> list[UnitState]:
    """The other units of its cell."""
    return [other for other in board if other.unit.cell == state.unit.cell and other is not state]


def _remote_load(board: Board, state: UnitState) -> RemoteLoad:
    return board.remote_load.get(state.unit.name, NO_REMOTE_LOAD)


def slower_than_cell(gap_s: float, others_s: Sequence[float]) -> float:
    """How much slower a unit is than the others of its cell, by the usual gap between tokens (0: unknown).

    A gate gives a slow unit no requests, and then no comparison at the same load says that it is slow. Gaps
    grow with the load, so half as fast is the least that counts.
    """
    known = [other_s for other_s in others_s if other_s]
    if not known or not gap_s:
        return 0.0
    slower = 1.0 - median(known) / gap_s
    return slower if slower >= LEAST_SLOWER else 0.0


def _known_answer(state: UnitState, others: Iterable[UnitState]) -> tuple[bool, bool]:
    """Whether there are answers to compare, of a unit since it was last gone and of `others`; and whether
    its answer is none that any of them could give, whatever their builds are.
    """
    if state.answers is None:
        return False, False
    known = [
        other.answers.latest
        for other in others
        if other.answers is not None and other.answers.question == state.answers.question
    ]
    return bool(known), is_implausible(state.answers.latest, known)


def _gap_s(board: Board, state: UnitState) -> float:
    return max(state.step_times.gap_s(0.5) or 0.0, _remote_load(board, state).itl_s)
