"""The bounds in one place: each has a name in the metrics, and a row in the page that operators read."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from cellgate.proxy.config.limits import LIMITS, REACHED, HardLimits, reached
from cellgate.proxy.workers.remote import new_counts
from tests.unit.observe.test_metrics import A1, make, scrape

SECURITY = Path(__file__).parents[3] / "docs" / "security.md"


def test_a_bound_that_took_effect_is_counted_by_its_name() -> None:
    metrics, _ = make(A1)
    before = scrape(metrics)["cellgate_limits_total{limit=header_lines}"]
    reached("header_lines")
    assert scrape(metrics)["cellgate_limits_total{limit=header_lines}"] == before + 1


def test_what_workers_have_counted_is_added() -> None:
    metrics, _ = make(A1)
    before = scrape(metrics)["cellgate_limits_total{limit=json_depth}"]
    metrics.limits["json_depth"] += 3
    assert scrape(metrics)["cellgate_limits_total{limit=json_depth}"] == before + 3


def test_a_worker_tells_what_is_new() -> None:
    before = dict(REACHED)
    reached("stop_bytes")
    reached("stop_bytes")
    assert new_counts(REACHED, before) == [("stop_bytes", 2)]
    assert new_counts(REACHED, before) == []


def test_a_name_that_is_no_bound_cannot_be_counted() -> None:
    with pytest.raises(KeyError):
        reached("a_typo")


def test_every_bound_is_positive_and_has_a_count() -> None:
    names = [field.name for field in fields(HardLimits)]
    assert list(REACHED) == names
    assert all(getattr(LIMITS, name) > 0 for name in names)


def test_the_page_of_security_has_a_row_for_each_bound_with_its_figure() -> None:
    section = SECURITY.read_text().partition("\n## Limits\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d,]+)", section, re.MULTILINE))
    assert {name: int(figure.replace(",", "")) for name, figure in rows.items()} == {
        field.name: getattr(LIMITS, field.name) for field in fields(HardLimits)
    }
