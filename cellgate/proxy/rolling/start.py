"""Ties a roll to a control plane and its processes. The one place that knows them all."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from cellgate.proxy.config.remedy import Remedy
from cellgate.proxy.config.roll_policy import RollPolicy
from cellgate.proxy.recovery import audit
from cellgate.proxy.recovery.incident import incident
from cellgate.proxy.recovery.nouns import Act, RecoveryReport, RecoveryResult
from cellgate.proxy.rolling.nouns import Roll, RollRow, UnitRoll
from cellgate.proxy.rolling.roller import Roller, RollPorts
from cellgate.proxy.rolling.shared import RollStore
from cellgate.router.board import Board
from cellgate.router.known_answers import is_implausible
from cellgate.router.other_gates import NOTHING_ELSEWHERE, Elsewhere
from cellgate.router.unit_state import UnitState

LEAST_SLOWER = 0.5
COMPARED_WITH = 2
"""So many other units are asked the known prompt, if they have not answered it."""

if TYPE_CHECKING:
    from cellgate.proxy.control.plane import Plane


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
        audit.record,
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
    asked = plane.board.units[unit]
    others = [state for state in _beside(plane.board, asked) if state.is_usable()]
    for state in (asked, *others[:COMPARED_WITH]):
        if state.answers is None:
            plane.answer_check.ask_now(state)


def _number(unit: tuple[str, str]) -> int:
    """The number at the end of a unit's name: of its group in a set."""
    number = unit[0].rpartition("-")[2]
    return int(number) if number.isdigit() else 0


def _rows(plane: Plane, watched: Collection[str], clock_ms: int) -> Iterator[RollRow]:
    board, now = plane.board, plane.now()
    nobody_asks = not plane.settings.known_answer.every_s
    for state in board:
        row = _row(board, state, now, clock_ms)
        if state.unit.name in watched:
            row = _compared(board, state, row)
        yield row._replace(answered=row.answered or nobody_asks)


def _row(board: Board, state: UnitState, now: float, clock_ms: int) -> RollRow:
    case, elsewhere = state.case, _elsewhere(board, state)
    renewed_at = max(state.risen_at, case.reborn[1] if case.reborn is not None else 0.0)
    return RollRow(
        state.unit.name,
        state.unit.cell,
        case.verdict,
        usable=state.is_usable(),
        in_flight=state.in_flight + elsewhere.in_flight,
        renewed_ms=clock_ms - round(1000.0 * (now - renewed_at)) if renewed_at else 0,
        errors=max(state.costs.errors.share(now), elsewhere.errors),
        degraded=max(state.outlier.degraded, elsewhere.degraded),
        differs=state.has_odd_answers(),
        version=state.build.version,
        drained=state.drained or elsewhere.drained,
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


def _elsewhere(board: Board, state: UnitState) -> Elsewhere:
    return board.elsewhere.get(state.unit.name, NOTHING_ELSEWHERE)


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
    return max(state.step_times.gap_s(0.5) or 0.0, _elsewhere(board, state).itl_s)
