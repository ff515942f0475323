"""The report of a unit that gates share: a JSON document for each (unit, gate), its keys in Redis, its
parsing. Pure; docs/redis.md describes it.

1. Reading never raises, whatever is in Redis: invalid fields are ignored one by one.
2. Clocks are not shared. Ages are as of the writing; its time follows from the time to live of the key.
3. Of another version only `CORE` fields are read: these never change their meaning.

In this order: `UnitReport`, `BeatWriter`, `Roster`.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple, get_args

import orjson

from cellgate.proxy.config.settings import REDIS_PREFIX
from cellgate.router.cost_model import RemoteLoad
from cellgate.router.health import is_on
from cellgate.router.nouns import Case, HoldKind, ServingRole, Strength, Verdict
from cellgate.router.unit_state import UnitState

VERSION = 1
CORE = ("unit", "cell", "gate", "verdict", "url", "in_flight", "gate_url")
HEARTBEAT_S = 0.25
EXPIRY_HEARTBEATS = 3
"""A beat expires after this many heartbeats, and a reader waits as long before it counts as missing."""
DOCUMENT_BEATS = 10
"""A document is written once in so many heartbeats, in turns; it expires after three times that."""
DOCUMENT_MAX = 64 * 1024

_REPORT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_REPORT_URL = re.compile(r"https?://[A-Za-z0-9.\-\[\]:_]{1,255}")
_TEXT_MAX = 256
_MODELS_MAX = 256
_LARGEST = 1e12
_GRAIN_S = 0.001
"""The inaccuracy of PTTL. A report must never seem newer than a later one."""


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
    verdict, which grows with each that the gate has come to (0: not told).
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


class Names:
    """The names of keys and channels under a prefix. Unit, cell and gate names have no colon."""

    def __init__(self, prefix: str = REDIS_PREFIX) -> None:
        self.prefix = prefix
        self.cells = f"{prefix}cells"
        """The set of cells."""
        self.flips = f"{prefix}flips"
        """The channel on which a document is published after each change of verdict."""

        self.poison = f"{prefix}poison"
        """The set of prompts that are refused, by fingerprint."""

    def flips_of(self, gate: str) -> str:
        """Where a gate says what it publishes on the channel, as signatures have it."""
        return f"{self.flips}:{gate}"

    def beat(self, gate: str) -> str:
        """The key of a gate's heartbeat."""
        return f"{self.prefix}beat:{gate}"

    def prefixes(self, gate: str) -> str:
        """The key of a gate's hashes of cached prompts."""
        return f"{self.prefix}prefixes:{gate}"

    def response(self, mark: str) -> str:
        """The key of a stored response."""
        return f"{self.prefix}response:{mark}"

    def limit(self, counter: str) -> str:
        """The key of the counter of one limit in one window of the clock."""
        return f"{self.prefix}limit:{counter}"

    def ban(self, mark: str) -> str:
        """The key of the document of a refused prompt."""
        return f"{self.prefix}poison:{mark}"

    def units_of(self, cell: str) -> str:
        """The set of `UNIT:GATE` that have been published of a cell."""
        return f"{self.prefix}cell:{cell}"

    def acting(self, cell: str) -> str:
        """The key of what gates agree on about a cell: which of them acts, and on what."""
        return f"{self.prefix}acting:{cell}"

    def unit(self, unit: str, gate: str) -> str:
        """The key of a document."""
        return f"{self.prefix}unit:{unit}:{gate}"


class Seen(NamedTuple):
    """A report, and how long ago it was written."""

    report: UnitReport
    age_s: float


class MergedReport(NamedTuple):
    """The combined report of several gates: `view` decides, `in_flight` is the sum."""

    report: UnitReport
    in_flight: int


def written(report: UnitReport) -> bytes:
    """The document."""
    return b'{"v":%d,%b' % (VERSION, orjson.dumps(report)[1:])


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
    names = READERS if found.get("v") == VERSION else CORE
    taken = {name: value for name in names if (value := READERS[name](found.get(name))) is not None}
    return UnitReport(**taken) if taken.keys() >= {"unit", "cell", "gate", "verdict"} else None


def age_s(pttl_ms: int, expiry_s: float) -> float | None:
    """How long ago a key with the expiry `expiry_s` was written; None: it is gone, or not a gate's."""
    left_s = pttl_ms / 1000.0
    # A PTTL of -1 is a key without expiry, -2 is no key. A larger one than `expiry_s` was not written by a
    # gate.
    return None if pttl_ms < 0 or left_s > 10.0 * expiry_s else max(0.0, expiry_s - left_s) + _GRAIN_S


def merge_reports(seen: Sequence[Seen]) -> MergedReport | None:
    """The combined report on one unit: any fatal one, else the most recent. None without reports."""
    if not seen:
        return None
    # The gate's name breaks ties, so that all readers agree.
    ranked = sorted(seen, key=lambda one: (not one.report.fatal, one.age_s, one.report.gate))
    return MergedReport(ranked[0].report, sum(one.report.in_flight for one in seen))


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
    `ttft_s` and `itl_s` are the recent time to first token and gap between tokens, which are not computed in
    every heartbeat.
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
    """A number from 0. JSON has no others than finite ones, but orjson's own ints go further than floats."""
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        return None
    return float(found) if 0 <= found <= _LARGEST and math.isfinite(found) else None


def _share(found: Any) -> float | None:
    number = _number(found)
    return number if number is not None and number <= 1.0 else None


def _count(found: Any) -> int | None:
    return found if isinstance(found, int) and _number(found) is not None else None


def _verdict(found: Any) -> Verdict | None:
    return _REPORT_VERDICTS.get(found) if isinstance(found, str) else None


def _hold(found: Any) -> HoldKind | None:
    return _HOLDS.get(found) if isinstance(found, str) else None


def _role(found: Any) -> ServingRole | None:
    return next((role for role in get_args(ServingRole) if role == found), None)


def _models(found: Any) -> tuple[str, ...] | None:
    if not isinstance(found, list) or not all(isinstance(model, str) for model in found):
        return None
    return tuple(found[:_MODELS_MAX])


_HOLDS = {kind.value: kind for kind in HoldKind}
_REPORT_VERDICTS = {verdict.value: verdict for verdict in Verdict}
_READ_BY_NAME: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("unit", "cell", "gate"), _name),
    **dict.fromkeys(("url", "gate_url"), _url),
    **dict.fromkeys(("degraded", "errors"), _share),
}
_READ_BY_TYPE: Mapping[str, Callable[[Any], Any]] = {
    "Verdict": _verdict,
    "int": _count,
    "float": _number,
    "str": _text,
    "bool": _flag,
    "tuple[str, ...]": _models,
    "HoldKind": _hold,
    "ServingRole": _role,
}
READERS = {
    field.name: _READ_BY_NAME.get(field.name) or _READ_BY_TYPE[str(field.type).removesuffix(" | None")]
    for field in fields(UnitReport)
}
"""What each field of a document is read by; a field that is wrong is none."""


# The heartbeat of a gate: one small JSON document with what has changed of its units. Pure.
#
# 1. A beat is written four times a second, and has all that has changed within the last WINDOW beats. Who
#    reads it at least that often knows all that the gate knows; one in which nothing changed is 60 bytes.
# 2. The documents of units are written in turns, each once in DOCUMENT_BEATS. Who is new, or has missed
#    beats, reads them until each has been written again.
# 3. A gate that is gone has no beat, and its documents say nothing.


BEAT_VERSION = 1
WINDOW = 4
"""A reader that stands still for less than a second misses nothing."""
LIFE_GRAIN_S = 0.5
"""Progress is told again when it is so much later than what was told last."""
BEAT_MAX = 1024 * 1024
"""Bytes of a beat that are read: 2,000 units of which all is new."""

_AGES = ("life_age_s", "load_age_s")
_PUBLISHED = tuple(each.name for each in fields(UnitReport) if each.name not in (*_AGES, "gate"))
_values = attrgetter(*_PUBLISHED)
_NULLABLE = frozenset(each.name for each in fields(UnitReport) if each.default is None)
_REPORT_REQUIRED = frozenset(each.name for each in fields(UnitReport) if each.default is MISSING)

Row = Mapping[str, Any]
"""What has changed of one unit: fields of UnitReport. None in its place: the gate has the unit no more."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The beat `number` of a gate, at reading. `has_prefixes`: its document of cached prompts has news."""

    gate: str
    number: int
    has_prefixes: bool
    rows: Mapping[str, Row | None]


class BeatWriter:
    """What one gate has told."""

    def __init__(self, gate: str) -> None:
        self._gate = gate
        self._number = 0
        self._reported: dict[str, tuple[Any, ...]] = {}
        self._lived_at: dict[str, float] = {}
        self._recent: deque[dict[str, set[str] | None]] = deque(maxlen=WINDOW)
        self._documents: set[str] = set()
        self._reports: dict[str, UnitReport] = {}
        self._changed: dict[str, set[str] | None] = {}

    def restart(self) -> None:
        """Redis may have lost all documents: each is due."""
        self._documents.clear()

    def take(self, report: UnitReport, now: float) -> None:
        """What this gate reports of one unit in the next beat."""
        self._reports[report.unit] = report
        if changed := self._change(report, now):
            self._changed[report.unit] = changed

    def beat(self, *, has_prefixes: bool) -> tuple[bytes, list[UnitReport]]:
        """The next beat, of all that was taken since the last one, and whose documents are due with it."""
        reports, self._reports = self._reports, {}
        gone = self._reported.keys() - reports.keys()
        for name in gone:
            del self._reported[name]
            self._lived_at.pop(name, None)
        self._recent.append(self._changed | dict.fromkeys(gone))
        self._number, self._changed = self._number + 1, {}
        rows = {name: _row(reports.get(name), names) for name, names in self._names().items()}
        message = {
            "v": BEAT_VERSION,
            "gate": self._gate,
            "beat": self._number,
            "prefixes": has_prefixes,
            "units": rows,
        }
        return orjson.dumps(message), list(self._due(reports))

    def _due(self, reports: Mapping[str, UnitReport]) -> Iterator[UnitReport]:
        self._documents &= reports.keys()
        for turn, (name, report) in enumerate(reports.items()):
            if (self._number + turn) % DOCUMENT_BEATS == 0 or name not in self._documents:
                self._documents.add(name)
                yield report

    def _change(self, report: UnitReport, now: float) -> set[str]:
        """The fields that differ from what was told of the unit."""
        values, before = _values(report), self._reported.get(report.unit)
        self._reported[report.unit] = values
        changed: set[str] = set()
        if before is None:
            changed = {*_PUBLISHED, "gate"}
        elif before != values:
            changed = {name for name, old, new in zip(_PUBLISHED, before, values, strict=True) if old != new}
            if "number" in changed:
                # Readers may have heard of what was in between, and keep that where nothing is said.
                changed = {*_PUBLISHED, "gate"}
        if report.life_age_s is not None:
            lived_at = now - report.life_age_s
            if changed or lived_at - self._lived_at.get(report.unit, 0.0) >= LIFE_GRAIN_S:
                self._lived_at[report.unit] = lived_at
                changed.add("life_age_s")
        return changed

    def _names(self) -> dict[str, set[str] | None]:
        """What has changed within the window, by unit."""
        names: dict[str, set[str] | None] = {}
        for changed in self._recent:
            for unit, found in changed.items():
                names[unit] = None if found is None else (names.get(unit) or set()) | found
        return names


class BeatReader:
    """What one gate has read of others."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._behind: dict[str, tuple[int, float]] = {}
        """Gates of which something was missed: until which beat documents are read, and since when."""

    def restart(self) -> None:
        """Redis may have been away: beats may have been missed."""
        self._numbers.clear()

    def knows(self, gate: str) -> bool:
        """Whether a beat of that gate was read."""
        return gate in self._numbers

    def keep(self, gates: set[str]) -> None:
        """Forget all others."""
        for gate in self._numbers.keys() - gates:
            del self._numbers[gate]
            self._behind.pop(gate, None)

    def misses(self, beat: Beat, at: float) -> bool:
        """Whether documents of its gate have to be read with this beat, which was written then."""
        last = self._numbers.get(beat.gate)
        self._numbers[beat.gate] = beat.number
        if last is None or not last <= beat.number <= last + WINDOW:
            # By then each document was written again, and read after that.
            self._behind[beat.gate] = beat.number + DOCUMENT_BEATS + WINDOW, at
        return beat.gate in self._behind

    def whole_since(self, beat: Beat) -> float | None:
        """When with this beat all documents have been read: since when. None: not so, or not for the first
        time.
        """
        until, since = self._behind.get(beat.gate, (beat.number, 0.0))
        if beat.number <= until:
            return None
        del self._behind[beat.gate]
        return since


def read_beat(document: Any, gate: str) -> Beat | None:
    """The beat of a gate; None when it is none."""
    try:
        found = orjson.loads(document) if isinstance(document, bytes) and len(document) <= BEAT_MAX else None
    except orjson.JSONDecodeError:
        return None
    if not isinstance(found, dict) or found.get("v") != BEAT_VERSION or found.get("gate") != gate:
        return None
    number, rows = found.get("beat"), found.get("units")
    if not isinstance(number, int) or not isinstance(rows, dict):
        return None
    return Beat(gate, number, found.get("prefixes") is True, rows)


def changed_report(
    gate: str, unit: str, row: Row, known: UnitReport | None, reported_s: float
) -> UnitReport | None:
    """The report of a unit after a change; None when it is not known whole. `reported_s`: how long ago the
    known one was told. Fields that are invalid are ignored one by one.
    """
    taken = {name: value for name, value in _fields(row) if value is not None or name in _NULLABLE}
    if any(taken.get(name, value) != value for name, value in (("unit", unit), ("gate", gate))):
        return None
    if known is None:
        is_whole = taken.keys() >= _REPORT_REQUIRED
        return UnitReport(**taken) if is_whole else None
    if known.life_age_s is not None:
        taken.setdefault("life_age_s", known.life_age_s + reported_s)
    if known.load_age_s is not None:
        taken.setdefault("load_age_s", known.load_age_s + reported_s)
    return replace(known, **taken)


def _fields(row: Row) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if (read := READERS.get(name)) is not None:
            yield name, read(value)


def _row(report: UnitReport | None, names: set[str] | None) -> dict[str, Any] | None:
    if report is None or names is None:
        return None
    return {name: getattr(report, name) for name in sorted(names)}


# Which reports of other gates are still valid, with Redis and without it. Pure.
#
# 1. While Redis does not answer, the last reports stay valid, however old.
# 2. A document may be missing because Redis has just come back empty: it counts as missed only after Redis
#    has answered for three heartbeats without it.
# 3. Even then the gate that wrote it is probed: its reports end only if it is not ready either.
# 4. A verdict comes by several ways (channel, document, beat), which overtake each other. Its number decides,
#    not the time at which it seems to have been written: an older one changes nothing.


RosterKey = tuple[str, str]
"""(unit, gate)"""


class Roster:
    """The valid reports, by unit and gate. `own` is the reading gate, whose own reports are ignored."""

    def __init__(self, own: str, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.own = own
        self._patience_s = EXPIRY_HEARTBEATS * heartbeat_s
        self._units: dict[str, dict[str, tuple[UnitReport, float]]] = {}
        """By unit and gate: the report and its time."""
        self._beat_at: dict[str, float] = {}
        """By gate: when it last said that what it has told still holds."""
        self._answering_since: float | None = None
        self._numbers: dict[RosterKey, int] = {}
        """Of the newest verdicts that were heard, also of reports that have ended."""
        self._passed_on: dict[RosterKey, tuple[int, Verdict]] = {}
        """The verdicts that others here were told of last."""

    def answered(self, seen: Mapping[RosterKey, Seen], now: float) -> list[RosterKey]:
        """Redis has answered with all reports. Returns those that are new."""
        if self._answering_since is None:
            self._answering_since = now
        return [key for key, one in seen.items() if self.update(key, one, now)]

    def update(self, key: RosterKey, one: Seen, now: float) -> bool:
        """One report has arrived, in an answer or on the channel. False: it is older than the known one."""
        unit, gate = key
        number, at = one.report.number, now - one.age_s
        newest = self._numbers.get(key, 0)
        if gate == self.own or number < newest:
            return False
        known = self._units.get(unit, {}).get(gate)
        if known is not None and at < known[1] and number == newest:
            return False
        self._set(key, one.report, at)
        return True

    def is_news(self, key: RosterKey, report: UnitReport) -> bool:
        """Whether its verdict is one that others here were not told of; it counts as told from now on."""
        number, verdict = self._passed_on.get(key, (-1, report.verdict))
        if (report.number, report.verdict) == (number, verdict) or report.number < number:
            return False
        self._passed_on[key] = report.number, report.verdict
        return True

    def keep(self, keys: Collection[RosterKey]) -> None:
        """Forget the verdicts of all others."""
        for known in (self._numbers, self._passed_on):
            for key in [key for key in known if key not in keys]:
                del known[key]

    def beat(self, gate: str, at: float) -> None:
        """What the gate has told of its units still held then."""
        self._beat_at[gate] = max(at, self._beat_at.get(gate, at))

    def change(self, key: RosterKey, row: Row | None, at: float) -> UnitReport | None:
        """A beat that was written then says what has changed of a unit. Returns the new report; None: it has
        gone, is not known whole, or was told of later than that.
        """
        unit, gate = key
        known, reported_at = self._units.get(unit, {}).get(gate, (None, at))
        newest = self._numbers.get(key, 0)
        number = _count(row.get("number")) if row is not None else None
        if (number or newest) < newest or (at < reported_at and (number or 0) <= newest):
            return None
        report = (
            changed_report(gate, unit, row, known, max(at - reported_at, 0.0)) if row is not None else None
        )
        if report is not None:
            self._set(key, report, at)
        elif row is None:
            self._drop(key)
        return report

    def drop_older(self, gate: str, before: float) -> None:
        """The gate has told of all its units since then, and has no others."""
        for unit, gates in list(self._units.items()):
            if gate in gates and gates[gate][1] < before:
                self._drop((unit, gate))

    def silent(self) -> None:
        """Redis does not answer: keep what is known."""
        self._answering_since = None

    def missed(self, now: float) -> set[str]:
        """The gates with overdue reports, which must be probed."""
        return {gate for _, gate in self._missed_keys(now)}

    def not_ready(self, gates: Collection[str], now: float) -> None:
        """These missing gates do not answer either, or are not ready: their old reports end."""
        for key in [key for key in self._missed_keys(now) if key[1] in gates]:
            self._drop(key)

    def forget(self, before: float) -> None:
        """Drop reports from before then: their gates have ended, or no longer have the unit."""
        for unit, gates in list(self._units.items()):
            for gate in [gate for gate, (_, at) in gates.items() if self._at(gate, at) < before]:
                self._drop((unit, gate))
        self._beat_at = {gate: at for gate, at in self._beat_at.items() if at >= before}

    def of(self, unit: str, now: float) -> MergedReport | None:
        """The combined report of the other gates on a unit."""
        said = self._units.get(unit, {}).items()
        return merge_reports([Seen(report, now - self._at(gate, at)) for gate, (report, at) in said])

    def said(self, unit: str, gate: str) -> UnitReport | None:
        """The report of one other gate on a unit."""
        found = self._units.get(unit, {}).get(gate)
        return found[0] if found is not None else None

    def remote_load(self, unit: str, now: float) -> RemoteLoad:
        """What the other gates report of it. Old reports do not count."""
        said = self._units.get(unit, {}).items()
        reports = [report for gate, (report, at) in said if now - self._at(gate, at) <= self._patience_s]
        return RemoteLoad(
            sum(report.in_flight for report in reports),
            sum(min(report.prefilling, report.in_flight) for report in reports),
            sum(report.uncached_tokens for report in reports),
            max((report.errors for report in reports), default=0.0),
            max((report.degraded for report in reports), default=0.0),
            max((report.itl_s or 0.0 for report in reports), default=0.0),
            any(report.drained for report in reports),
        )

    def expires_at(self, now: float) -> float:
        """When the next report becomes too old for its requests to count; inf: none will."""
        times = [at + self._patience_s for _, _, at in self.everything()]
        return min((at for at in times if at >= now), default=math.inf)

    def lived_at(self, unit: str) -> tuple[float, str] | None:
        """When another gate last saw progress of the unit, and which gate."""
        said = self._units.get(unit, {}).items()
        lives = ((at - v.life_age_s, gate) for gate, (v, at) in said if v.life_age_s is not None)
        return max(lives, default=None)

    def everything(self) -> Iterator[tuple[RosterKey, UnitReport, float]]:
        """Each valid report, and when its gate last said that it holds."""
        for unit, gates in self._units.items():
            for gate, (report, at) in gates.items():
                yield (unit, gate), report, self._at(gate, at)

    def reported_at(self, unit: str, gate: str) -> float:
        """When that report was written: its ages are as of then."""
        return self._units[unit][gate][1]

    def units(self) -> set[str]:
        """All units that another gate reports."""
        return set(self._units)

    def gates(self, now: float) -> set[str]:
        """The gates whose reports are recent."""
        return {gate for (_, gate), _, at in self.everything() if now - at <= self._patience_s}

    def _missed_keys(self, now: float) -> Iterator[RosterKey]:
        if self._answering_since is None or now - self._answering_since < self._patience_s:
            return
        yield from (key for key, _, at in self.everything() if now - at > self._patience_s)

    def _at(self, gate: str, reported_at: float) -> float:
        return max(reported_at, self._beat_at.get(gate, reported_at))

    def _set(self, key: RosterKey, report: UnitReport, at: float) -> None:
        unit, gate = key
        gates = self._units.setdefault(unit, {})
        gates[gate] = report, max(at, gates[gate][1]) if gate in gates else at
        self._numbers[key] = report.number

    def _drop(self, key: RosterKey) -> None:
        unit, gate = key
        gates = self._units.get(unit, {})
        gates.pop(gate, None)
        if not gates:
            self._units.pop(unit, None)
