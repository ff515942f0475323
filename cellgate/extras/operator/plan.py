"""The nouns of recovery: incident, remedy, report.

In this order: `RecoveryResult`, `Acting`, `UnitRow`, `record`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import orjson

from cellgate.extras.operator.action_settings import Remedy
from cellgate.router.nouns import Verdict

Incident = Mapping[str, Any]
"""All that is known of a unit that is to be recovered, ready for JSON."""


class RecoveryResult(Enum):
    """How an attempt ended; label of `cellgate_recoveries_total`."""

    OK = "ok"
    FAILED = "failed"
    TIMEOUT = "timeout"
    FLOODED = "flooded"
    CANCELLED = "cancelled"
    """The unit came back, or the gate must not act any more, before anything was done."""
    CUT_OFF = "cut_off"
    """The gate ended while the command was running."""
    UNRECORDED = "unrecorded"
    """The audit log could not be written, so nothing was done."""
    REFUSED = "refused"
    """The orchestrator refused it, or has nothing that the unit is made of, so nothing was done."""
    RETRIED = "retried"
    """The engine's own fault tolerance has recovered the unit, so it was not restarted."""
    DRY_RUN = "dry_run"
    GAVE_UP = "gave_up"


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """The result of one attempt. `detail` is for people; `output` is the end of what was printed."""

    result: RecoveryResult
    detail: str
    output: str = ""


Act = Callable[[Remedy, Incident], Awaitable[RecoveryReport]]
"""Executes a remedy, within its `timeout_s`; raises only CancelledError."""
AuditRecord = Callable[[str, Mapping[str, Any]], Awaitable[None]]
"""Appends a line to the audit log at a path. Raises OSError when it is not on the disk."""


# Which gate acts. Of several gates that could recover the same unit, one at a time does.
#
# A gate stands for the cells that it could act for. One of the gates that stand for a cell acts for it, and
# claims each attempt before it begins. The others hear of the claim, and count it as if it were their own.


@dataclass(frozen=True, slots=True)
class Claim:
    """An attempt on a unit that a gate has begun. `id` is that of the audit log; the unit is given `rest_s`
    to come back, of which `age_s` are over.
    """

    unit: str
    cell: str
    gate: str
    id: str
    attempt: int
    rest_s: float
    age_s: float = 0.0


class NotActingError(Exception):
    """An attempt must not begin: another gate acts for the cell, or nobody knows which. Its text says why."""


class Acting(Protocol):
    """The agreement of gates on who acts."""

    @property
    def trouble(self) -> str:
        """Why no gate is known to act; empty: one is."""

    def stand_for(self, cells: Collection[str], /) -> None:
        """This gate could act for these cells now, and for no others."""

    def acts_for(self, cell: str, /) -> bool:
        """Whether this gate acts for the cell."""

    def news(self) -> list[Claim]:
        """The claims of other gates since the last call."""

    async def claim(self, claim: Claim, /) -> int:
        """Claim an attempt right before it begins. Returns its fencing token: a later one is larger,
        whichever gate has it. Raises NotActingError.
        """

    async def withdraw(self, claim: Claim, /) -> None:
        """A claimed attempt was not begun after all."""

    async def close(self) -> None:
        """Let another gate act, at once."""


class Alone:
    """A gate that shares nothing with others: it acts for all of its cells."""

    trouble = ""

    def stand_for(self, _cells: Collection[str]) -> None:
        """Nobody else does."""

    def acts_for(self, _cell: str) -> bool:
        """Always."""
        return True

    def news(self) -> list[Claim]:
        """None."""
        return []

    async def claim(self, _claim: Claim) -> int:
        """Always granted; there is nothing to compare the token with."""
        return 0

    async def withdraw(self, _claim: Claim) -> None:
        """Nobody has heard of it."""

    async def close(self) -> None:
        """Nobody waits for it."""


class Undecided(Alone):
    """A gate that is to agree with others and cannot ask them: none acts."""

    def __init__(self, trouble: str) -> None:
        self.trouble = trouble

    def acts_for(self, _cell: str) -> bool:
        """Never."""
        return False


# Decides which units to recover now. Pure: from remembered and observed state and the time to actions.
#
# 1. Only units that are DOWN are recovered, and none that is drained, on hold, or being replaced by its
# orchestrator.
# 2. The clock of a unit runs only while the gate may act: after panic, a lost network or a drain it
# restarts.
# 3. At any time no more units of a cell are being recovered than its remedy has room for.
# 4. A gate begins nothing in a cell for which another gate acts, but remembers the attempts of that gate.
# 5. A unit that has not been UP since its processes started may still be starting, and one that shares its
#    fate with all others under a switch may be well: each gets the time of a backoff first.


class UnitRow(NamedTuple):
    """What is seen of one unit. `since`: when it came to its verdict; `up_since`, `born_at`: when it last
    came up, and when its processes last restarted, as far as was seen; `in_hand`: its orchestrator says
    that it goes, or does not run yet, or its engine stands still on purpose; `has_common_cause`: it is DOWN
    with     all others under a switch, a rack or a zone.
    """

    unit: str
    cell: str
    verdict: Verdict
    since: float
    up_since: float = 0.0
    born_at: float = 0.0
    drained: bool = False
    in_hand: bool = False
    has_common_cause: bool = False

    @property
    def is_new(self) -> bool:
        """Whether it has not been UP since its processes started."""
        return self.up_since <= self.born_at


@dataclass(frozen=True, slots=True)
class RecoveryState:
    """What is remembered of one unit.

    `down_at`: since when it has been DOWN without having been UP or restarted; `up_at`: since when UP;
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
    abort: tuple[str, ...] = ()
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
    begin, abort = [], []
    held = tuple(row.unit for row in sick if row.cell not in acting)
    ours = [row for row in sick if row.cell in acting]
    due = [row.unit for row in ours if _is_due(after[row.unit], row, remedies[row.cell], now)]
    for unit in sorted(due, key=lambda unit: (after[unit].down_at or 0.0, unit)):
        state, remedy = after[unit], remedies[after[unit].cell]
        if state.tries >= remedy.attempts:
            abort.append(unit)
            after[unit] = replace(state, gave_up=True, is_awaited=False)
        elif remedy.has_room(_busy_beside(unit, after), sum(row.cell == state.cell for row in wards)):
            begin.append(unit)
            after[unit] = replace(state, is_running=True, is_awaited=True, tries=state.tries + 1)
    return RecoveryPlan(after, tuple(begin), tuple(abort), held)


def ended(state: RecoveryState, remedy: Remedy, now: float, result: RecoveryResult) -> RecoveryState:
    """An attempt is over. One without any effect does not count; one that was refused is made again after the
    time of a backoff.
    """
    if result in (RecoveryResult.CANCELLED, RecoveryResult.REFUSED):
        rest_until = now + remedy.patience_s(0) if result is RecoveryResult.REFUSED else state.rest_until
        tries = max(0, state.tries - 1)
        return replace(state, is_running=False, is_awaited=False, tries=tries, rest_until=rest_until)
    return replace(state, is_running=False, rest_until=now + remedy.patience_s(state.tries))


def received(state: RecoveryState | None, claim: Claim, now: float) -> RecoveryState:
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
        case Verdict.DOWN if state.down_at is None or state.down_at < max(row.up_since, row.born_at):
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
    patience_s = remedy.patience_s(0) if row.is_new or row.has_common_cause else remedy.after_s
    return state.down_at is not None and now - state.down_at >= patience_s and now >= state.rest_until


def _busy_beside(unit: str, states: RecoveryStates) -> int:
    """How many other units of its cell are being recovered."""
    cell = states[unit].cell
    return sum(state.is_busy and state.cell == cell for name, state in states.items() if name != unit)


def _held(state: RecoveryState, now: float) -> RecoveryState:
    return state if state.down_at is None else replace(state, down_at=now)


# The audit log: a line of JSON for each step of recovery, written to disk before recovery continues.
#
# Written by a separate thread, since a disk may be slow; a daemon thread, so that a blocked disk does not
# keep the gate from ending.


WRITE_S = 10.0
"""A write that takes longer counts as failed."""


async def record(path: str, entry: Mapping[str, Any]) -> None:
    """Append `entry` to the log at `path`. Raises OSError when it is not on the disk in time."""
    loop = asyncio.get_running_loop()
    written: asyncio.Future[None] = loop.create_future()
    line = orjson.dumps(entry) + b"\n"
    threading.Thread(target=_write, args=(loop, written, path, line), name="audit", daemon=True).start()
    try:
        async with asyncio.timeout(WRITE_S):
            await written
    except TimeoutError:
        raise OSError(None, f"not written within {WRITE_S:g} s", path) from None


def _write(loop: asyncio.AbstractEventLoop, written: asyncio.Future[None], path: str, line: bytes) -> None:
    error: OSError | None = None
    try:
        append(path, line)
    except OSError as failed:
        error = failed

    def tell() -> None:
        if written.done():
            return
        if error is None:
            written.set_result(None)
        else:
            written.set_exception(error)

    # The loop may have ended meanwhile.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(tell)


def append(path: str, line: bytes) -> None:
    """Append and flush one line, whole. Raises OSError."""
    is_new = not Path(path).exists()
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        # In one call, so that lines of several gates do not mix.
        if os.write(fd, line) < len(line):
            raise OSError(None, "the disk took only a part of a line", path)
        os.fsync(fd)
    finally:
        os.close(fd)
    if is_new:
        _sync_folder(Path(path).parent)


def _sync_folder(folder: Path) -> None:
    """A new file is durable only once its directory entry is."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
