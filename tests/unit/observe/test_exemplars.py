"""Exemplars: traced requests beside the buckets of histograms, for scrapers that can read them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from cellgate.proxy.observe.counters import PLAIN, Metrics
from tests.unit.observe.test_metrics import A1, A2, DONE, make

PROMETHEUS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
TRACE = "0af7651916cd43dd8448eb211c80319c"


def finished(metrics: Metrics, unit: str, ttft_s: float | None, trace_id: str = "") -> None:
    """A request has ended; with an id it was traced."""
    metrics.finished(DONE._replace(unit=unit, ttft_s=ttft_s))
    if trace_id:
        metrics.traced(unit, ttft_s, DONE.duration_s, trace_id)


def with_exemplars(metrics: Metrics) -> list[Sample]:
    """The samples that have one; the page is read by a strict parser."""
    encoding = metrics.encoding_for(PROMETHEUS)
    assert encoding.content_type.startswith("application/openmetrics-text")
    page = asyncio.run(metrics.render(encoding)).decode()
    assert page.endswith("# EOF\n")
    assert page.count("# EOF") == 1
    families: Iterable[Metric] = text_string_to_metric_families(page)  # type: ignore[no-untyped-call]
    return [sample for family in families for sample in family.samples if sample.exemplar is not None]


def test_a_traced_request_stands_beside_its_buckets() -> None:
    metrics, _ = make(A1, A2)
    finished(metrics, "a1", 0.19)
    finished(metrics, "a1", 0.2, TRACE)
    duration, ttft = sorted(with_exemplars(metrics), key=lambda sample: sample.name)
    assert ttft.name == "cellgate_ttft_seconds_bucket"
    assert ttft.labels == {"cell": "a", "le": "0.2"}
    assert ttft.exemplar is not None
    assert ttft.exemplar.labels == {"trace_id": TRACE}
    assert ttft.exemplar.value == 0.2
    assert duration.name == "cellgate_request_duration_seconds_bucket"
    assert duration.labels["le"] == "2.0"


def test_the_latest_of_a_bucket_is_kept_and_no_other() -> None:
    metrics, _ = make(A1, A2)
    for number in range(1000):
        finished(metrics, "a1", 0.2, f"{number:032x}")
    shown = with_exemplars(metrics)
    assert [each.exemplar.labels["trace_id"] for each in shown if each.exemplar] == [f"{999:032x}"] * 2


def test_a_request_without_a_token_has_one_of_its_duration_only() -> None:
    metrics, _ = make(A1)
    finished(metrics, "", None, TRACE)
    assert [sample.name for sample in with_exemplars(metrics)] == ["cellgate_request_duration_seconds_bucket"]


def test_without_traced_requests_and_for_others_the_format_stays_as_it_was() -> None:
    metrics, _ = make(A1)
    finished(metrics, "a1", 0.2)
    assert metrics.encoding_for(PROMETHEUS) is PLAIN
    finished(metrics, "a1", 0.2, TRACE)
    assert metrics.encoding_for("text/plain") is PLAIN
    assert metrics.encoding_for("") is PLAIN
    assert b"# {" not in asyncio.run(metrics.render())
