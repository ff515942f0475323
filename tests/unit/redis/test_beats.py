"""Heartbeats with what has changed: a reader knows all that the writer knows, as long as it misses few."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import orjson
import pytest

from cellgate.proxy.redis.reports import (
    DOCUMENT_BEATS,
    LIFE_GRAIN_S,
    WINDOW,
    BeatReader,
    BeatWriter,
    Roster,
    Seen,
    UnitReport,
    changed_report,
    read_beat,
)
from cellgate.router.nouns import Verdict

BEAT_S = 0.25


def report(unit: str = "u1", **fields: Any) -> UnitReport:
    return UnitReport(unit, "a", "g1", Verdict.UP, f"http://{unit}:8000", **fields)


class Gates:
    """One gate writes, another reads."""

    def __init__(self, *reports: UnitReport) -> None:
        self.now = 100.0
        self.writer, self.reader, self.roster = BeatWriter("g1"), BeatReader(), Roster("g2")
        self.reports = {each.unit: each for each in reports}
        self.documents: dict[str, tuple[UnitReport, float]] = {}
        self.behind = False
        self.write()

    def write(self, beats: int = 1) -> dict[str, Any]:
        """Beats, and documents beside them; the rows of the last one."""
        for _ in range(beats):
            self.now += BEAT_S
            for each in self.reports.values():
                self.writer.take(each, self.now)
            self.text, due = self.writer.beat(has_prefixes=False)
            self.documents |= {each.unit: (each, self.now) for each in due}
        rows: dict[str, Any] = orjson.loads(self.text)["units"]
        return rows

    def read(self) -> None:
        """As ReportReading does."""
        beat = read_beat(self.text, "g1")
        assert beat is not None
        self.behind = self.reader.misses(beat, self.now)
        if self.behind:
            for each, at in self.documents.values():
                self.roster.update((each.unit, "g1"), Seen(each, self.now - at), self.now)
        self.roster.beat("g1", self.now)
        for unit, row in beat.rows.items():
            self.roster.change((unit, "g1"), row, self.now)
        if (since := self.reader.whole_since(beat)) is not None:
            self.roster.drop_older("g1", since)

    def known(self) -> dict[str, UnitReport]:
        return {unit: said for (unit, _), said, _ in self.roster.everything()}


def test_a_gate_with_nothing_new_sends_a_small_beat() -> None:
    gates = Gates(*(report(f"u{number}") for number in range(200)))
    assert gates.write(WINDOW) == {}
    assert len(gates.text) < 70


def test_a_change_is_in_so_many_beats_and_only_the_field_that_changed() -> None:
    gates = Gates(report("u1"), report("u2"))
    gates.write(WINDOW)
    gates.reports["u1"] = report("u1", in_flight=3)
    for _ in range(WINDOW):
        assert gates.write() == {"u1": {"in_flight": 3}}
    assert gates.write() == {}


def test_progress_is_told_when_it_is_new_by_more_than_its_grain() -> None:
    gates = Gates(report(life_age_s=0.0))
    for beat in range(1, WINDOW + 1):
        gates.reports["u1"] = report(life_age_s=beat * BEAT_S)
        rows = gates.write()
    assert rows == {}
    gates.reports["u1"] = report(life_age_s=0.0)
    assert gates.write() == {"u1": {"life_age_s": 0.0}}
    assert LIFE_GRAIN_S < WINDOW * BEAT_S


def test_documents_are_written_in_turns_and_all_after_a_new_connection() -> None:
    gates = Gates(*(report(f"u{number}") for number in range(20)))
    counts = []
    for _ in range(DOCUMENT_BEATS):
        gates.documents.clear()
        gates.write()
        counts.append(len(gates.documents))
    assert counts == [2] * DOCUMENT_BEATS
    gates.writer.restart()
    gates.documents.clear()
    gates.write()
    assert len(gates.documents) == 20


def test_who_missed_beats_reads_documents_until_each_was_written_again() -> None:
    gates = Gates(report())
    for _ in range(DOCUMENT_BEATS + WINDOW + 2):
        gates.write()
        gates.read()
        assert gates.behind
    gates.write(WINDOW)
    gates.read()
    assert not gates.behind
    gates.write(WINDOW + 1)
    gates.read()
    assert gates.behind


def test_a_unit_that_the_gate_has_no_more_is_forgotten_also_by_who_missed_that() -> None:
    gates = Gates(report("u1"), report("u2"), report("u3"))
    for _ in range(2 * DOCUMENT_BEATS):
        gates.write()
        gates.read()
    del gates.reports["u2"], gates.documents["u2"]
    gates.write()
    gates.read()
    assert gates.known().keys() == {"u1", "u3"}
    del gates.reports["u3"], gates.documents["u3"]
    gates.write(3 * WINDOW)
    gates.read()
    assert gates.known().keys() == {"u1", "u3"}
    for _ in range(DOCUMENT_BEATS + WINDOW + 1):
        gates.write()
        gates.read()
    assert gates.known().keys() == {"u1"}


@pytest.mark.parametrize("seed", range(20))
def test_a_reader_knows_what_the_writer_knows(seed: int) -> None:
    rng = Random(seed)
    gates = Gates(*(report(f"u{number}") for number in range(5)))
    for _ in range(300):
        for _ in range(rng.randrange(3)):
            unit = f"u{rng.randrange(6)}"
            if rng.random() < 0.05:
                gates.reports.pop(unit, None)
                gates.documents.pop(unit, None)
            else:
                before = gates.reports.get(unit, report(unit))
                kv_use, in_flight = rng.choice((None, before.kv_use, 0.5)), rng.randrange(4)
                gates.reports[unit] = replace(before, kv_use=kv_use, in_flight=in_flight)
        # Now and then it stands still for longer than the window.
        gates.write(rng.choice((1, 1, 2, WINDOW, 3 * WINDOW if rng.random() < 0.05 else 1)))
        gates.read()
        if not gates.behind:
            assert gates.known() == gates.reports


def test_what_is_invalid_is_ignored_field_by_field() -> None:
    known = report(in_flight=2, kv_use=0.5, life_age_s=1.0)
    row = {"in_flight": -1, "kv_use": None, "verdict": "dead", "what": 1, "reason": "so"}
    changed = changed_report("g1", "u1", row, known, 2.0)
    assert changed == replace(known, kv_use=None, reason="so", life_age_s=3.0)
    assert changed_report("g1", "u1", {"unit": "u2"}, known, 0.0) is None
    assert changed_report("g1", "u1", {"gate": "g3"}, known, 0.0) is None
    assert changed_report("g1", "u9", {"in_flight": 1}, None, 0.0) is None


@pytest.mark.parametrize(
    "text",
    [
        None,
        b"",
        b"[]",
        b"{}",
        b'{"v":2,"gate":"g1","beat":1,"units":{}}',
        b'{"v":1,"gate":"g2","beat":1,"units":{}}',
        b'{"v":1,"gate":"g1","beat":"1","units":{}}',
        b'{"v":1,"gate":"g1","beat":1,"units":[]}',
    ],
)
def test_what_is_no_beat_of_that_gate_is_none(text: bytes | None) -> None:
    assert read_beat(text, "g1") is None


def test_a_report_holds_as_long_as_its_gate_has_a_beat() -> None:
    roster = Roster("g2")
    roster.update(("u1", "g1"), Seen(report(in_flight=5, life_age_s=1.0), 0.0), 10.0)
    roster.beat("g1", 20.0)
    assert roster.elsewhere("u1", 20.5).in_flight == 5
    assert roster.lived_at("u1") == (9.0, "g1")
    assert roster.gates(20.5) == {"g1"}
    assert roster.elsewhere("u1", 20.8).in_flight == 0
