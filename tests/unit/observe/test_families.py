"""Families of metrics: what is written here is what the library would write."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder

from cellgate.proxy.observe.counters import Histogram
from cellgate.proxy.observe.families import (
    LINES_A_TURN,
    PLAIN,
    Encoding,
    Family,
    counter,
    gauge,
    one_gauge,
    open_encoding,
    summary,
)
from cellgate.proxy.observe.routing_metrics import UnitHistograms, UnitSource

OPEN = open_encoding("application/openmetrics-text; version=1.0.0")
ROWS = st.lists(st.tuples(st.tuples(st.text(), st.text()), st.floats() | st.integers(0, 10**9)), max_size=5)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\\\n"))


class OfTheLibrary(Metric):
    """The same family with the samples of the library's own."""

    def __init__(self, family: Family) -> None:
        super().__init__(family.name, family.documentation, family.type)
        self.samples = family.samples


def by_the_library(encoding: Encoding, *families: Family) -> bytes:
    return encoding.text(OfTheLibrary(family) for family in families)


@given(ROWS, TEXTS)
def test_lines_are_those_of_the_library(rows: list[tuple[tuple[str, str], float]], text: str) -> None:
    counts = [(labels, 3, value) for labels, value in rows]
    families = (
        counter("a", text, ("unit", "cause"), rows),
        gauge("b_seconds", text, ("cause", "unit"), rows),
        summary("c", text, ("unit", "kind"), counts),
        gauge("d", text, "unit", [(labels[0], value) for labels, value in rows]),
        one_gauge("e", text, 1e7),
    )
    for encoding in (PLAIN, OPEN):
        assert encoding.text(families) == by_the_library(encoding, *families)


def test_a_client_that_wants_openmetrics_gets_its_version() -> None:
    accept = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert open_encoding(accept).content_type == choose_encoder(accept)[1]
    assert OPEN.text([one_gauge("a", "A.", 1.0)]).endswith(b"\n# EOF\n")


def test_a_turn_of_the_loop_writes_a_bounded_number_of_lines() -> None:
    rows = [((f"u{number}",), 1.0) for number in range(2 * LINES_A_TURN + 1)]
    head, *parts = PLAIN.parts(gauge("a", "A.", ("unit",), rows))
    assert head.startswith(b"# HELP")
    assert [part.count(b"\n") for part in parts] == [LINES_A_TURN, LINES_A_TURN, 1]
    assert len(list(chain.from_iterable(part.splitlines() for part in parts))) == len(rows)


def test_what_a_unit_counted_in_the_cell_that_it_has_left_stays_as_it_was() -> None:
    waits, family = Histogram((1.0,)), UnitHistograms("waits", "W.", (1.0,), Histogram.counted)
    for cell in "abb":
        waits.observe(0.5)
        shown = list(family.collect([UnitSource(cell, "u", waits)]))
    samples = [sample for each in shown if each is not None for sample in each.samples]
    counts = {each.labels["cell"]: each.value for each in samples if each.name.endswith("_count")}
    assert counts == {"a": 2, "b": 3}, "seen when it had left, and all of it"
