"""Recovery: does what the planner decides, one task for each attempt, and tells everyone of it.

1. Nothing is done that is not in the audit log first; whoever cannot write it does nothing.
2. Right before the deed it looks once more: a unit that came back, or a gate that may not act, cancels it.
3. Time, the deed and the log are handed in, so that a simulated world can replace them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict, dataclass
from typing import Any

from cellgate.proxy.config.remedy import Remedy
from cellgate.proxy.config.sources import SOURCES
from cellgate.proxy.logs.events import Action, ActionKind
from cellgate.proxy.logs.text import utc
from cellgate.proxy.recovery.incident import dossier
from cellgate.proxy.recovery.nouns import Act, Dossier, Record, Report, Result
from cellgate.proxy.recovery.planner import Course, Row, ended, plan
from cellgate.router.board import Board
from cellgate.router.nouns import Verdict
from cellgate.router.unit_state import Desk

PERIOD_S = 1.0

Counts = MutableMapping[tuple[str, str], int]
"""How many attempts ended, by cell and result."""


@dataclass(frozen=True, slots=True)
class Ports:
    """How recovery reaches the world. `waits` says why nothing may be done now (empty: it may be)."""

    now: Callable[[], float]
    wall: Callable[[], float]
    waits: Callable[[float], str]
    act: Act
    record: Record
    tell: Callable[[Action], None]


class Recovery:
    """Recovers the units of a board, by the remedies of their cells. To be ticked."""

    def __init__(
        self, board: Board, remedies: Mapping[str, Remedy], ports: Ports, rng: random.Random, counts: Counts
    ) -> None:
        self.courses: dict[str, Course] = {}
        self._board = board
        self._ports = ports
        self._rng = rng
        self._counts = counts
        self._due = 0.0
        self._told_of_waiting = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_over = False
        """Nothing is begun any more."""
        self.configure(remedies)

    def configure(self, remedies: Mapping[str, Remedy]) -> None:
        """Go by other remedies from now on; what is under way ends by the old ones."""
        self._remedies = dict(remedies)
        for cell in remedies:
            for result in Result:
                self._counts.setdefault((cell, result.value), 0)

    def tick(self, now: float) -> None:
        """Look at all units; to be called more often than each second."""
        if now < self._due or not self._remedies:
            return
        self._due = now + PERIOD_S
        waits = self._waits(now)
        decided = plan(self.courses, self._rows(), self._remedies, now, may_act=not waits)
        self.courses = decided.courses
        self._tell_of_waiting(waits, decided.held)
        for units, deed in ((decided.give_up, self._give_up), (decided.begin, self._recover)):
            for unit in units:
                course = self.courses[unit]
                remedy = self._remedies[course.cell]
                task = asyncio.create_task(deed(course, remedy, self._dossier(unit, course, remedy)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def hand_over(self) -> dict[str, Any]:
        """Begin nothing more, and say what is remembered of each unit, ready for JSON."""
        self.is_over = True
        return {unit: asdict(course) for unit, course in self.courses.items()}

    def go_on(self) -> None:
        """There is no successor after all."""
        self.is_over = False

    def take_over(self, known: Mapping[str, Any]) -> None:
        """Remember what another gate did, which ends by itself what it has begun."""
        now = self._ports.now()
        for unit, fields in known.items():
            course = Course(**fields)
            if (remedy := self._remedies.get(course.cell)) is not None:
                is_over = not course.is_running
                self.courses[unit] = course if is_over else ended(course, remedy, now, cancelled=False)

    async def close(self) -> None:
        """Begin nothing more; what is running is ended, and recorded as that."""
        self.is_over = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- one attempt ---------------------------------------------------------------------------------------

    async def _recover(self, course: Course, remedy: Remedy, about: Dossier) -> None:
        unit, begun_at = about["unit"], self._ports.now()
        try:
            report = await self._attempt(unit, remedy, about)
        except asyncio.CancelledError:
            report = Report(Result.CUT_OFF, "the gate ended while it was running")
        except Exception as error:
            report = Report(Result.FAILED, f"the gate's own fault: {error!r}")
        took_s = round(self._ports.now() - begun_at, 3)
        cancelled = report.result is Result.CANCELLED
        self.courses[unit] = ended(self.courses[unit], remedy, self._ports.now(), cancelled=cancelled)
        self._count(course.cell, report.result)
        self._tell_of_end(unit, course, remedy, report)
        outcome = {"result": report.result.value, "detail": report.detail, "took_s": took_s}
        await self._record_end(remedy, self._entry("end", about) | outcome | {"output": report.output})

    async def _attempt(self, unit: str, remedy: Remedy, about: Dossier) -> Report:
        deed = {"command": list(remedy.command)} if remedy.command else {"webhook": remedy.webhook}
        try:
            await self._ports.record(remedy.audit, self._entry("begin", about) | deed | {"case": about})
        except OSError as error:
            return Report(Result.UNRECORDED, f"{remedy.audit}: {error.strerror or error}; nothing was done")
        if why := self._second_thoughts(unit):
            return Report(Result.CANCELLED, f"{why}; nothing was done")
        what = " ".join(remedy.command) or remedy.webhook
        nodes = ", ".join(node["name"] for node in about["nodes"])
        what += f" for nodes {nodes}; attempt {about['attempt']} of {about['attempts']}, DOWN for "
        self._tell("recovery", unit, f"{what}{about['down_s']:.0f} s: {about['reason']}")
        if remedy.dry_run:
            return Report(Result.DRY_RUN, "dry_run: nothing was done")
        return await self._ports.act(remedy, about)

    async def _give_up(self, course: Course, remedy: Remedy, about: Dossier) -> None:
        self._count(course.cell, Result.GAVE_UP)
        detail = f"still DOWN after {course.tries} attempts; nothing more is done until it has been UP for a "
        detail += "while, or was drained and undrained: look at it yourself"
        self._tell("recovery_gave_up", about["unit"], detail)
        outcome = {"result": Result.GAVE_UP.value, "detail": detail, "case": about}
        await self._record_end(remedy, self._entry("end", about) | outcome)

    async def _record_end(self, remedy: Remedy, entry: dict[str, Any]) -> None:
        try:
            await self._ports.record(remedy.audit, entry)
        except OSError as error:
            self._tell("recovery_unrecorded", entry["unit"], f"{remedy.audit}: {error.strerror or error}")

    def _second_thoughts(self, unit: str) -> str:
        """Why an attempt that was decided is not to be made after all."""
        desk = self._board.desks.get(unit)
        if desk is None:
            return "the unit left the configuration"
        if desk.drained:
            return "the unit was drained"
        if _is_in_hand(desk):
            return "the unit is in the hands of its orchestrator"
        if desk.case.verdict is not Verdict.DOWN:
            return f"the unit is {desk.case.verdict.value}"
        return self._waits(self._ports.now())

    # -- what is seen --------------------------------------------------------------------------------------

    def _waits(self, now: float) -> str:
        return "the gate hands over" if self.is_over else self._ports.waits(now)

    def _rows(self) -> list[Row]:
        return [_row(desk) for desk in self._board]

    def _dossier(self, unit: str, course: Course, remedy: Remedy) -> Dossier:
        now = self._ports.now()
        return dossier(
            self._board.desks[unit],
            action_id=f"{unit}-{self._rng.getrandbits(48):012x}",
            attempt=course.tries,
            down_at=course.down_at if course.down_at is not None else now,
            remedy=remedy,
            now=now,
            wall=self._ports.wall(),
        )

    def _entry(self, step: str, about: Dossier) -> dict[str, Any]:
        same = {key: about[key] for key in ("id", "unit", "cell", "attempt")}
        return {"time": utc(self._ports.wall()), "step": step} | same

    # -- what is told --------------------------------------------------------------------------------------

    def _tell_of_end(self, unit: str, course: Course, remedy: Remedy, report: Report) -> None:
        went_well = report.result in (Result.OK, Result.DRY_RUN, Result.CANCELLED)
        kind: ActionKind = "recovery_done" if went_well else "recovery_failed"
        is_awaited = report.result is not Result.CANCELLED
        wait = f"; it is given {remedy.patience_s(course.tries):g} s to come back" if is_awaited else ""
        self._tell(kind, unit, report.detail + wait)

    def _tell_of_waiting(self, waits: str, held: tuple[str, ...]) -> None:
        if held and waits and not self._told_of_waiting and not self.is_over:
            self._tell("recovery_held", None, f"{waits}; nothing is done about {', '.join(held)}")
        self._told_of_waiting = bool(waits) and (self._told_of_waiting or bool(held))

    def _tell(self, kind: ActionKind, unit: str | None, detail: str) -> None:
        self._ports.tell(Action(kind, "gate", unit, detail))

    def _count(self, cell: str, result: Result) -> None:
        key = (cell, result.value)
        self._counts[key] = self._counts.get(key, 0) + 1


def _row(desk: Desk) -> Row:
    case = desk.case
    return Row(
        desk.unit.name,
        desk.unit.cell,
        case.verdict,
        case.since,
        desk.risen_at,
        born_at=case.reborn[1] if case.reborn is not None else 0.0,
        drained=desk.drained,
        in_hand=_is_in_hand(desk),
    )


def _is_in_hand(desk: Desk) -> bool:
    """Whether a source of units says that it goes, or that a node of it does not run."""
    return any(source in SOURCES for _, source in desk.case.faults)
