"""Decides the next step of a roll. Pure: from the roll, what is seen of units, and the time, to a new roll.

1. A cell is begun when the one before it is done; in it, `parallel` units at one time.
2. No unit is begun when that would leave more than `max_unavailable` units out of rotation, whatever took the
   others out.
3. A unit is drained, gets its command, must come up and answer right, and is then watched with requests.
4. A unit that fails stops the roll: no other is begun. It gets the old software back, if there is a way to.
5. A command is run by the gate that wrote that it begins, and by no other. When that gate is gone, the unit
   itself has to prove what came of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from cellgate.proxy.config.roll_policy import RollPolicy
from cellgate.proxy.rolling.nouns import (
    ACTIVE,
    OVER,
    CommandEnd,
    Phase,
    Roll,
    RollRow,
    RollStatus,
    UnitRoll,
    cells_of,
)
from cellgate.router.nouns import Verdict

DRAIN_LEAST_MS = 2000
"""By then every gate has drained the unit, and tells how many requests it has there."""
ANSWER_MS = 10_000
"""For so long a unit that is up has time to answer the known prompt; other probes tell whether it lives."""
COMMAND_GRACE_MS = 5000
"""After its timeout a command has ended, whichever gate ran it."""


class RollStep(NamedTuple):
    """The roll as it is to be written down, and the units whose command begins after that."""

    roll: Roll
    act: tuple[UnitRoll, ...]


@dataclass(frozen=True, slots=True)
class _Moment:
    roll: Roll
    policy: RollPolicy
    row: RollRow | None
    end: CommandEnd | None
    now_ms: int


def advance(
    roll: Roll,
    policy: RollPolicy,
    rows: Iterable[RollRow],
    ends: Mapping[str, CommandEnd],
    now_ms: int,
) -> RollStep:
    """The next step of a roll. `ends`: commands of this gate that have ended, by unit."""
    seen = {row.unit: row for row in rows}
    moved = []
    for each in roll.units:
        moment = _Moment(roll, policy, seen.get(each.unit), ends.get(each.unit), now_ms)
        after = _NEXT[each.phase](each, moment) if each.phase in _NEXT else each
        moved.append(after if after.phase is each.phase else replace(after, since_ms=now_ms))
    after_roll = _begun(_judged(replace(roll, units=tuple(moved)), policy, now_ms), policy, seen, now_ms)
    before = {each.unit: each for each in roll.units}
    act = (
        each
        for each in after_roll.units
        if each.phase is Phase.ACTING and before[each.unit].phase is not Phase.ACTING
    )
    return RollStep(after_roll, tuple(act))


def undone(roll: Roll, policy: RollPolicy, now_ms: int) -> Roll:
    """The roll turned round: units that have the new software get the old one back, the last one first unless
    their order is fixed.
    """
    units = []
    for each in roll.units if policy.highest_first else reversed(roll.units):
        if each.back or each.phase in (Phase.WAITING, Phase.SKIPPED):
            units.append(each if each.back else replace(each, phase=Phase.SKIPPED, since_ms=now_ms))
        else:
            phase = Phase.DRAINING if each.phase in ACTIVE or each.phase is Phase.FAILED else Phase.WAITING
            units.append(replace(each, phase=phase, back=True, since_ms=now_ms, acted_ms=0, reason="undone"))
    return replace(roll, units=tuple(units), status=RollStatus.RUNNING, reason="it is undone")


# -- one unit, by its phase --------------------------------------------------------------------------------


def _drained(each: UnitRoll, at: _Moment) -> UnitRoll:
    waited_ms = at.now_ms - each.since_ms
    is_empty = at.row is not None and at.row.in_flight == 0 and waited_ms >= DRAIN_LEAST_MS
    if is_empty or waited_ms >= 1000.0 * at.policy.drain_s:
        return replace(each, phase=Phase.ACTING, acted_ms=at.now_ms)
    return each


def _acted(each: UnitRoll, at: _Moment) -> UnitRoll:
    if at.end is not None and not at.end.ok:
        return replace(each, phase=Phase.FAILED, reason=f"its command failed: {at.end.detail}")
    is_gone = at.now_ms - each.since_ms >= 1000.0 * at.policy.timeout_s + COMMAND_GRACE_MS
    if at.end is None and not is_gone:
        return each
    return replace(each, phase=Phase.DONE if at.roll.dry_run else Phase.PROVING)


def _proven(each: UnitRoll, at: _Moment) -> UnitRoll:
    row = at.row
    if row is not None and row.verdict is Verdict.UP and row.renewed_ms > each.acted_ms:
        if why := _wrong(each, at, row):
            return replace(each, phase=Phase.FAILED, reason=why)
        if row.answered or at.now_ms - row.renewed_ms >= ANSWER_MS:
            return replace(each, phase=Phase.SOAKING)
        return each
    if at.now_ms - each.since_ms >= 1000.0 * at.policy.start_s:
        what = "it is not there" if row is None else f"it is {row.verdict.value}"
        if row is not None and row.verdict is Verdict.UP:
            what = "it has not restarted"
        return replace(each, phase=Phase.FAILED, reason=f"{what} {at.policy.start_s:g} s after its command")
    return each


def _soaked(each: UnitRoll, at: _Moment) -> UnitRoll:
    row = at.row
    if row is None or row.verdict is Verdict.DOWN:
        return replace(each, phase=Phase.FAILED, reason="it went DOWN while it was watched")
    if why := _wrong(each, at, row) or _poor(at.policy, row):
        return replace(each, phase=Phase.FAILED, reason=why)
    is_done = at.now_ms - each.since_ms >= 1000.0 * at.policy.soak_s
    return replace(each, phase=Phase.DONE) if is_done else each


def _wrong(each: UnitRoll, at: _Moment, row: RollRow) -> str:
    if row.differs:
        return "its answers to the known prompt differ from those of other units"
    expected = at.roll.version
    if expected and not each.back and row.version and row.version != expected:
        return f"it is version {row.version}, not {expected}"
    return ""


def _poor(policy: RollPolicy, row: RollRow) -> str:
    if row.errors > policy.max_errors:
        return f"{row.errors:.0%} of its requests failed, more than {policy.max_errors:.0%}"
    if row.degraded > policy.max_degraded:
        return f"it is {row.degraded:.0%} slower than its cell, more than {policy.max_degraded:.0%}"
    return ""


_NEXT: Mapping[Phase, Callable[[UnitRoll, _Moment], UnitRoll]] = {
    Phase.DRAINING: _drained,
    Phase.ACTING: _acted,
    Phase.PROVING: _proven,
    Phase.SOAKING: _soaked,
}


# -- the roll ----------------------------------------------------------------------------------------------


def _judged(roll: Roll, policy: RollPolicy, now_ms: int) -> Roll:
    """A unit that fails stops the roll, and gets the old software back."""
    new = [each for each in roll.units if each.phase is Phase.FAILED and each.since_ms == now_ms]
    if not new:
        return roll
    reason = "; ".join(f"unit {each.unit}: {each.reason}" for each in new)
    back = {each.unit for each in new if policy.undo and not each.back and not roll.dry_run}
    units = tuple(
        replace(each, phase=Phase.DRAINING, back=True, acted_ms=0) if each.unit in back else each
        for each in roll.units
    )
    return replace(roll, units=units, status=RollStatus.STOPPED, reason=reason)


def _begun(roll: Roll, policy: RollPolicy, seen: Mapping[str, RollRow], now_ms: int) -> Roll:
    """The roll with further units begun, as far as there is room."""
    if roll.status is not RollStatus.RUNNING:
        return roll
    left = [each for each in roll.units if each.phase not in OVER]
    if not left:
        return replace(roll, status=RollStatus.DONE, reason="")
    cell = cells_of(left)[0]
    active = sum(each.phase in ACTIVE for each in roll.units)
    # A unit that failed in the last roll may have been undrained since.
    away = {row.unit for row in seen.values() if not row.usable} | (roll.out() - roll.failed())
    begin, reason = set[str](), ""
    for each in left:
        if each.cell != cell or each.phase is not Phase.WAITING or active + len(begin) >= policy.parallel:
            continue
        if len(away | begin | {each.unit}) > policy.max_unavailable:
            others = ", ".join(sorted(away - {each.unit})) or "it"
            reason = (
                f"unit {each.unit} waits: {others} out of rotation, max_unavailable {policy.max_unavailable}"
            )
            break
        begin.add(each.unit)
    units = tuple(
        replace(each, phase=Phase.DRAINING, since_ms=now_ms, was_drained=_is_drained(seen.get(each.unit)))
        if each.unit in begin
        else each
        for each in roll.units
    )
    return replace(roll, units=units, reason=reason)


def _is_drained(row: RollRow | None) -> bool:
    return row is not None and row.drained
