"""Decides which units to recover now. Pure: from remembered and observed state and the time to actions.

1. Only units that are DOWN are recovered, and none that is drained, on hold, or being replaced by its
   orchestrator.
2. The clock of a unit runs only while the gate may act: after panic, a lost network or a drain it restarts.
3. At any time no more units of a cell are being recovered than its remedy has room for.
4. A gate begins nothing in a cell for which another gate acts, but remembers the attempts of that gate.
5. A unit that has not been UP since its processes started may still be starting, and one that shares its fate
   with all others under a switch may be well: each gets the time of a backoff first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from cellgate.proxy.config.remedy import Remedy
from cellgate.proxy.recovery.acting import Claim
from cellgate.proxy.recovery.nouns import RecoveryResult
from cellgate.router.nouns import Verdict


class UnitRow(NamedTuple):
    """What is seen of one unit. `since`: when it came to its verdict; `risen_at`, `born_at`: when it last
    came up, and when its processes last started anew, as far as was seen; `in_hand`: its orchestrator says
    that it goes, or does not run yet, or its engine stands still on purpose; `shares_fate`: it is DOWN with
    all others under a switch, a rack or a zone.
    """

    unit: str
    cell: str
    verdict: Verdict
    since: float
    risen_at: float = 0.0
    born_at: float = 0.0
    drained: bool = False
    in_hand: bool = False
    shares_fate: bool = False

    @property
    def is_new(self) -> bool:
        """Whether it has not been UP since its processes started."""
        return self.risen_at <= self.born_at


@dataclass(frozen=True, slots=True)
class RecoveryState:
    """What is remembered of one unit.

    `down_at`: since when it has been DOWN without having been UP or started anew; `up_at`: since when UP;
    `rest_until`: no attempt before; `is_running`: an attempt is running; `is_awaited`: there was one, and the
    unit has not come back yet.
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


RecoveryStates = Mapping[str, RecoveryState]


class RecoveryPlan(NamedTuple):
    """The state to remember; units to recover now, to give up, and those that must wait, because the gate may
    not act or because another does.
    """

    states: dict[str, RecoveryState]
    begin: tuple[str, ...] = ()
    give_up: tuple[str, ...] = ()
    held: tuple[str, ...] = ()


def plan_recovery(
    states: RecoveryStates,
    rows: Iterable[UnitRow],
    remedies: Mapping[str, Remedy],
    now: float,
    *,
    may_act: bool,
    acting: Collection[str],
) -> RecoveryPlan:
    """The plan for all units of cells with a remedy. `acting`: the cells for which this gate acts."""
    wards = [row for row in rows if row.cell in remedies]
    after = {row.unit: _seen(states.get(row.unit), row, remedies[row.cell], now) for row in wards}
    sick = [row for row in wards if _is_sick(after[row.unit], row)]
    gone = {unit: state for unit, state in states.items() if unit not in after}
    after |= {unit: state for unit, state in gone.items() if _may_return(state, remedies, now)}
    if not may_act:
        held = tuple(row.unit for row in sick)
        return RecoveryPlan({unit: _held(state, now) for unit, state in after.items()}, held=held)
    begin, give_up = [], []
    held = tuple(row.unit for row in sick if row.cell not in acting)
    ours = [row for row in sick if row.cell in acting]
    due = [row.unit for row in ours if _is_due(after[row.unit], row, remedies[row.cell], now)]
    for unit in sorted(due, key=lambda unit: (after[unit].down_at or 0.0, unit)):
        state, remedy = after[unit], remedies[after[unit].cell]
        if state.tries >= remedy.attempts:
            give_up.append(unit)
            after[unit] = replace(state, gave_up=True, is_awaited=False)
        elif remedy.has_room(_busy_beside(unit, after), sum(row.cell == state.cell for row in wards)):
            begin.append(unit)
            after[unit] = replace(state, is_running=True, is_awaited=True, tries=state.tries + 1)
    return RecoveryPlan(after, tuple(begin), tuple(give_up), held)


def ended(state: RecoveryState, remedy: Remedy, now: float, result: RecoveryResult) -> RecoveryState:
    """An attempt is over. One without any effect does not count; one that was refused is made again after the
    time of a backoff.
    """
    if result in (RecoveryResult.CANCELLED, RecoveryResult.REFUSED):
        rest_until = now + remedy.patience_s(0) if result is RecoveryResult.REFUSED else state.rest_until
        tries = max(0, state.tries - 1)
        return replace(state, is_running=False, is_awaited=False, tries=tries, rest_until=rest_until)
    return replace(state, is_running=False, rest_until=now + remedy.patience_s(state.tries))


def heard(state: RecoveryState | None, claim: Claim, now: float) -> RecoveryState:
    """Another gate has begun an attempt: it counts here, and the unit is given the same time. One that
    nothing has followed for as long again is over.
    """
    state = state or RecoveryState(claim.cell)
    if claim.age_s > 2.0 * claim.rest_s:
        return state
    rest_until = max(state.rest_until, now - claim.age_s + claim.rest_s)
    tries = max(state.tries, claim.attempt)
    return replace(state, tries=tries, rest_until=rest_until, is_awaited=True)


def _seen(state: RecoveryState | None, row: UnitRow, remedy: Remedy, now: float) -> RecoveryState:
    """The state after an observation of its unit."""
    state = state or RecoveryState(row.cell)
    if row.drained:
        # The operator has taken over; earlier attempts do not count afterwards.
        return RecoveryState(row.cell, down_at=now, is_running=state.is_running)
    if row.in_hand:
        return replace(state, down_at=now, up_at=None)
    match row.verdict:
        case Verdict.UP:
            return _up(state, row, remedy, now)
        case Verdict.STARTING:
            return replace(state, down_at=None, up_at=None)
        case Verdict.DOWN if state.down_at is None or state.down_at < max(row.risen_at, row.born_at):
            return replace(state, down_at=row.since, up_at=None)
        case _:
            return state


def _up(state: RecoveryState, row: UnitRow, remedy: Remedy, now: float) -> RecoveryState:
    """It came back. Attempts are forgotten once it has stayed UP for as long as it is given to come back, so
    that a unit that fails again and again is not restarted for ever.
    """
    up_at = row.since if state.up_at is None else state.up_at
    if now - up_at >= remedy.patience_s(state.tries):
        return RecoveryState(row.cell, up_at=up_at, is_running=state.is_running)
    return replace(state, down_at=None, up_at=up_at, is_awaited=False)


def _may_return(state: RecoveryState, remedies: Mapping[str, Remedy], now: float) -> bool:
    """Whether a unit that is not in the fleet is remembered: a discovered unit disappears while it is
    recreated, and comes back under the same name.
    """
    remedy = remedies.get(state.cell)
    is_awaited = remedy is not None and state.tries and now < state.rest_until + remedy.backoff_s
    return state.is_running or bool(is_awaited)


def _is_sick(state: RecoveryState, row: UnitRow) -> bool:
    """Whether the unit needs recovery sooner or later."""
    left_alone = row.drained or row.in_hand or state.is_running or state.gave_up
    return row.verdict is Verdict.DOWN and not left_alone


def _is_due(state: RecoveryState, row: UnitRow, remedy: Remedy, now: float) -> bool:
    patience_s = remedy.patience_s(0) if row.is_new or row.shares_fate else remedy.after_s
    return state.down_at is not None and now - state.down_at >= patience_s and now >= state.rest_until


def _busy_beside(unit: str, states: RecoveryStates) -> int:
    """How many other units of its cell are being recovered."""
    cell = states[unit].cell
    return sum(state.is_busy and state.cell == cell for name, state in states.items() if name != unit)


def _held(state: RecoveryState, now: float) -> RecoveryState:
    return state if state.down_at is None else replace(state, down_at=now)
