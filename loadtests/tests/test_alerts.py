"""What the drill asks of Prometheus: faster rules are the shipped ones, panels are asked as by Grafana."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from loadtests.up.alerts import RULES, Prometheus, questions, sped_up
from loadtests.up.drill import EMPTY

TEXT = RULES.read_text()


def test_rules_that_are_not_faster_are_the_shipped_ones() -> None:
    assert yaml.safe_load(sped_up(TEXT, 1).replace("60s", "1m")) is not None
    assert re.findall(r"for: (\w+)", sped_up("for: 1m\nfor: 5m\nfor: 2h", 1)) == ["60s", "300s", "7200s"]


def test_all_that_is_said_in_minutes_and_hours_passes_as_much_faster() -> None:
    faster = sped_up(TEXT, 20)
    assert not re.search(r"\b\d+[mh]\b", faster)
    assert "[10m]" in TEXT
    assert "[30s]" in faster
    assert sped_up("rate(a[1h]) > 0.05 for: 1m", 30) == "rate(a[120s]) > 0.05 for: 2s"
    assert sped_up("for: 1m", 600) == "for: 1s"


def test_nothing_else_of_the_rules_changes() -> None:
    times = re.compile(r"\b\d+[smh]\b")
    assert times.sub("", sped_up(TEXT, 20)) == times.sub("", TEXT)


def test_panels_that_may_be_empty_are_panels() -> None:
    assert EMPTY.keys() <= {question.panel for question in questions()}


@pytest.mark.parametrize(
    ("values", "has"),
    [([], False), ([[1.0, "NaN"], [2.0, "NaN"]], False), ([[1.0, "NaN"], [2.0, "0"]], True)],
)
def test_a_panel_has_data_where_some_value_is_a_number(
    values: list[list[Any]], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def ask(_self: Prometheus, path: str, **fields: object) -> dict[str, Any]:
        asked.update(fields, path=path)
        return {"result": [{"values": values}] if values else []}

    monkeypatch.setattr(Prometheus, "ask", ask)
    expr = 'rate(a{job=~"$job", unit=~"$unit"}[$__rate_interval])'
    assert Prometheus(1).has_data(expr, 60.0, rate_interval_s=4) is has
    assert asked["query"] == 'rate(a{job=~".*", unit=~".*"}[4s])'
    assert asked["end"] - asked["start"] == pytest.approx(60.0)
