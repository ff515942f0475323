"""The report of a unit that gates share: a JSON document for each (unit, gate), its keys in Redis, its
parsing. Pure; docs/redis.md describes it.

1. Reading never raises, whatever is in Redis: invalid fields are ignored one by one.
2. Clocks are not shared. Ages are as of the writing, which is told by the writer's own clock, and so is that
   of each heartbeat: how that clock stands to the reader's is known from the one that was read soonest.
3. Of another version only `CORE` fields are read: these never change their meaning.

In this order: `UnitReport`, `BeatWriter`, `BeatReader`.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, dataclass, field, fields
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple, get_args

import orjson

from cellgate.router.health import is_on
from cellgate.router.nouns import Case, HoldKind, ServingRole, Strength, Verdict
from cellgate.router.unit_state import UnitState

VERSION = 1
CORE = ("unit", "cell", "gate", "verdict", "url", "in_flight", "gate_url")
HEARTBEAT_S = 0.25
EXPIRY_HEARTBEATS = 3
"""A beat expires after this many heartbeats, and a reader waits as long before it counts as missing."""
DOCUMENT_BEATS = 10
"""The document of a unit that changes is written once in so many heartbeats; all of a gate expire after three
times that without one.
"""
DOCUMENT_MAX = 64 * 1024

_REPORT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_REPORT_URL = re.compile(r"https?://[A-Za-z0-9.\-\[\]:_]{1,255}")
_TEXT_MAX = 256
_MODELS_MAX = 256
_LARGEST = 1e12


# Not frozen, although never changed: creating a frozen object with so many fields takes 3 us, and a gate with
# 200 units creates 800 a second.
@dataclass(slots=True)
class UnitReport:
    """The report of one gate on one unit. None: unknown.

    `fatal`: it is DOWN by a fact (an address refuses, a process has ended) and not by judgement;
    `life_age_s`: how long ago it last made progress; `prefilling` of those in flight have prompts that are
    not computed yet, of `uncached_tokens` in all;
    `gate_url`: where the gate takes requests for it (empty: nowhere); `stopping`: the gate is stopping;
    `hold`: why its engine stands still on purpose; `role`: what it does for requests; `number`: that of its
    verdict, which grows with each that the gate has come to (0: not told); `at_s`: when it was made, by the
    clock of its gate.
    """

    unit: str
    cell: str
    gate: str
    verdict: Verdict
    url: str = ""
    in_flight: int = 0
    prefilling: int = 0
    reason: str = ""
    fatal: bool = False
    drained: bool = False
    degraded: float = 0.0
    errors: float = 0.0
    epoch: str = ""
    weight: float = 1.0
    max_in_flight: int = 0
    models: tuple[str, ...] = ()
    uncached_tokens: int = 0
    life_age_s: float | None = None
    load_age_s: float | None = None
    running: int | None = None
    waiting: int | None = None
    kv_use: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    prefill_tokens_per_s: float | None = None
    gate_url: str = ""
    stopping: bool = False
    engine: str = ""
    hold: HoldKind | None = None
    role: ServingRole = "both"
    number: int = 0
    at_s: float | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all of it was told. Of the others only the load counts, until their documents are read."""
        return bool(self.cell)


class Seen(NamedTuple):
    """A report, and how long ago it was written."""

    report: UnitReport
    age_s: float


def written(report: UnitReport) -> bytes:
    """The document: what is as usual is left out, for of most units nearly all is."""
    said = {name: value for name, usual in _WRITTEN_FIELDS if (value := getattr(report, name)) != usual}
    return b'{"v":%d,%b' % (VERSION, orjson.dumps(said)[1:])


def read_report(document: bytes) -> UnitReport | None:
    """The report in a document; None when it is invalid."""
    if len(document) > DOCUMENT_MAX:
        return None
    try:
        found = orjson.loads(document)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(found, dict):
        return None
    readers = READERS if found.get("v") == VERSION else _CORE_READERS
    taken = {
        name: value
        for name, raw in found.items()
        if name in readers and (value := readers[name](raw)) is not None
    }
    return UnitReport(**taken) if taken.keys() >= {"unit", "cell", "gate", "verdict"} else None


def report_of(
    state: UnitState,
    gate: str,
    now: float,
    *,
    number: int = 0,
    progress_at: float = 0.0,
    ttft_s: float | None = None,
    itl_s: float | None = None,
    gate_url: str = "",
    stopping: bool = False,
) -> UnitReport:
    """The report of a gate on a unit now. `progress_at` is when the gate itself last saw progress (0: never).
    `ttft_s`, `itl_s`: recent usual values, which are not computed in every heartbeat.
    """
    case, load, unit = state.case, state.load, state.unit
    return UnitReport(
        unit=unit.name,
        cell=unit.cell,
        gate=gate,
        verdict=case.verdict,
        url=unit.url,
        in_flight=state.in_flight,
        prefilling=state.costs.backlog.queued,
        reason=case.because.reason[:_TEXT_MAX] if case.because is not None else "",
        fatal=_is_fatal(case),
        drained=state.drained,
        degraded=round(state.outlier.degraded, 3),
        errors=round(state.costs.errors.share(now), 3),
        epoch=",".join(epoch for _, epoch in case.epochs)[:_TEXT_MAX],
        weight=state.weight,
        max_in_flight=unit.max_in_flight,
        models=tuple(sorted(state.models)[:_MODELS_MAX]),
        uncached_tokens=state.costs.backlog.queued_tokens,
        life_age_s=round(now - progress_at, 3) if progress_at else None,
        load_age_s=round(now - load.at, 3) if load is not None else None,
        running=load.running if load is not None else None,
        waiting=load.waiting if load is not None else None,
        kv_use=round(load.kv_use, 4) if load is not None else None,
        ttft_s=ttft_s,
        itl_s=itl_s,
        prefill_tokens_per_s=round(state.costs.rates.prefill_tokens_s.value, 1),
        gate_url=gate_url,
        stopping=stopping,
        engine=state.engine,
        hold=state.hold.kind if state.hold is not None and is_on(state.hold) else None,
        role=unit.role,
        number=number,
        at_s=round(now, 3),
    )


def _is_fatal(case: Case) -> bool:
    because = case.because
    return case.verdict is Verdict.DOWN and because is not None and because.strength is Strength.FATAL


def _name(found: Any) -> str | None:
    return found if isinstance(found, str) and _REPORT_NAME.fullmatch(found) else None


def _url(found: Any) -> str | None:
    return found if isinstance(found, str) and _REPORT_URL.fullmatch(found) else None


def _text(found: Any) -> str | None:
    return found[:_TEXT_MAX] if isinstance(found, str) else None


def _flag(found: Any) -> bool | None:
    return found if isinstance(found, bool) else None


def _number(found: Any) -> float | None:
    """A number from 0; true and false are none."""
    return float(found) if type(found) in (float, int) and 0 <= found <= _LARGEST else None


def _share(found: Any) -> float | None:
    number = _number(found)
    return number if number is not None and number <= 1.0 else None


def read_count(found: Any) -> int | None:
    return found if type(found) is int and 0 <= found <= _LARGEST else None


def _verdict(found: Any) -> Verdict | None:
    return _REPORT_VERDICTS.get(found) if isinstance(found, str) else None


def _hold(found: Any) -> HoldKind | None:
    return _HOLDS.get(found) if isinstance(found, str) else None


def _role(found: Any) -> ServingRole | None:
    return _SERVING_ROLES.get(found) if isinstance(found, str) else None


def _models(found: Any) -> tuple[str, ...] | None:
    if not isinstance(found, list) or not all(isinstance(model, str) for model in found):
        return None
    return tuple(found[:_MODELS_MAX])


_HOLDS = {kind.value: kind for kind in HoldKind}
_SERVING_ROLES: Mapping[str, ServingRole] = {role: role for role in get_args(ServingRole)}
_REPORT_VERDICTS = {verdict.value: verdict for verdict in Verdict}
_READ_BY_NAME: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("unit", "cell", "gate"), _name),
    **dict.fromkeys(("url", "gate_url"), _url),
    **dict.fromkeys(("degraded", "errors"), _share),
}
_READ_BY_TYPE: Mapping[str, Callable[[Any], Any]] = {
    "Verdict": _verdict,
    "int": read_count,
    "float": _number,
    "str": _text,
    "bool": _flag,
    "tuple[str, ...]": _models,
    "HoldKind": _hold,
    "ServingRole": _role,
}
READERS = {
    each.name: _READ_BY_NAME.get(each.name) or _READ_BY_TYPE[str(each.type).removesuffix(" | None")]
    for each in fields(UnitReport)
}
"""What each field of a document is read by; a field that is wrong is none."""
_CORE_READERS = {name: READERS[name] for name in CORE}
_WRITTEN_FIELDS = [
    (each.name, each.default if each.name not in CORE else MISSING) for each in fields(UnitReport)
]
"""The fields of a document, and what is as usual. The core is always there."""


# The heartbeat of a gate: one small JSON document with what has changed of its units. Pure.
#
# 1. A beat is written four times a second, and has what has changed since the one before, and apart from
#    that, for readers who have missed one, what the last WINDOW beats had; one without a change is 70 bytes.
# 2. The document of a unit is written within DOCUMENT_BEATS after a change. Who is new, or has missed more,
#    reads all of a gate at once, and once more when each has what was missed.
# 3. A gate that is gone has no beat, and its documents say nothing; one whose beat is the same for longer
#    than it lives has gone, too.
# 4. What a reader pays does not grow with the gates: all together tell ROWS_READ changes of load in one beat,
#    those first that have waited longest. All other changes are told at once.


BEAT_VERSION = 1
WINDOW = 4
"""A reader that stands still for less than a second misses nothing."""
LIFE_GRAIN_S = 0.5
"""Progress is told again when it is so much later than what was told last."""
BEAT_MAX = 1024 * 1024
"""Bytes of a beat that are read: 2,000 units of which all is new."""
ROWS_READ, ROWS_LEAST = 512, 4
"""Changes of load that all gates together tell in one beat; and each of them at least."""
CLOCK_TURN_S = 60.0
"""How another gate's clock stands is learnt from the last one or two turns: clocks drift."""

_AGES = ("life_age_s", "load_age_s", "at_s")
_PUBLISHED = tuple(each.name for each in fields(UnitReport) if each.name not in (*_AGES, "gate"))
_ALL_FIELDS = frozenset((*_PUBLISHED, "gate"))
_values = attrgetter(*_PUBLISHED)
_NULLABLE = frozenset(each.name for each in fields(UnitReport) if each.default is None)
LOAD_FIELDS = frozenset(
    ("in_flight", "prefilling", "uncached_tokens", "life_age_s", "running", "waiting", "kv_use", "errors")
) | {"degraded", "ttft_s", "itl_s", "prefill_tokens_per_s"}
"""What changes all the time, and may wait."""

Row = Mapping[str, Any]
"""What has changed of one unit: fields of UnitReport. None in its place: the gate has the unit no more."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The beat `number` of a gate, at reading: the `rows` that are new, and those of the beats `before`.
    `has_prefixes`: its document of cached prompts has news; `at_s`: what the gate's clock showed.
    """

    gate: str
    number: int
    has_prefixes: bool
    rows: Mapping[str, Row | None]
    before: Mapping[str, Row | None]
    at_s: float | None = None

    def since(self, last: int | None) -> Mapping[str, Row | None]:
        """What is new to who has read the beat `last` of this gate; None: none of them."""
        if last == self.number:
            return {}
        if last == self.number - 1 or not self.before:
            return self.rows
        rows = dict(self.before)
        for unit, row in self.rows.items():
            old = rows.get(unit)
            rows[unit] = {**old, **row} if isinstance(old, dict) and isinstance(row, dict) else row
        return rows


class ReceivedBeat(NamedTuple):
    """A beat that was read: when it was written, by the reader's clock, and what is new in it."""

    beat: Beat
    at: float
    rows: Mapping[str, Row | None]


@dataclass(slots=True)
class _Published:
    """What was told of one unit: the report that was taken last and when, the progress that was told last,
    and the beats with which its document was written and is due.
    """

    report: UnitReport
    values: tuple[Any, ...]
    at: float
    lived_at: float = 0.0
    written: int = -DOCUMENT_BEATS
    due: int = 0


class BeatWriter:
    """What one gate has published."""

    def __init__(self, gate: str) -> None:
        self.gate = gate
        self._number = 0
        self._published: dict[str, _Published] = {}
        self._recent: deque[dict[str, AbstractSet[str] | None]] = deque(maxlen=WINDOW - 1)
        self._changed: dict[str, AbstractSet[str] | None] = {}
        self._due: dict[int, list[str]] = {}
        """Whose documents are due with which beat; `due` of the unit decides."""

    def restart(self) -> None:
        """Redis may have lost all documents: each is due."""
        for unit, published in self._published.items():
            self._plan(unit, published, self._number + 1)

    def units(self) -> Collection[str]:
        """The units that it has told of."""
        return self._published.keys()

    def take(self, report: UnitReport, now: float, *, is_due: bool = False) -> None:
        """What this gate reports of one unit in the next beat. `is_due`: its document is, in any case."""
        unit, coming = report.unit, self._number + 1
        published = self._published.get(unit)
        if published is None:
            published = self._published[unit] = _Published(report, _values(report), now)
            changed: AbstractSet[str] = _ALL_FIELDS
            is_due = True
        else:
            changed = _changes(published, report)
            published.report, published.at = report, now
            is_due = is_due or changed is _ALL_FIELDS
        if report.life_age_s is not None:
            lived_at = now - report.life_age_s
            if changed or lived_at - published.lived_at >= LIFE_GRAIN_S:
                published.lived_at = lived_at
                changed = changed | {"life_age_s"}
        if changed:
            self._changed[unit] = changed | (self._changed.get(unit) or frozenset())
        if is_due:
            self._plan(unit, published, coming)
        elif changed and not published.due:
            self._plan(unit, published, max(coming, published.written + DOCUMENT_BEATS))

    def leave(self, unit: str) -> None:
        """The gate has the unit no more."""
        if self._published.pop(unit, None) is not None:
            self._changed[unit] = None

    def refused(self, reports: Collection[UnitReport]) -> None:
        """Redis did not take these documents: who needs them hears all of them in the next beats, too."""
        for report in reports:
            if (published := self._published.get(report.unit)) is not None:
                self._changed[report.unit] = _ALL_FIELDS
                self._plan(report.unit, published, self._number + 1)

    def beat(self, now: float, *, has_prefixes: bool, others: int = 0) -> tuple[bytes, list[UnitReport]]:
        """The next beat, of what was taken since the last one, and whose documents are due with it. `others`:
        how many other gates there are.
        """
        if not self._number:
            # Who reads the first one reads all documents, which are written before it.
            self._changed = {}
        published = self._published_now(max(ROWS_LEAST, ROWS_READ // max(1, others)))
        before = self._before(published)
        self._recent.append(published)
        self._number += 1
        message: dict[str, Any] = {
            "v": BEAT_VERSION,
            "gate": self.gate,
            "beat": self._number,
            "prefixes": has_prefixes,
            "at_s": round(now, 3),
            "units": {unit: self._row(unit, names, now) for unit, names in published.items()},
        }
        if before:
            message["before"] = {unit: self._row(unit, names, now) for unit, names in before.items()}
        return orjson.dumps(message), list(self._take_due())

    def _published_now(self, most: int) -> dict[str, AbstractSet[str] | None]:
        """What of all changes is told in this beat; the others wait for the next ones."""
        changed = self._changed
        if len(changed) <= most:
            self._changed = {}
            return changed
        published = {
            unit: names for unit, names in changed.items() if names is None or not names <= LOAD_FIELDS
        }
        waiting = (unit for unit in changed if unit not in published)
        published |= {unit: changed[unit] for unit in islice(waiting, max(0, most - len(published)))}
        for unit in published:
            del changed[unit]
        return published

    def _before(self, published: Mapping[str, AbstractSet[str] | None]) -> dict[str, AbstractSet[str] | None]:
        """What the beats before have told, within the window, and this one does not."""
        before: dict[str, AbstractSet[str] | None] = {}
        for recent in self._recent:
            for unit, found in recent.items():
                known = before.get(unit)
                before[unit] = found if known is None or found is None else known | found
        for unit, names in published.items():
            if (known := before.pop(unit, None)) is not None and names is not None and known - names:
                before[unit] = known - names
        return before

    def _plan(self, unit: str, published: _Published, beat: int) -> None:
        if published.due != beat:
            published.due = beat
            self._due.setdefault(beat, []).append(unit)

    def _take_due(self) -> Iterator[UnitReport]:
        for unit in self._due.pop(self._number, ()):
            published = self._published.get(unit)
            if published is not None and published.due == self._number:
                published.due, published.written = 0, self._number
                yield published.report

    def _row(self, unit: str, names: AbstractSet[str] | None, now: float) -> dict[str, Any] | None:
        published = self._published.get(unit)
        if published is None or names is None:
            return None
        row = {name: getattr(published.report, name) for name in sorted(names)}
        if (age_s := row.get("life_age_s")) is not None and now > published.at:
            row["life_age_s"] = round(age_s + now - published.at, 3)
        return row


def _changes(published: _Published, report: UnitReport) -> AbstractSet[str]:
    """The fields that differ from what was told of the unit."""
    values, before = _values(report), published.values
    if before == values:
        return frozenset()
    published.values = values
    changed = {name for name, old, new in zip(_PUBLISHED, before, values, strict=True) if old != new}
    # With another verdict readers may have heard of what was in between, and keep that where nothing is said.
    return _ALL_FIELDS if "number" in changed else changed


class _Latest(NamedTuple):
    """What beats have said of a unit (None: it has gone), when the last of them was written, and by the clock
    of its gate.
    """

    row: dict[str, Any] | None
    at: float
    at_s: float | None


@dataclass(slots=True)
class MissedBeats:
    """Of a gate beats were missed: its documents are read at once, and again from the beat `again_at`, when
    each has what was missed. `is_read`: once; `latest`: what beats have said of units since.
    """

    again_at: int
    is_read: bool = False
    latest: dict[str, _Latest] = field(default_factory=dict)

    def hear(self, received: ReceivedBeat) -> None:
        """A beat was read."""
        for unit, row in received.rows.items():
            before = self.latest.get(unit)
            known = before.row or {} if before is not None else {}
            news = {**known, **row} if isinstance(row, dict) else None
            self.latest[unit] = _Latest(news, received.at, received.beat.at_s)

    def newest(self, report: UnitReport, at: float) -> tuple[UnitReport, float] | None:
        """What was said of a unit, by a document that was written then and beats since; None: it has gone."""
        latest = self.latest.get(report.unit)
        if latest is None or not _is_later(latest, report, at):
            return report, at
        if latest.row is None:
            return None
        if (read_count(latest.row.get("number")) or report.number) < report.number:
            return report, at
        newer = changed_report(report.gate, report.unit, latest.row, report, max(0.0, latest.at - at))
        return (report, at) if newer is None else (newer, latest.at)


def _is_later(latest: _Latest, report: UnitReport, at: float) -> bool:
    if latest.at_s is None or report.at_s is None:
        return latest.at > at
    return latest.at_s > report.at_s


@dataclass(slots=True)
class _Clock:
    """That of another gate: by how much the reader's is ahead of it, as the beats say that were read soonest
    in this turn and the one before; when the last beat was written, and until when this turn lasts.
    `looked_at`: when the last look at it began.
    """

    ahead_s: float
    ahead_now_s: float
    until: float
    at: float = -math.inf
    looked_at: float = -math.inf

    def written_at(self, at_s: float, now: float, expiry_s: float) -> float:
        """When a beat was written that was just read; never before the last one."""
        ahead_s = now - at_s
        if now >= self.until:
            self.ahead_s, self.ahead_now_s, self.until = self.ahead_now_s, ahead_s, now + CLOCK_TURN_S
        self.ahead_now_s = min(self.ahead_now_s, ahead_s)
        self.ahead_s = min(self.ahead_s, ahead_s)
        if ahead_s - self.ahead_s > expiry_s:
            # None lives so long: that clock has stood still.
            self.ahead_s = self.ahead_now_s = ahead_s
        if at_s + self.ahead_s < self.looked_at:
            # It was not there yet: the reader's own clock stood still when it read another one.
            self.ahead_s = self.ahead_now_s = self.looked_at - at_s
        self.at = max(self.at, at_s + self.ahead_s)
        return self.at


class BeatReader:
    """What one gate has read of others. `behind`: those of which something was missed."""

    def __init__(self, expiry_s: float) -> None:
        self._expiry_s = expiry_s
        self._numbers: dict[str, int] = {}
        self._clocks: dict[str, _Clock] = {}
        self.behind: dict[str, MissedBeats] = {}

    def forget(self, gate: str) -> None:
        """What its beats and documents have said does not hold any more."""
        self._numbers.pop(gate, None)

    def knows(self, gate: str) -> bool:
        """Whether a beat of that gate was read."""
        return gate in self._numbers

    def keep(self, gates: AbstractSet[str]) -> None:
        """Forget all others."""
        for known in (self._numbers, self._clocks, self.behind):
            for gate in known.keys() - gates:
                del known[gate]

    def hear(self, beat: Beat, now: float, asked_at: float = -math.inf) -> ReceivedBeat | None:
        """A beat was read, by a look that began at `asked_at`; None: it is one that no gate writes any
        more.
        """
        last, clock = self._numbers.get(beat.gate), self._clocks.get(beat.gate)
        if clock is not None and last == beat.number:
            clock.looked_at = asked_at
            # One in Redis ends after `expiry_s`.
            return ReceivedBeat(beat, clock.at, {}) if now - clock.at <= 2.0 * self._expiry_s else None
        at_s = beat.at_s if beat.at_s is not None else now
        if clock is None or (last is not None and beat.number < last):
            clock = self._clocks[beat.gate] = _Clock(now - at_s, now - at_s, now + CLOCK_TURN_S)
        self._numbers[beat.gate] = beat.number
        received = ReceivedBeat(beat, clock.written_at(at_s, now, self._expiry_s), beat.since(last))
        clock.looked_at = asked_at
        if last is None or not last <= beat.number <= last + WINDOW:
            # Of the same process what was heard meanwhile still is what was said last of some units.
            before = self.behind.get(beat.gate) if last is not None and beat.number > last else None
            latest = before.latest if before is not None else {}
            self.behind[beat.gate] = MissedBeats(beat.number + DOCUMENT_BEATS, latest=latest)
        if (behind := self.behind.get(beat.gate)) is not None:
            behind.hear(received)
        return received


def read_beat(document: Any, gate: str) -> Beat | None:
    """The beat of a gate; None when it is none."""
    try:
        found = orjson.loads(document) if isinstance(document, bytes) and len(document) <= BEAT_MAX else None
    except orjson.JSONDecodeError:
        return None
    if not isinstance(found, dict) or found.get("v") != BEAT_VERSION or found.get("gate") != gate:
        return None
    number, rows, before = found.get("beat"), found.get("units"), found.get("before", {})
    if not isinstance(number, int) or not isinstance(rows, dict) or not isinstance(before, dict):
        return None
    return Beat(gate, number, found.get("prefixes") is True, rows, before, _number(found.get("at_s")))


def written_at(report: UnitReport, beat: Beat, beat_at: float) -> float:
    """When a document was written, by a beat of its gate that was written then."""
    if report.at_s is None or beat.at_s is None:
        return beat_at
    return beat_at - (beat.at_s - report.at_s)


def changed_report(
    gate: str, unit: str, row: Row, known: UnitReport | None, reported_s: float
) -> UnitReport | None:
    """The report of a unit after a change, of which nothing else may be known yet (`is_whole`); None: it is
    one of another unit or gate. `known` is the one before, and is changed itself; `reported_s`: how long ago
    it was published. Fields that are invalid are ignored one by one.
    """
    taken: dict[str, Any] = {}
    for name, found in row.items():
        if (read := READERS.get(name)) is not None:
            value = read(found)
            if value is not None or name in _NULLABLE:
                taken[name] = value
    if taken.get("unit", unit) != unit or taken.get("gate", gate) != gate:
        return None
    if known is None:
        return UnitReport(**{"unit": unit, "cell": "", "gate": gate, "verdict": Verdict.UP, **taken})
    if known.life_age_s is not None:
        taken.setdefault("life_age_s", known.life_age_s + reported_s)
    if known.load_age_s is not None:
        taken.setdefault("load_age_s", known.load_age_s + reported_s)
    for name, value in taken.items():
        setattr(known, name, value)
    return known
