"""The nouns of rolling: a roll, its units and their phases, and what is seen of a unit meanwhile.

In this order: `Roll`, `RollStep`, `_drained`, `_judged`, `Order`, `OwnRoll`, `roll_document`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, Literal, NamedTuple, Protocol, cast, get_args

import orjson

from cellgate.extras.operator.action_settings import RollPolicy
from cellgate.router.nouns import Verdict


class Phase(Enum):
    """Where a unit is in a roll."""

    WAITING = "waiting"
    DRAINING = "draining"
    ACTING = "acting"
    PROVING = "proving"
    """Its command has ended; it must come up again, and its answers must be right."""
    SOAKING = "soaking"
    """It has requests again, and is watched."""
    DONE = "done"
    FAILED = "failed"
    """It stays drained until an operator undrains it."""
    SKIPPED = "skipped"


OUT = (Phase.DRAINING, Phase.ACTING, Phase.PROVING, Phase.FAILED)
"""Phases in which every gate keeps the unit drained."""
ACTIVE = (Phase.DRAINING, Phase.ACTING, Phase.PROVING, Phase.SOAKING)
OVER = (Phase.DONE, Phase.FAILED, Phase.SKIPPED)


class RollStatus(Enum):
    """What is to be done about a roll."""

    RUNNING = "running"
    PAUSED = "paused"
    """No unit is begun; those that were begun go on to their end."""
    STOPPED = "stopped"
    """The same, for good: it failed, or an operator has stopped it. It may still be undone."""
    DONE = "done"


@dataclass(frozen=True, slots=True)
class UnitRoll:
    """One unit of a roll. `since_ms`: when it came to its phase; `acted_ms`: when its command began;
    `back`: it gets the old software; `was_drained`: an operator had drained it, at some gate, before the roll
    did. Times are of Redis's clock, or of this machine without Redis.
    """

    unit: str
    cell: str
    phase: Phase = Phase.WAITING
    since_ms: int = 0
    acted_ms: int = 0
    back: bool = False
    was_drained: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Roll:
    """A roll. `by` has asked for it; each unit must say that it is `version`, if that is given. `order` is
    the id of the last order that was carried out.
    """

    id: str
    by: str
    began_ms: int
    units: tuple[UnitRoll, ...]
    status: RollStatus = RollStatus.RUNNING
    reason: str = ""
    version: str = ""
    dry_run: bool = False
    order: str = ""

    def out(self) -> frozenset[str]:
        """The units that are out of rotation for it."""
        return frozenset(each.unit for each in self.units if each.phase in OUT)

    def failed(self) -> frozenset[str]:
        """The units that have failed."""
        return frozenset(each.unit for each in self.units if each.phase is Phase.FAILED)

    def is_over(self) -> bool:
        """Whether nothing more happens by itself."""
        is_quiet = not any(each.phase in ACTIVE for each in self.units)
        return self.status in (RollStatus.STOPPED, RollStatus.DONE) and is_quiet


class RollRow(NamedTuple):
    """What is seen of one unit. `in_flight`: of all gates; `renewed_ms`: when its processes last started or
    it last came up; `errors`: the share of its recent requests that failed; `degraded`: how much slower than
    its cell it is; `answered`: there are answers to the known prompt to compare, its own since then and
    another unit's, or nobody asks; `differs`: its answers to it are not those of others; `drained`: at some
    gate.
    """

    unit: str
    cell: str
    verdict: Verdict
    usable: bool
    in_flight: int = 0
    renewed_ms: int = 0
    errors: float = 0.0
    degraded: float = 0.0
    answered: bool = True
    differs: bool = False
    version: str = ""
    drained: bool = False


class CommandEnd(NamedTuple):
    """How a command ended."""

    ok: bool
    detail: str


def cells_of(units: Iterable[UnitRoll]) -> list[str]:
    """The cells, in the order of the units."""
    return list(dict.fromkeys(each.cell for each in units))


# Decides the next step of a roll. Pure: from the roll, what is seen of units, and the time, to a new roll.
#
# 1. A cell is begun when the one before it is done; in it, `parallel` units at one time.
# 2. No unit is begun when that would leave more than `max_unavailable` units out of rotation, whatever took
#    the others out.
# 3. A unit is drained, gets its command, must come up and answer right, and is then watched with requests.
# 4. A unit that fails stops the roll: no other is begun. It gets the old software back, if there is a way
# to.
# 5. A command is run by the gate that wrote that it begins, and by no other. When that gate is gone, the unit
#    itself has to prove what came of it.


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


# What an operator asks of a roll: start, pause, resume, stop, undo. Pure.


Verb = Literal["start", "pause", "resume", "stop", "undo"]
VERBS: tuple[Verb, ...] = get_args(Verb)
_NOT_BACK = (*ACTIVE, Phase.FAILED)
_BY_HAND = (
    "groups of a set go back from the highest down only; give the set its old image by hand, then undrain"
)


class OrderError(Exception):
    """It cannot be done now; the text says why, and what to do."""


def verb_of(word: str) -> Verb:
    """What an operator asks for. Raises OrderError when it is none of these."""
    if word not in VERBS:
        raise OrderError(f"unknown verb {word!r}; the verbs are: {', '.join(VERBS)}")
    return word


@dataclass(frozen=True, slots=True)
class Order:
    """To start: `cells` in this order (none: all), and the `version` that each unit must say that it is. `id`
    tells an order from the same one asked again.
    """

    verb: Verb
    by: str
    cells: tuple[str, ...] = ()
    version: str = ""
    dry_run: bool = False
    id: str = ""


def order_document(order: Order) -> bytes:
    """For those who conduct."""
    return orjson.dumps(order)


def read_order(text: bytes) -> Order:
    """The order in a document. Raises ValueError."""
    try:
        found = orjson.loads(text)
        found.pop("gate", None)
        order = Order(**{**found, "cells": tuple(map(str, found.get("cells", ())))})
    except (TypeError, AttributeError) as error:
        raise ValueError(f"no order: {error!r}") from error
    if order.verb not in VERBS:
        raise ValueError(f"no order: {order.verb!r}")
    return order


def why_not_now(
    order: Order,
    roll: Roll | None,
    policy: RollPolicy,
    known: Sequence[tuple[str, str]],
    failed: Collection[UnitRoll],
) -> str:
    """Why an order cannot be carried out; empty: it can. `known`: the units and their cells; `failed`: those
    that failed in the roll and are still out.
    """
    is_on = roll is not None and not roll.is_over()
    cells = {cell for _, cell in known}
    if order.verb == "start":
        if is_on:
            return "a roll is under way: wait for it, or stop it first (cellgate roll stop)"
        if unknown := [cell for cell in order.cells if cell not in cells]:
            return f"there is no cell {unknown[0]!r}; the cells are: {', '.join(sorted(cells))}"
        if policy.highest_first and failed:
            first = min(each.unit for each in failed)
            return f"unit {first} failed in the last roll and is still out: {_BY_HAND}"
        return "" if known else "there are no units"
    if roll is None:
        return "there is no roll: start one (cellgate roll start)"
    if order.verb == "undo":
        if policy.highest_first and (left := [each for each in roll.units if each.phase in _NOT_BACK]):
            return f"unit {left[0].unit} is {left[0].phase.value}: {_BY_HAND}"
        return "" if any(not each.back and each.since_ms for each in roll.units) else "nothing was rolled yet"
    if roll.status in (RollStatus.DONE, RollStatus.STOPPED):
        return f"the roll is {roll.status.value}"
    return ""


def carried_out(
    order: Order,
    roll: Roll | None,
    policy: RollPolicy,
    known: Sequence[tuple[str, str]],
    failed: Collection[UnitRoll],
    roll_id: str,
    now_ms: int,
) -> Roll:
    """The roll after an order. Raises OrderError."""
    if why := why_not_now(order, roll, policy, known, failed):
        raise OrderError(why)
    if order.verb == "start":
        units = _started(order, known, failed, now_ms)
        return Roll(
            roll_id, order.by, now_ms, units, version=order.version, dry_run=order.dry_run, order=order.id
        )
    roll = replace(cast(Roll, roll), order=order.id)
    match order.verb:
        case "pause":
            return replace(roll, status=RollStatus.PAUSED, reason=f"paused by {order.by}")
        case "resume":
            return replace(roll, status=RollStatus.RUNNING, reason="")
        case "stop":
            return replace(roll, status=RollStatus.STOPPED, reason=f"stopped by {order.by}")
    return undone(roll, policy, now_ms)


def _started(
    order: Order, known: Sequence[tuple[str, str]], failed: Collection[UnitRoll], now_ms: int
) -> tuple[UnitRoll, ...]:
    """The units of a new roll. One that failed in the last roll gets no requests by the start of this one: it
    is begun at once, and stays out where it is not rolled.
    """
    cells = order.cells or tuple(dict.fromkeys(cell for _, cell in known))
    rolled = [(unit, cell) for wanted in cells for unit, cell in known if cell == wanted]
    out = {each.unit: each for each in failed}
    if order.dry_run:
        rolled = [(unit, cell) for unit, cell in rolled if unit not in out]
    units = [
        UnitRoll(unit, cell, Phase.DRAINING, now_ms, was_drained=out.pop(unit).was_drained)
        if unit in out
        else UnitRoll(unit, cell)
        for unit, cell in rolled
    ]
    return *units, *out.values()


# Where gates keep a roll, so that each of them can go on with it.


class RollStore(Protocol):
    """The roll that gates share, and what operators ask of whoever conducts it."""

    @property
    def trouble(self) -> str:
        """Why no gate is known to conduct; empty: one does."""

    @property
    def leader(self) -> str:
        """The gate that conducts; empty: none is known."""

    def stand(self, *, willing: bool) -> None:
        """Whether this gate could conduct."""

    def conducts(self) -> bool:
        """Whether this gate conducts."""

    def clock_ms(self) -> int:
        """The clock by which times in a roll are told."""

    def latest(self) -> bytes:
        """The document that was written last; empty: none."""

    async def write(self, text: bytes) -> int:
        """Write the document; its fencing token. Raises NotActingError when another gate conducts."""

    async def ask(self, text: bytes) -> None:
        """Ask the conductor for something. Raises NotActingError when it cannot be asked."""

    async def asked(self) -> bytes | None:
        """What was asked first and is not done yet; None: nothing. Raises NotActingError."""

    async def done(self, text: bytes) -> None:
        """It was carried out, or refused. Raises NotActingError."""


class OwnRoll:
    """The roll of a gate that shares nothing with others: in its memory."""

    trouble = ""
    leader = "this gate"

    def __init__(self) -> None:
        self._text = b""
        self._asks: list[bytes] = []

    def stand(self, *, willing: bool) -> None:
        """Nobody else does."""

    def conducts(self) -> bool:
        """Always."""
        return True

    def clock_ms(self) -> int:
        """This machine's."""
        return round(1000.0 * time.time())

    def latest(self) -> bytes:
        """The document that was written last; empty: none."""
        return self._text

    async def write(self, text: bytes) -> int:
        """Keep the document; nobody compares the token."""
        self._text = text
        return 0

    async def ask(self, text: bytes) -> None:
        """Keep it for the next look."""
        self._asks.append(text)

    async def asked(self) -> bytes | None:
        """What was asked first and is not done yet; None: nothing."""
        return self._asks[0] if self._asks else None

    async def done(self, text: bytes) -> None:
        """It was carried out, or refused."""
        self._asks.remove(text)


class UndecidedRoll(OwnRoll):
    """A roll that is to be shared, at a gate that cannot ask the others: nobody conducts."""

    def __init__(self, trouble: str) -> None:
        super().__init__()
        self.trouble = trouble

    def conducts(self) -> bool:
        """Never."""
        return False


# A roll as JSON: what gates share of it, and what the admin port shows. Reading raises ValueError alone.


VERSION = 1


def roll_document(roll: Roll) -> bytes:
    """The document."""
    return orjson.dumps({"v": VERSION} | asdict(roll))


def read_roll(text: bytes) -> Roll:
    """The roll in a document. Raises ValueError."""
    try:
        found = orjson.loads(text)
        if found.pop("v") != VERSION:
            raise TypeError("another version")
        units = tuple(UnitRoll(**{**each, "phase": Phase(each["phase"])}) for each in found.pop("units"))
        return Roll(**{**found, "status": RollStatus(found["status"]), "units": units})
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"no roll: {error!r}") from error


def roll_view(roll: Roll, conducted_by: str, now_ms: int) -> dict[str, Any]:
    """The roll for people: how long each unit has been in its phase, and which gate conducts."""
    document = asdict(roll) | {
        "conducted_by": conducted_by,
        "running_s": round((now_ms - roll.began_ms) / 1000, 1),
    }
    for each in document["units"]:
        since_ms = each.pop("since_ms")
        each["for_s"] = round((now_ms - since_ms) / 1000, 1) if since_ms else None
    return document
