"""The heartbeat of a gate: one small JSON document with what has changed of its units. Pure.

1. A beat is written four times a second, and has all that has changed within the last WINDOW beats. Who reads
   it at least that often knows all that the gate knows; one in which nothing changed is 60 bytes.
2. The documents of units (unit_report.py) are written in turns, each once in DOCUMENT_BEATS. Who is new, or
   has missed beats, reads them until each has been written again.
3. A gate that is gone has no beat. A gate of an earlier version has none either, and writes its documents as
   often as beats are written: these are read instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from operator import attrgetter
from typing import Any

import orjson

from cellgate.proxy.sharing.unit_report import DOCUMENT_BEATS, READERS, UnitReport

VERSION = 1
WINDOW = 4
"""A reader that stands still for less than a second misses nothing."""
LIFE_GRAIN_S = 0.5
"""Progress is told again when it is so much later than what was told last."""
BEAT_MAX = 4 * 1024 * 1024
"""Bytes of a beat that are read: 10,000 units of which all is new."""

_AGES = ("life_age_s", "load_age_s")
_TOLD = tuple(each.name for each in fields(UnitReport) if each.name not in (*_AGES, "gate"))
_values = attrgetter(*_TOLD)
_NULLABLE = frozenset(each.name for each in fields(UnitReport) if each.default is None)
_REQUIRED = frozenset(each.name for each in fields(UnitReport) if each.default is MISSING)

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
        self._told: dict[str, tuple[Any, ...]] = {}
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
        gone = self._told.keys() - reports.keys()
        for name in gone:
            del self._told[name]
            self._lived_at.pop(name, None)
        self._recent.append(self._changed | dict.fromkeys(gone))
        self._number, self._changed = self._number + 1, {}
        rows = {name: _row(reports.get(name), names) for name, names in self._names().items()}
        told = {
            "v": VERSION,
            "gate": self._gate,
            "beat": self._number,
            "prefixes": has_prefixes,
            "units": rows,
        }
        return orjson.dumps(told), list(self._due(reports))

    def _due(self, reports: Mapping[str, UnitReport]) -> Iterator[UnitReport]:
        self._documents &= reports.keys()
        for turn, (name, report) in enumerate(reports.items()):
            if (self._number + turn) % DOCUMENT_BEATS == 0 or name not in self._documents:
                self._documents.add(name)
                yield report

    def _change(self, report: UnitReport, now: float) -> set[str]:
        """The fields that differ from what was told of the unit."""
        values, before = _values(report), self._told.get(report.unit)
        self._told[report.unit] = values
        changed: set[str] = set()
        if before is None:
            changed = {*_TOLD, "gate"}
        elif before != values:
            changed = {name for name, old, new in zip(_TOLD, before, values, strict=True) if old != new}
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
    if not isinstance(found, dict) or found.get("v") != VERSION or found.get("gate") != gate:
        return None
    number, rows = found.get("beat"), found.get("units")
    if not isinstance(number, int) or not isinstance(rows, dict):
        return None
    return Beat(gate, number, found.get("prefixes") is True, rows)


def changed_report(
    gate: str, unit: str, row: Row, known: UnitReport | None, told_s: float
) -> UnitReport | None:
    """The report of a unit after a change; None when it is not known whole. `told_s`: how long ago the known
    one was told. Fields that are invalid are ignored one by one.
    """
    taken = {name: value for name, value in _fields(row) if value is not None or name in _NULLABLE}
    if any(taken.get(name, value) != value for name, value in (("unit", unit), ("gate", gate))):
        return None
    if known is None:
        is_whole = taken.keys() >= _REQUIRED
        return UnitReport(**taken) if is_whole else None
    if known.life_age_s is not None:
        taken.setdefault("life_age_s", known.life_age_s + told_s)
    if known.load_age_s is not None:
        taken.setdefault("load_age_s", known.load_age_s + told_s)
    return replace(known, **taken)


def _fields(row: Row) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if (read := READERS.get(name)) is not None:
            yield name, read(value)


def _row(report: UnitReport | None, names: set[str] | None) -> dict[str, Any] | None:
    if report is None or names is None:
        return None
    return {name: getattr(report, name) for name in sorted(names)}
