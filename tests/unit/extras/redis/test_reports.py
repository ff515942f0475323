"""What gates exchange: the document of a unit, heartbeats with what has changed, and what else is read."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict, fields, replace
from math import ceil, inf
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.extras.redis import roster as roster_module
from cellgate.extras.redis import sharing
from cellgate.extras.redis.reports import (
    CORE,
    DOCUMENT_BEATS,
    DOCUMENT_MAX,
    LIFE_GRAIN_S,
    ROWS_LEAST,
    ROWS_READ,
    WINDOW,
    BeatReader,
    BeatWriter,
    Seen,
    UnitReport,
    changed_report,
    read_beat,
    read_report,
    report_of,
    written,
)
from cellgate.extras.redis.roster import Roster
from cellgate.extras.redis.sharing import DOCUMENTS_S, ReportReading
from cellgate.extras.redis_client.redis_names import Names
from cellgate.router.nouns import Ask, Evidence, Load, Sign, Strength, Unit, Verdict
from tests.unit.router.fleets import board_up

ROOT = Path(__file__).parents[4]
VIEW = UnitReport("u1", "a", "g1", Verdict.UP, "http://10.0.0.1:8000", 3)

names = st.text("aZ9._-", max_size=20).map("u".__add__)
numbers = st.floats(0.0, 1e9)
maybe = st.none() | numbers
views = st.builds(
    UnitReport,
    unit=names,
    cell=names,
    gate=names,
    verdict=st.sampled_from(Verdict),
    url=st.sampled_from(["http://10.0.0.1:8000", "https://[::1]:1", "http://leader-0.units"]),
    in_flight=st.integers(0, 10_000),
    reason=st.text(max_size=256).map(lambda text: "".join(filter(str.isprintable, text))),
    fatal=st.booleans(),
    drained=st.booleans(),
    degraded=st.floats(0.0, 1.0),
    weight=numbers,
    models=st.lists(names, max_size=2).map(tuple),
    prefilling=st.integers(0, 10**6),
    uncached_tokens=st.integers(0, 10**9),
    life_age_s=maybe,
    running=st.none() | st.integers(0, 10**6),
    kv_use=maybe,
    itl_s=maybe,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


law = settings(max_examples=40)


@law
@given(report=views)
def test_what_is_written_is_read(report: UnitReport) -> None:
    assert read_report(written(report)) == report


@given(document=st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_garbage_says_nothing_and_raises_nothing(document: bytes) -> None:
    assert read_report(document) is None


@given(
    changes=st.dictionaries(st.sampled_from(sorted(asdict(VIEW))), json_values, max_size=6),
    version=st.sampled_from([1, 1, 2, 0, None, "1", 10**30]),
)
def test_a_field_that_makes_no_sense_takes_no_other_along(changes: dict[str, Any], version: object) -> None:
    document = {"v": version, **asdict(VIEW), "verdict": "up", **changes}
    found = read_report(json.dumps(document).encode())
    if found is None:
        assert changes.keys() & {"unit", "cell", "gate", "verdict"}
        return
    for name in CORE:
        if name not in changes:
            assert getattr(found, name) == getattr(VIEW, name)
    assert read_report(written(found)) == found


def test_of_another_version_only_the_core_is_read_and_of_what_is_too_large_nothing() -> None:
    document = {"v": 2, **asdict(replace(VIEW, kv_use=0.5, reason="x")), "verdict": "up", "new": [1]}
    assert read_report(json.dumps(document).encode()) == VIEW
    for verdict in ("sleeping", "", 1, None, ["up"]):
        assert read_report(json.dumps(document | {"v": 1, "verdict": verdict}).encode()) is None
    large = written(replace(VIEW, models=("m" * 100,) * 1000))
    assert len(large) > DOCUMENT_MAX
    assert read_report(large) is None
    keys = Names("x:")
    assert (keys.units_of("g1"), keys.gates_of("a")) == ("x:units:g1", "x:cell:a")
    assert keys.unit("u1", "g1") == "x:units:g1:u1"


def test_the_page_names_each_field_and_no_other() -> None:
    text = (ROOT / "docs" / "redis.md").read_text()
    table = text.partition("| field | is |")[2].partition("\n\n")[0]
    named = [name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split(" | ")[0])]
    assert sorted(named) == sorted(["v", *(field.name for field in fields(UnitReport))])


def test_a_desk_is_written_as_it_is() -> None:
    here = board_up(Unit("u1", "a", "http://10.0.0.1:8000", models=("m",)), at=1.0)
    here.open("u1", Ask(prompt_bytes=2800), 2.0, retry=False)
    here.report(Load("u1", 2.5, running=4, waiting=2, kv_use=0.25))
    found = report_of(here.units["u1"], "g1", 3.0, progress_at=1.0)
    assert (found.verdict, found.in_flight, found.uncached_tokens) == (Verdict.UP, 1, 700)
    assert (found.running, found.waiting, found.kv_use, found.load_age_s) == (4, 2, 0.25, 0.5)
    assert (found.life_age_s, found.fatal, found.models) == (2.0, False, ("m",))
    assert read_report(written(found)) == found
    here.observe(Evidence("u1", Sign.BAD, Strength.FATAL, "tcp_accept", "refused", 4.0))
    found = report_of(here.units["u1"], "g1", 5.0)
    assert (found.verdict, found.fatal, found.reason) == (Verdict.DOWN, True, "refused")


# Heartbeats with what has changed: a reader knows all that the writer knows, as long as it misses few.

BEAT_S, EXPIRY_S = 0.25, 0.75
AT_ONCE = 50
"""Documents, as this Redis gives them."""


def report(unit: str = "u1", **fields: Any) -> UnitReport:
    return UnitReport(unit, "a", "g1", Verdict.UP, f"http://{unit}:8000", **fields)


class Gates:
    """One gate writes, another reads."""

    def __init__(self, *reports: UnitReport) -> None:
        self.now, self.others = 100.0, 1
        self.writer, self.roster = BeatWriter("g1"), Roster("g2")
        self.counts = {"beats_read": 0, "documents_read": 0, "documents_refused": 0}
        self.reading = ReportReading(self.roster, lambda: self.now, EXPIRY_S, self.counts, lambda *_: None)
        self.reports = {each.unit: each for each in reports}
        self.documents: dict[str, UnitReport] = {}
        self.at_documents: Callable[[], object] = lambda: None
        self.write()

    def write(self, beats: int = 1) -> dict[str, Any]:
        """Beats, and documents beside them; the rows of the last one."""
        for _ in range(beats):
            self.now += BEAT_S
            for unit in self.writer.units() - self.reports.keys():
                self.writer.leave(unit)
                self.documents.pop(unit, None)
            for each in self.reports.values():
                self.writer.take(replace(each, at_s=self.now), self.now)
            self.text, due = self.writer.beat(self.now, has_prefixes=False, others=self.others)
            self.documents |= {each.unit: each for each in due}
        return self.rows(None)

    def rows(self, last: int | None) -> dict[str, Any]:
        """What the beat has for who has read that one last."""
        beat = read_beat(self.text, "g1")
        assert beat is not None
        return dict(beat.since(beat.number + last if last is not None else None))

    async def get_beats(self, gates: Iterable[str]) -> AsyncIterator[tuple[str, Any]]:
        for gate in gates:
            yield gate, self.text

    async def documents_of(self, _gate: str, cursor: int) -> tuple[int, list[tuple[str, bytes]]]:
        self.at_documents()
        found = [(unit, written(each)) for unit, each in self.documents.items()][cursor:]
        return (cursor + AT_ONCE) * (len(found) > AT_ONCE), found[:AT_ONCE]

    def read(self) -> int:
        """A look at Redis; how many documents were read."""
        before = self.counts["documents_read"]
        commands = Mock(get_beats=self.get_beats, documents=self.documents_of)
        asyncio.run(self.reading.read(commands, {"g1", "g2"}))
        return self.counts["documents_read"] - before

    def known(self) -> dict[str, UnitReport]:
        return {unit: replace(said, at_s=None) for (unit, _), said, _ in self.roster.everything()}


def test_a_change_is_in_so_many_beats_and_only_the_field_that_changed_by_more_than_its_grain() -> None:
    gates = Gates(*(report(f"u{number}") for number in range(200)))
    assert gates.write(WINDOW) == {}
    assert len(gates.text) < 85
    gates.reports["u1"] = report("u1", in_flight=3)
    for beat in range(WINDOW):
        assert gates.write() == {"u1": {"in_flight": 3}}
        assert gates.rows(-1) == ({"u1": {"in_flight": 3}} if beat == 0 else {})
    assert gates.write() == {}
    gates = Gates(report(life_age_s=0.0))
    for beat in range(1, WINDOW + 1):
        gates.reports["u1"] = report(life_age_s=beat * BEAT_S)
        rows = gates.write()
    assert rows == {}
    gates.reports["u1"] = report(life_age_s=0.0)
    assert gates.write() == {"u1": {"life_age_s": 0.0}}
    assert LIFE_GRAIN_S < WINDOW * BEAT_S


def test_the_document_of_a_unit_is_written_when_it_changes_and_rarely_as_long_as_it_goes_on_changing() -> (
    None
):
    gates = Gates(*(report(f"u{number}") for number in range(20)))
    assert len(gates.documents) == 20
    counts = []
    for beat in range(3 * DOCUMENT_BEATS + 1):
        gates.reports["u1"] = report("u1", in_flight=beat)
        if beat == DOCUMENT_BEATS // 2:
            gates.reports["u2"] = report("u2", number=7)
        gates.documents.clear()
        gates.write()
        counts.append(list(gates.documents))
    assert [beat for beat, units in enumerate(counts) if "u1" in units] == [9, 19, 29]
    assert [beat for beat, units in enumerate(counts) if "u2" in units] == [5], "a verdict at once"
    assert sum(map(len, counts)) == 4
    gates.writer.restart()
    gates.write()
    assert len(gates.documents) == 20, "a new connection"


def test_who_missed_beats_reads_all_documents_at_once_and_once_more_when_each_has_what_was_missed() -> None:
    """And knows then that a unit is gone."""
    gates = Gates(report("u1"), report("u2"))
    read = [gates.read() for _ in range(2 * DOCUMENT_BEATS) if gates.write() is not None]
    assert read == [2, *[0] * (DOCUMENT_BEATS - 1), 2, *[0] * (DOCUMENT_BEATS - 1)]
    gates.write(WINDOW)
    assert not gates.read()
    del gates.reports["u2"]
    gates.write(WINDOW + 1)
    assert gates.read() == 1
    assert gates.known().keys() == {"u1", "u2"}
    for _ in range(DOCUMENT_BEATS):
        gates.write()
        gates.read()
    assert gates.known().keys() == {"u1"}


def test_a_redis_that_has_lost_the_documents_of_a_gate_takes_none_of_its_units() -> None:
    gates = Gates(report("u1"), report("u2"))
    gates.read()
    gates.documents.clear()
    for _ in range(2 * DOCUMENT_BEATS):
        gates.write()
        gates.read()
    assert gates.known().keys() == {"u1", "u2"}
    gates.writer.restart()
    gates.write()
    assert gates.read() == 2


def test_a_gate_is_heard_and_its_news_counts_before_its_documents_are_read() -> None:
    """Those of 63 gates before 1,000 units take so long that each look was too late for the next one."""
    gates, heard = Gates(*(report(f"u{number}") for number in range(3 * AT_ONCE))), list[int]()
    gates.at_documents = lambda: heard.append(len(gates.roster.gates(gates.now)))
    gates.read()
    assert set(heard) == {1}, "by its first heartbeat, which says nothing"
    gates.reports["u1"] = report("u1", in_flight=3)
    gates.write(2 * WINDOW)
    gates.at_documents = lambda: heard.append(gates.roster.remote_load("u1", gates.now).in_flight)
    heard.clear()
    gates.reports["u1"] = report("u1", in_flight=4)
    gates.write()
    gates.read()
    assert set(heard) == {4}


def test_a_look_at_slow_documents_ends_and_the_next_one_goes_on_where_it_ended() -> None:
    gates = Gates(*(report(f"u{number}") for number in range(4 * AT_ONCE)))

    def take_long() -> None:
        gates.now += 0.6 * DOCUMENTS_S

    gates.at_documents = take_long
    assert [gates.read() for _ in range(3)] == [2 * AT_ONCE, 2 * AT_ONCE, 0]


def test_of_a_gate_that_waited_for_its_turn_until_its_documents_have_all_they_are_read_once() -> None:
    gates = Gates(report("u1"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "DOCUMENTS_READ", 0)
        for _ in range(DOCUMENT_BEATS + 1):
            assert gates.read() == 0
            gates.write()
    assert [gates.read() for _ in range(2 * DOCUMENT_BEATS) if gates.write() is not None] == [
        1,
        *[0] * (2 * DOCUMENT_BEATS - 1),
    ]


def test_a_heartbeat_that_comes_late_or_a_new_connection_has_no_document_read_again() -> None:
    gates = Gates(report("u1"))
    for _ in range(2 * DOCUMENT_BEATS):
        gates.write()
        gates.read()
    text, gates.text = gates.text, b""
    assert gates.read() == 0
    gates.text = text
    gates.reports["u1"] = report("u1", in_flight=3)
    gates.write(WINDOW - 1)
    gates.reading.restart()
    assert gates.read() == 0
    assert gates.known() == gates.reports


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_a_gate_whose_reports_were_ended_here_is_read_again_when_it_goes_on(is_forgotten: bool) -> None:
    """It was frozen for a second, and its next heartbeat follows the last one."""
    gates = Gates(report("u1"))
    for _ in range(2 * DOCUMENT_BEATS):
        gates.write()
        gates.read()
    gates.now += 1.0
    gates.text = b""
    gates.read()
    if is_forgotten:
        gates.roster.forget(gates.now)
    else:
        gates.roster.not_ready({"g1"}, gates.now)
    assert gates.known() == {}
    gates.write()
    assert gates.read() == 1
    assert gates.known() == gates.reports


def test_of_many_gates_each_tells_fewer_changes_of_load_at_a_time_the_oldest_first_and_all_else_at_once() -> (
    None
):
    """So that who reads them all pays no more; and nothing that had to wait is lost."""
    gates = Gates(*(report(f"u{number}") for number in range(100)))
    gates.write(WINDOW)
    gates.read()
    gates.others = 2 * ROWS_READ // ROWS_LEAST
    for unit in gates.reports:
        gates.reports[unit] = report(unit, in_flight=1)
    gates.reports["u99"] = report("u99", in_flight=1, drained=True)
    told: list[str] = []
    for beat in range(ceil(100 / (ROWS_LEAST - 1))):
        gates.reports["u0"] = report("u0", in_flight=2 + beat)
        gates.write()
        assert len(gates.rows(-1)) <= ROWS_LEAST
        assert beat or "u99" in gates.rows(-1)
        told += gates.rows(-1)
        gates.read()
    assert len(set(told)) == 100
    assert told.index("u0", 2) == 100, "in its turn"
    gates.write(2)
    gates.read()
    assert gates.known() == gates.reports


def test_when_a_beat_was_written_is_known_without_a_clock_in_common() -> None:
    rng, reader, ahead_s = Random(1), BeatReader(EXPIRY_S), 1e5

    def error_s(number: int, written_at: float, read_at: float) -> float:
        text = b'{"v":1,"gate":"g1","beat":%d,"units":{},"at_s":%f}' % (number, written_at - ahead_s)
        beat = read_beat(text, "g1")
        assert beat is not None
        heard = reader.hear(beat, read_at)
        return heard.at - written_at if heard is not None else inf

    first_s = error_s(1, 1e6, 1e6 + 0.6)
    errors = [
        error_s(number, 1e6 + BEAT_S * number, 1e6 + BEAT_S * number + rng.uniform(0.001, BEAT_S))
        for number in range(2, 600)
    ]
    assert first_s == pytest.approx(0.6)
    assert all(-1e-5 < error < 0.01 for error in errors[100:])
    at = 1e6 + BEAT_S * 599
    assert error_s(599, at, at + EXPIRY_S) < 0.01, "the same again"
    assert error_s(599, at, at + 3 * EXPIRY_S) == inf, "nobody writes it any more"
    # That gate's machine has stood still for an hour, and then it is another one of this name.
    ahead_s += 3600.0
    assert error_s(600, at + 3600.0, at + 3600.1) == pytest.approx(0.1)
    ahead_s = -1e5
    assert error_s(1, at + 3610.0, at + 3610.2) == pytest.approx(0.2)


def test_a_reader_whose_own_clock_stood_still_once_does_not_take_others_for_silent() -> None:
    """A loop tells the time at which its turn began: what is read late in it seems to be of the future. What
    was not there when the last look began was written since.
    """
    reader, errors = BeatReader(EXPIRY_S), []
    for number in range(1, 100):
        written_at = 1e6 + BEAT_S * number
        late_s = 0.9 if number == 10 else 0.0
        asked_at = written_at + 0.05 - late_s
        text = b'{"v":1,"gate":"g1","beat":%d,"units":{},"at_s":%f}' % (number, written_at)
        beat = read_beat(text, "g1")
        assert beat is not None
        heard = reader.hear(beat, asked_at + 0.01, asked_at)
        assert heard is not None
        errors.append(heard.at - written_at)
    assert all(-BEAT_S < error < 0.1 for error in errors)


def test_a_gate_that_ends_while_something_of_it_was_missed_is_forgotten() -> None:
    gates = Gates(report("u1"))
    gates.read()
    gates.reading.restart()
    gates.text = b""
    gates.read()
    assert gates.known().keys() == {"u1"}


def test_what_a_full_redis_did_not_take_is_told_whole() -> None:
    gates = Gates(report("u1", in_flight=3))
    gates.documents.clear()
    gates.read()
    gates.write(2 * WINDOW)
    gates.writer.refused([gates.reports["u1"]])
    gates.reports["u1"] = report("u1", in_flight=4)
    gates.write()
    gates.read()
    assert gates.known() == gates.reports


@pytest.mark.parametrize("seed", range(8))
def test_a_reader_knows_what_the_writer_knows(seed: int) -> None:
    rng = Random(seed)
    gates, checked = Gates(*(report(f"u{number}") for number in range(5))), 0
    for _ in range(300):
        for _ in range(rng.randrange(3)):
            unit = f"u{rng.randrange(6)}"
            if rng.random() < 0.05:
                gates.reports.pop(unit, None)
            else:
                before = gates.reports.get(unit, report(unit))
                kv_use, in_flight = rng.choice((None, before.kv_use, 0.5)), rng.randrange(4)
                gates.reports[unit] = replace(before, kv_use=kv_use, in_flight=in_flight)
        # Now and then it stands still for longer than the window.
        gates.write(rng.choice((1, 1, 2, WINDOW, 3 * WINDOW if rng.random() < 0.05 else 1)))
        gates.read()
        if not gates.reading._beats.behind:
            checked += 1
            assert gates.known() == gates.reports
    assert checked > 100


def test_what_is_no_beat_of_that_gate_is_none_and_what_is_invalid_ignored_field_by_field() -> None:
    beat: dict[str, Any] = {"v": 1, "gate": "g1", "beat": 1, "units": {}}
    assert read_beat(json.dumps(beat).encode(), "g1") is not None
    changes: list[dict[str, Any]] = [{"v": 2}, {"gate": "g2"}, {"beat": "1"}, {"units": []}]
    wrong: list[Any] = [[], {}, *(beat | changed for changed in changes)]
    for text in (None, b"", *(json.dumps(each).encode() for each in wrong)):
        assert read_beat(text, "g1") is None
    known = report(in_flight=2, kv_use=0.5, life_age_s=1.0)
    row = {"in_flight": -1, "kv_use": None, "verdict": "dead", "what": 1, "reason": "so"}
    changed = changed_report("g1", "u1", row, known, 2.0)
    assert changed == replace(known, kv_use=None, reason="so", life_age_s=3.0)
    assert changed_report("g1", "u1", {"unit": "u2"}, known, 0.0) is None
    assert changed_report("g1", "u1", {"gate": "g3"}, known, 0.0) is None
    part = changed_report("g1", "u9", {"in_flight": 1}, None, 0.0)
    assert part is not None
    assert (part.in_flight, part.is_whole) == (1, False)


def test_a_report_holds_as_long_as_its_gate_has_a_beat() -> None:
    roster = Roster("g2")
    roster.update(("u1", "g1"), Seen(report(in_flight=5, life_age_s=1.0), 0.0), 10.0)
    roster.beat("g1", 20.0)
    assert roster.remote_load("u1", 20.5).in_flight == 5
    assert roster.lived_at("u1") == (9.0, "g1")
    assert roster.gates(20.5) == {"g1"}
    assert roster.remote_load("u1", 20.8).in_flight == 0


@pytest.mark.parametrize("few", [0, 1, 4])
@pytest.mark.parametrize("seed", range(10))
def test_what_is_kept_of_a_unit_is_what_all_its_reports_say_together(
    seed: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster_module, "SUMS_CHANGED", few)
    rng, now = Random(seed), 1000.0
    roster = Roster("me")
    for _ in range(600):
        now += rng.choice((0.0, 0.01, 0.3))
        unit, gate = f"u{rng.randrange(3)}", f"g{rng.randrange(4)}"
        word = rng.randrange(8)
        if word == 0:
            roster.beat(gate, now - rng.random())
        elif word == 1:
            roster.change((unit, gate), None, now)
        elif word == 2:
            roster.change((unit, gate), {"errors": rng.choice((0.0, 0.5, 1.0))}, now)
        elif word == 3:
            roster.forget(now - 2.0)
        else:
            one = UnitReport(unit, "a", gate, Verdict.UP, in_flight=rng.randrange(4), prefilling=2)
            one.errors, one.degraded, one.itl_s = (rng.choice((0.0, 0.5, 1.0)) for _ in range(3))
            one.drained, one.life_age_s = rng.random() < 0.2, rng.choice((None, 0.0, 1.0, 5.0))
            roster.update((unit, gate), Seen(one, rng.choice((0.0, 0.5))), now)
        for each in ("u0", "u1", "u2"):
            reports = {gate: roster.said(each, gate) for gate in ("g0", "g1", "g2", "g3")}
            said = {gate: one for gate, one in reports.items() if one is not None}
            counts = [report for gate, report in said.items() if gate in roster.gates(now)]
            load = roster.remote_load(each, now)
            assert load.in_flight == sum(one.in_flight for one in counts)
            assert load.prefilling == sum(min(2, one.in_flight) for one in counts)
            assert load.errors == max((one.errors for one in counts), default=0.0)
            assert load.degraded == max((one.degraded for one in counts), default=0.0)
            assert load.itl_s == max((one.itl_s or 0.0 for one in counts), default=0.0)
            assert load.drained == any(one.drained for one in counts)
            ages = [(roster.reported_at(each, gate), one.life_age_s, gate) for gate, one in said.items()]
            lives = [(at - age_s, gate) for at, age_s, gate in ages if age_s is not None]
            assert roster.lived_at(each) == max(lives, default=None)
