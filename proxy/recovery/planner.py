"""Decides which units are to be recovered now. Pure: what is remembered and seen, and now, to what to begin.

1. Only a unit that is DOWN is acted upon, and none that is drained or in the hands of its orchestrator.
2. Its clock runs only while the gate may act: after panic, a lost network or a drain, patience begins anew.
3. At any time no more units of a cell are being recovered than its remedy has room for.
4. A unit that this gate has not seen UP since its processes started may still be starting: it is given the
   time of a backoff first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from cellgate.proxy.config.remedy import Remedy
from cellgate.router.nouns import Verdict


class Row(NamedTuple):
    """What is seen of one unit. `since`: when it came to its verdict; `risen_at`, `born_at`: when it last
    came up, and when its processes last started anew, as far as was seen; `in_hand`: its orchestrator says
    that it goes, or does not run yet.
    """

    unit: str
    cell: str
    verdict: Verdict
    since: float
    risen_at: float = 0.0
    born_at: float = 0.0
    drained: bool = False
    in_hand: bool = False

    @property
    def is_new(self) -> bool:
        """Whether it has yet to be seen UP since its processes started."""
        return self.risen_at <= self.born_at


@dataclass(frozen=True, slots=True)
class Course:
    """What is remembered of one unit.

    `down_at`: since when it has been DOWN without having been UP or started anew; `up_at`: since when UP;
    `rest_until`: no attempt before; `is_running`: an attempt is under way; `is_awaited`: there was one, and
    the unit has yet to come back.
    """

    cell: str
    down_at: float | None = None
    up_at: float | None = None
    tries: int = 0
    rest_until: float = 0.0
    is_running: bool = False
    is_awaited: bool = False
    gave_up: bool = False

    @property
    def is_busy(self) -> bool:
        """Whether it counts as being recovered."""
        return self.is_running or self.is_awaited


Courses = Mapping[str, Course]


class Plan(NamedTuple):
    """What is remembered from now on; units to begin with, to give up, and those held meanwhile."""

    courses: dict[str, Course]
    begin: tuple[str, ...] = ()
    give_up: tuple[str, ...] = ()
    held: tuple[str, ...] = ()


def plan(
    courses: Courses, rows: Iterable[Row], remedies: Mapping[str, Remedy], now: float, *, may_act: bool
) -> Plan:
    """What to do now for all units of the cells that have a remedy."""
    wards = [row for row in rows if row.cell in remedies]
    after = {row.unit: _seen(courses.get(row.unit), row, remedies[row.cell], now) for row in wards}
    sick = [row for row in wards if _is_sick(after[row.unit], row)]
    gone = {unit: course for unit, course in courses.items() if unit not in after}
    after |= {unit: course for unit, course in gone.items() if _may_return(course, remedies, now)}
    if not may_act:
        held = tuple(row.unit for row in sick)
        return Plan({unit: _held(course, now) for unit, course in after.items()}, held=held)
    begin, give_up = [], []
    due = [row.unit for row in sick if _is_due(after[row.unit], row, remedies[row.cell], now)]
    for unit in sorted(due, key=lambda unit: (after[unit].down_at or 0.0, unit)):
        course, remedy = after[unit], remedies[after[unit].cell]
        if course.tries >= remedy.attempts:
            give_up.append(unit)
            after[unit] = replace(course, gave_up=True, is_awaited=False)
        elif remedy.has_room(_busy_beside(unit, after), sum(row.cell == course.cell for row in wards)):
            begin.append(unit)
            after[unit] = replace(course, is_running=True, is_awaited=True, tries=course.tries + 1)
    return Plan(after, tuple(begin), tuple(give_up))


def ended(course: Course, remedy: Remedy, now: float, *, cancelled: bool) -> Course:
    """An attempt is over. One that was cancelled before anything was done counts for nothing."""
    if cancelled:
        return replace(course, is_running=False, is_awaited=False, tries=max(0, course.tries - 1))
    return replace(course, is_running=False, rest_until=now + remedy.patience_s(course.tries))


def _seen(course: Course | None, row: Row, remedy: Remedy, now: float) -> Course:
    """The course after a look at its unit."""
    course = course or Course(row.cell)
    if row.drained:
        # The operator has taken over; what was tried before does not count afterwards.
        return Course(row.cell, down_at=now, is_running=course.is_running)
    if row.in_hand:
        return replace(course, down_at=now, up_at=None)
    match row.verdict:
        case Verdict.UP:
            return _up(course, row, remedy, now)
        case Verdict.STARTING:
            return replace(course, down_at=None, up_at=None)
        case Verdict.DOWN if course.down_at is None or course.down_at < max(row.risen_at, row.born_at):
            return replace(course, down_at=row.since, up_at=None)
        case _:
            return course


def _up(course: Course, row: Row, remedy: Remedy, now: float) -> Course:
    """It came back. What was tried is forgotten once it has stayed for as long as it is given to come back,
    so that one that falls again and again is not restarted for ever.
    """
    up_at = row.since if course.up_at is None else course.up_at
    if now - up_at >= remedy.patience_s(course.tries):
        return Course(row.cell, up_at=up_at, is_running=course.is_running)
    return replace(course, down_at=None, up_at=up_at, is_awaited=False)


def _may_return(course: Course, remedies: Mapping[str, Remedy], now: float) -> bool:
    """Whether a unit that is not there (any more) is remembered: one that is discovered goes while it is made
    anew, and comes back under its name.
    """
    remedy = remedies.get(course.cell)
    is_awaited = remedy is not None and course.tries and now < course.rest_until + remedy.backoff_s
    return course.is_running or bool(is_awaited)


def _is_sick(course: Course, row: Row) -> bool:
    """Whether something is to be done about a unit sooner or later."""
    left_alone = row.drained or row.in_hand or course.is_running or course.gave_up
    return row.verdict is Verdict.DOWN and not left_alone


def _is_due(course: Course, row: Row, remedy: Remedy, now: float) -> bool:
    patience_s = remedy.patience_s(0) if row.is_new else remedy.after_s
    return course.down_at is not None and now - course.down_at >= patience_s and now >= course.rest_until


def _busy_beside(unit: str, courses: Courses) -> int:
    """How many other units of its cell are being recovered."""
    cell = courses[unit].cell
    return sum(course.is_busy and course.cell == cell for name, course in courses.items() if name != unit)


def _held(course: Course, now: float) -> Course:
    return course if course.down_at is None else replace(course, down_at=now)
