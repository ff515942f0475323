"""The document that gates exchange: it survives its way, garbage says nothing, and views merge by rule."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.redis.reports import (
    CORE,
    DOCUMENT_MAX,
    Names,
    Seen,
    UnitReport,
    age_s,
    merge_reports,
    read_report,
    report_of,
    written,
)
from cellgate.router.board import Board
from cellgate.router.nouns import Ask, Evidence, Fleet, Load, Rules, Sign, Strength, Unit, Verdict

ROOT = Path(__file__).parents[3]
VIEW = UnitReport("u1", "a", "g1", Verdict.UP, "http://10.0.0.1:8000", 3)

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
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
    reason=st.text(max_size=256).filter(lambda text: text.isprintable()),
    fatal=st.booleans(),
    drained=st.booleans(),
    degraded=st.floats(0.0, 1.0),
    weight=numbers,
    models=st.lists(names, max_size=4).map(tuple),
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


def test_of_another_version_only_the_core_is_read() -> None:
    document = {"v": 2, **asdict(replace(VIEW, kv_use=0.5, reason="x")), "verdict": "up", "new": [1]}
    assert read_report(json.dumps(document).encode()) == VIEW


@pytest.mark.parametrize("verdict", ["sleeping", "", 1, None, ["up"]])
def test_without_a_verdict_that_is_known_there_is_nothing_to_go_by(verdict: object) -> None:
    assert read_report(json.dumps({"v": 1, **asdict(VIEW), "verdict": verdict}).encode()) is None


def test_what_is_too_large_is_not_even_parsed() -> None:
    document = written(replace(VIEW, models=("m" * 100,) * 1000))
    assert len(document) > DOCUMENT_MAX
    assert read_report(document) is None


@pytest.mark.parametrize(
    ("pttl_ms", "age"),
    [(750, 0.001), (500, 0.251), (0, 0.751), (900, 0.001), (-1, None), (-2, None), (9_000, None)],
)
def test_the_age_follows_from_the_time_that_is_left(pttl_ms: int, age: float | None) -> None:
    assert age_s(pttl_ms, 0.75) == age


def test_names_can_be_told_apart() -> None:
    keys = Names("x:")
    assert (keys.unit("u1", "g1"), keys.units_of("a")) == ("x:unit:u1:g1", "x:cell:a")


seen = st.builds(Seen, views, st.floats(0.0, 10.0))


@given(told=st.lists(seen, min_size=1, max_size=5), order=st.randoms())
def test_gates_merge_to_any_fatal_word_else_the_freshest(told: list[Seen], order: Any) -> None:
    merged = merge_reports(told)
    assert merged is not None
    fatal = [one for one in told if one.report.fatal]
    among = fatal or told
    assert any(merged.report == one.report for one in among)
    assert min(one.age_s for one in among) == min(one.age_s for one in among if one.report == merged.report)
    assert merged.in_flight == sum(one.report.in_flight for one in told)
    # Two views of one gate and one age cannot be: only then the order would matter.
    if len({(one.age_s, one.report.gate) for one in told}) == len(told):
        shuffled = told.copy()
        order.shuffle(shuffled)
        assert merge_reports(shuffled) == merged


def test_the_page_names_each_field_and_no_other() -> None:
    text = (ROOT / "docs" / "redis.md").read_text()
    table = text.partition("| field | is |")[2].partition("\n\n")[0]
    named = [name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split(" | ")[0])]
    assert sorted(named) == sorted(["v", *(field.name for field in fields(UnitReport))])


def test_nobody_says_nothing() -> None:
    assert merge_reports([]) is None


def board() -> Board:
    """One unit that is UP."""
    made = Board(Rules())
    made.configure(Fleet(units=(Unit("u1", "a", "http://10.0.0.1:8000", models=("m",)),)), 0.0)
    made.observe(Evidence("u1", Sign.GOOD, Strength.STRONG, "canary", "it answers", 1.0))
    return made


def test_a_desk_is_written_as_it_is() -> None:
    here = board()
    here.open("u1", Ask(prompt_bytes=2800), 2.0, retry=False)
    here.report(Load("u1", 2.5, running=4, waiting=2, kv_use=0.25))
    report = report_of(here.units["u1"], "g1", 3.0, progress_at=1.0)
    assert (report.verdict, report.in_flight, report.uncached_tokens, report.models) == (
        Verdict.UP,
        1,
        700,
        ("m",),
    )
    assert (report.running, report.waiting, report.kv_use, report.load_age_s) == (4, 2, 0.25, 0.5)
    assert (report.life_age_s, report.fatal) == (2.0, False)
    assert read_report(written(report)) == report
    here.observe(Evidence("u1", Sign.BAD, Strength.FATAL, "tcp_accept", "refused", 4.0))
    report = report_of(here.units["u1"], "g1", 5.0)
    assert (report.verdict, report.fatal, report.reason) == (Verdict.DOWN, True, "refused")
