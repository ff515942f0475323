"""What is counted, what a scrape shows, and what can never become a label."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as exact_families
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from cellgate.proxy.ingress.haproxy import Balancers, HaproxyAgent
from cellgate.proxy.observe.access_log import Finished
from cellgate.proxy.observe.counters import LAGS_KEPT, Metrics
from cellgate.proxy.observe.exposition import (
    OWN_ROUTES,
    SAMPLES,
    STEP_S,
    Exposition,
    History,
    Traffic,
    access_log_metrics,
    agent_check_metrics,
    node_agent_metrics,
    pool_metrics,
)
from cellgate.proxy.observe.families import PLAIN
from cellgate.proxy.request.routes import find_route
from cellgate.router.board import Board, DownCause, Flip
from cellgate.router.nouns import (
    Ask,
    Evidence,
    Fleet,
    Load,
    Outcome,
    Refusal,
    Rules,
    Sign,
    Strength,
    Unit,
    Verdict,
)
from cellgate.router.outliers import Outlier
from tests.unit.observe.test_logs import DONE as LOGGED
from tests.unit.router.fleets import board_of, board_up

A1 = Unit("a1", "a", "http://127.0.0.1:8101")
A2 = Unit("a2", "a", "http://127.0.0.1:8102")
B1 = Unit("b1", "b", "http://127.0.0.1:8103")
DONE = LOGGED._replace(ttft_s=0.2, events=12, bytes_in=100, bytes_out=900)


def make(*units: Unit) -> tuple[Metrics, Board]:
    board = board_of(*units)
    metrics, sides = Metrics(board), {"client": 5, "unit": 2}
    metrics.include(
        Exposition(metrics, waiting=lambda: 3, connections=lambda: sides, suspended=lambda: 7).collect
    )
    metrics.include(Traffic(metrics).collect)
    return metrics, board


def scrape(metrics: Metrics) -> dict[str, float]:
    """All that a page has."""
    return samples(text_string_to_metric_families(asyncio.run(metrics.render()).decode()))


def samples(families: Iterable[Any]) -> dict[str, float]:
    """All samples as `name{label=value,…}` (labels sorted); fails when one is there twice."""
    shown: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
        name = f"{sample.name}{{{labels}}}" if labels else sample.name
        assert name not in shown
        shown[name] = sample.value
    return shown


def record(**changes: object) -> Finished:
    return DONE._replace(**changes)  # type: ignore[arg-type]


def test_requests_and_attempts_are_counted() -> None:
    metrics, _ = make(A1, A2)
    metrics.finished(DONE)
    metrics.finished(DONE)
    metrics.finished(record(status=503, unit="", ttft_s=None, code="no_unit"))
    metrics.attempt("a1", Outcome.EVICTED)
    metrics.attempt("a2", Outcome.OK)
    shown = scrape(metrics)
    assert shown["cellgate_client_requests_total{route=generate,status=200}"] == 2
    assert shown["cellgate_client_requests_total{route=generate,status=503}"] == 1
    assert shown["cellgate_bytes_total{direction=in}"] == 300
    assert shown["cellgate_bytes_total{direction=out}"] == 2700
    assert shown["cellgate_attempts_total{outcome=evicted,unit=a1}"] == 1
    assert shown["cellgate_attempts_total{outcome=ok,unit=a2}"] == 1
    assert shown["cellgate_attempts_total{outcome=ok,unit=a1}"] == 0


def test_latencies_fall_into_inclusive_cumulated_buckets_of_the_cell_of_the_unit_that_answered() -> None:
    metrics, _ = make(A1, A2, B1)
    for unit, ttft_s in (("a1", 0.2), ("a2", 0.21), ("a2", 400.0), ("b1", 0.2), ("", None)):
        metrics.finished(record(unit=unit, ttft_s=ttft_s))
    shown = scrape(metrics)
    for bound, count in (("0.15", 0), ("0.2", 1), ("0.3", 2), ("300.0", 2), ("+Inf", 3)):
        assert shown[f"cellgate_ttft_seconds_bucket{{cell=a,le={bound}}}"] == count
    assert shown["cellgate_ttft_seconds_sum{cell=a}"] == pytest.approx(400.41)
    for cell, count in (("a", 3), ("b", 1), ("", 1)):
        assert shown[f"cellgate_request_duration_seconds_count{{cell={cell}}}"] == count
    assert "cellgate_ttft_seconds_count{cell=}" not in shown
    for unit, count, sum_s in (("a1", 1, 0.2), ("a2", 2, 400.21)):
        assert shown[f"cellgate_unit_ttft_seconds_count{{unit={unit}}}"] == count
        assert shown[f"cellgate_unit_ttft_seconds_sum{{unit={unit}}}"] == pytest.approx(sum_s)


def test_the_histogram_of_a_cell_never_falls() -> None:
    """Prometheus would take it for a restart of the gate, and all that is left for new observations."""
    metrics, board = make(A1, A2)
    for unit in ("a1", "a2"):
        metrics.finished(record(unit=unit))
    board.units["a1"].gaps_ms[9] += 1
    scrape(metrics)
    metrics.finished(DONE)
    board.units["a1"].gaps_ms[9] += 1
    board.configure(Fleet(units=(A2,)), 2.0)
    for _ in range(2):
        shown = scrape(metrics)
        assert shown["cellgate_ttft_seconds_count{cell=a}"] == 3
        assert shown["cellgate_inter_token_latency_seconds_count{cell=a}"] == 2
    board.configure(Fleet(units=(A1, A2)), 3.0)
    metrics.finished(DONE)
    assert scrape(metrics)["cellgate_ttft_seconds_count{cell=a}"] == 4
    board.configure(Fleet(units=(replace(A1, cell="b"), A2)), 4.0)
    shown = scrape(metrics)
    assert shown["cellgate_ttft_seconds_count{cell=a}"] == 4
    assert shown["cellgate_ttft_seconds_count{cell=b}"] == 0, "a unit that moves begins there at zero"


def test_nothing_a_client_chose_becomes_a_label_and_what_the_gate_answers_itself_is_no_request() -> None:
    metrics, _ = make(A1)
    metrics.finished(record(route="health", unit=""))
    assert not [name for name in scrape(metrics) if name.startswith("cellgate_client_requests")]
    own = (b"/health", b"/readyz", b"/livez", b"/v1/models", b"/healthz/unit/a1")
    assert {find_route(path).name for path in own} == OWN_ROUTES
    metrics.finished(record(peer="evil", path="/evil", model="evil", method="EVIL", request_id="evil"))
    assert not [name for name in scrape(metrics) if "evil" in name.lower()]


def test_the_recent_time_to_first_token_follows_the_last_ten_or_twenty() -> None:
    metrics, _ = make(A1)
    assert metrics.recent_ttft_s("a1") is None
    metrics.finished(record(ttft_s=4.0))
    metrics.finished(record(ttft_s=None))
    assert metrics.recent_ttft_s("a1") == 4.0
    for _ in range(20):
        metrics.finished(record(ttft_s=1.0))
    recent_s = metrics.recent_ttft_s("a1")
    assert recent_s is not None
    assert 1.3 < recent_s < 1.4
    assert metrics.recent_ttft_s("a2") is None


def test_gaps_per_millisecond_become_exact_buckets() -> None:
    metrics, board = make(A1)
    gaps_ms = board.units["a1"].gaps_ms
    gaps_ms[9] += 1
    gaps_ms[10] += 2
    gaps_ms[-1] += 1
    shown = scrape(metrics)
    name = "cellgate_inter_token_latency_seconds"
    assert shown[f"{name}_bucket{{cell=a,le=0.01}}"] == 1
    assert shown[f"{name}_bucket{{cell=a,le=0.015}}"] == 3
    assert shown[f"{name}_bucket{{cell=a,le=4.0}}"] == 3
    assert shown[f"{name}_bucket{{cell=a,le=+Inf}}"] == 4
    assert shown[f"{name}_sum{{cell=a}}"] == (9.5 + 2 * 10.5 + 4095.5) / 1000


def test_exactly_one_verdict_of_a_unit_is_shown_as_one() -> None:
    metrics, board = make(A1)
    board.observe(Evidence("a1", Sign.BAD, Strength.FATAL, "request", "refused", 1.0))
    board.drain("a1", drained=True)
    shown = scrape(metrics)
    verdicts = {v: shown[f"cellgate_unit_verdict{{cell=a,unit=a1,verdict={v.value}}}"] for v in Verdict}
    assert verdicts == {v: float(v is Verdict.DOWN) for v in Verdict}
    assert shown["cellgate_unit_state{cell=a,state=drained,unit=a1}"] == 1


def test_flips_retries_refusals_and_lag_are_counted() -> None:
    metrics, _ = make(A1)
    why = Evidence("a1", Sign.GOOD, Strength.STRONG, "canary", "token", 1.0)
    metrics.flip(Flip("a1", "a", Verdict.STARTING, Verdict.UP, 1.0, why))
    metrics.flip(Flip("a1", "a", Verdict.STARTING, Verdict.STARTING, 1.0, why))
    down = replace(why, source="request", reason="refused")
    metrics.flip(Flip("a1", "a", Verdict.UP, Verdict.DOWN, 2.0, down, DownCause.REFUSED))
    metrics.retry("a1")
    metrics.refusal(Refusal.FULL)
    metrics.loop_lag(0.02)
    metrics.loop_lag(0.001)
    shown = scrape(metrics)
    assert shown["cellgate_flips_total{after=up,before=starting,unit=a1}"] == 1
    assert shown["cellgate_flips_total{after=starting,before=starting,unit=a1}"] == 1
    assert shown["cellgate_unit_downs_total{cause=refused,unit=a1}"] == 1
    assert shown["cellgate_retries_total{unit=a1}"] == 1
    assert shown["cellgate_refusals_total{reason=full}"] == 1
    assert shown["cellgate_loop_lag_max_seconds"] == 0.02
    for _ in range(LAGS_KEPT - 1):
        metrics.loop_lag(0.001)
    assert scrape(metrics)["cellgate_loop_lag_max_seconds"] == 0.001


def test_what_is_handed_in_is_shown_and_what_an_alert_may_watch_is_there_at_zero() -> None:
    shown = scrape(make(A1)[0])
    assert shown["cellgate_waiting"] == 3
    assert shown["cellgate_connections{side=client}"] == 5
    assert shown["cellgate_connections{side=unit}"] == 2
    assert shown["cellgate_evidence_suspended_total"] == 7
    assert shown["process_open_fds"] > 0
    assert [value for name, value in shown.items() if name.startswith("cellgate_build_info{")] == [1]
    causes = [f"cellgate_unit_downs_total{{cause={cause.value},unit=a1}}" for cause in DownCause]
    others = [
        "retries_total{unit=a1}",
        "attempts_total{outcome=ok,unit=a1}",
        "refusals_total{reason=no_unit}",
    ]
    assert {shown[name] for name in (*causes, *(f"cellgate_{other}" for other in others))} == {0}


def test_a_removed_unit_vanishes_when_its_last_stream_ends_and_a_replaced_one_counts_both_lives() -> None:
    metrics, board = make(A1, A2)
    metrics.attempt("a1", Outcome.OK)
    leases = [board.open("a1", Ask(), 1.0, retry=False)]
    board.configure(Fleet(units=(replace(A1, url="http://127.0.0.1:9999"), A2)), 2.0)
    leases.append(board.open("a1", Ask(), 3.0, retry=False))
    assert scrape(metrics)["cellgate_in_flight{unit=a1}"] == 2
    board.configure(Fleet(units=(A2,)), 4.0)
    for lease in leases:
        assert scrape(metrics)["cellgate_in_flight{unit=a1}"] > 0
        board.close(lease, 5.0)
    assert not [name for name in scrape(metrics) if "a1" in name]


def test_what_the_judge_makes_of_a_unit_and_what_its_engine_tells_is_shown() -> None:
    metrics, board = make(A1, A2)
    states = "cellgate_unit_state{cell=a,state=restart_suspected,unit="
    shown = scrape(metrics)
    assert shown["cellgate_unit_degraded{cell=a,unit=a1}"] == 0
    assert (shown[f"{states}a1}}"], shown["cellgate_panic"]) == (0, 0)
    board.units["a1"].outlier = Outlier(0.25)
    board.suspect_restart("a1", 9.0)
    board.panic_at = 9.0
    board.report(Load("a1", 8.5, running=4, waiting=2, kv_use=0.25))
    shown = scrape(metrics)
    assert shown["cellgate_unit_degraded{cell=a,unit=a1}"] == 0.25
    assert (shown[f"{states}a1}}"], shown[f"{states}a2}}"], shown["cellgate_panic"]) == (1, 0, 1)
    assert shown["cellgate_unit_load_requests{state=running,unit=a1}"] == 4
    assert shown["cellgate_unit_load_requests{state=waiting,unit=a1}"] == 2
    assert shown["cellgate_unit_load_kv_use{unit=a1}"] == 0.25
    assert not [name for name in shown if name.startswith("cellgate_unit_load") and "a2" in name]


def test_a_node_is_up_by_the_last_word_of_each_source_about_it() -> None:
    metrics, board = make(A1)
    well = Evidence("a1", Sign.GOOD, Strength.WEAK, "agent", "runs", 1.0, node="n0")
    board.observe(well)
    board.observe(replace(well, node="n1"))
    board.observe(replace(well, node="n1", sign=Sign.NEUTRAL, reason="out of reach", at=2.0))
    board.observe(replace(well, source="readiness", node=None))
    ups = {name: value for name, value in scrape(metrics).items() if "node_up" in name}
    assert ups == {
        "cellgate_node_up{node=n0,source=agent,unit=a1}": 1,
        "cellgate_node_up{node=n1,source=agent,unit=a1}": 0,
    }


# What a scrape shows beside the gate's own counts: its lines to others, and the gate as one engine.

NOW = 100.0


def a_board(*units: str) -> Board:
    """A board of units that are UP, with ten places each."""
    made = (Unit(name, "c", f"http://{name}", max_in_flight=10) for name in units)
    return board_up(*made, rules=Rules(slow_start_s=0.001), at=1.0)


def test_questions_of_haproxy_are_counted_by_their_answers() -> None:
    agent = HaproxyAgent(a_board("u"), lambda: NOW, lambda: False, lambda _: True, Balancers())
    for question in (b"u\n", b"gate\n", b"v\n", b"what is up?\n"):
        agent.answer(question, "127.0.0.1")
    counts = {"up": 2, "drain": 0, "down": 0, "unknown": 1, "malformed": 1, "refused": 0, "too_many": 0}
    assert samples(agent_check_metrics(agent)) == {
        f"cellgate_agent_check_questions_total{{answer={answer}}}": count for answer, count in counts.items()
    }


def test_agents_are_shown_by_unit_and_node_and_lost_lines_are_counted() -> None:
    agents = {("u", "n0"): True, ("u", "n1"): False}
    assert samples(node_agent_metrics(lambda: agents)) == {
        "cellgate_agent_connected{node=n0,unit=u}": 1,
        "cellgate_agent_connected{node=n1,unit=u}": 0,
    }
    assert samples(access_log_metrics(lambda: 3)) == {"cellgate_access_log_dropped_total": 3}


def test_the_gate_as_one_engine_sums_its_usable_units_and_its_own_queue() -> None:
    board = a_board("u", "v", "w", "x")
    board.report(Load("u", NOW, running=4, waiting=2, kv_use=0.25))
    board.report(Load("v", NOW, running=1, waiting=0, kv_use=0.75))
    board.report(Load("x", NOW, running=9, waiting=9, kv_use=1.0))
    board.drain("x", drained=True)
    # Nothing was heard of the engine of w: the gate goes by its own count.
    board.open("w", Ask(), NOW, retry=False)
    assert samples(pool_metrics(board, lambda: 5)) == {
        "vllm:num_requests_running": 6,
        "vllm:num_requests_waiting": 7,
        "vllm:kv_cache_usage_perc": 0.5,
    }
    board = a_board("u")
    for full in (0, 1):
        assert samples(pool_metrics(board, int))["vllm:kv_cache_usage_perc"] == full
        board.observe(Evidence("u", Sign.BAD, Strength.FATAL, "canary", "refused", 2.0))


# The last hour in samples: rates of what was counted, never below zero, never more than an hour.


def test_a_sample_has_the_rates_of_its_step() -> None:
    metrics, _ = make(A1)
    tokens = 100
    history = History(metrics, lambda: tokens, lambda: 3)
    assert not any(shown for name, shown in history.shown().items() if name != "step_s")
    history.tick(0.0)
    for ttft_s, status in ((0.2, 200), (0.4, 200), (None, 503)):
        metrics.finished(record(ttft_s=ttft_s, status=status))
    metrics.finished(record(route="health", ttft_s=None))
    tokens = 350
    history.tick(STEP_S / 2)
    history.tick(STEP_S)
    history.tick(2 * STEP_S)
    assert history.shown() == {
        "step_s": STEP_S,
        "requests": [0.3, 0.0],
        "failed": [0.1, 0.0],
        "faulty": [0.0, 0.0],
        "ttft_s": [0.3, None],
        "tokens": [25.0, 0.0],
        "usable": [0, 0],
        "waiting": [3, 3],
    }
    del metrics.tallies["a1"]
    for step in range(3, SAMPLES + 10):
        history.tick(step * STEP_S)
    shown = history.shown()
    assert len(shown["requests"]) == SAMPLES, "only an hour is kept"
    assert set(shown["ttft_s"]) == {None}
    assert min(shown["requests"]) == 0, "a unit that leaves makes no rate negative"


# Exemplars: traced requests beside the buckets of histograms, for scrapers that can read them.

PROMETHEUS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
TRACE = "0af7651916cd43dd8448eb211c80319c"


def traced(metrics: Metrics, unit: str, ttft_s: float | None, trace_id: str) -> None:
    """A request has ended that was traced."""
    metrics.finished(record(unit=unit, ttft_s=ttft_s))
    metrics.traced(unit, ttft_s, DONE.duration_s, trace_id)


def with_exemplars(metrics: Metrics) -> list[Sample]:
    """The samples that have one; the page is read by a strict parser."""
    encoding = metrics.encoding_for(PROMETHEUS)
    assert encoding.content_type.startswith("application/openmetrics-text")
    page = asyncio.run(metrics.render(encoding)).decode()
    assert page.endswith("# EOF\n")
    assert page.count("# EOF") == 1
    families: Iterable[Metric] = exact_families(page)  # type: ignore[no-untyped-call]
    return [sample for family in families for sample in family.samples if sample.exemplar is not None]


def test_the_latest_traced_request_stands_beside_its_buckets() -> None:
    metrics, _ = make(A1, A2)
    metrics.finished(record(ttft_s=0.19))
    traced(metrics, "a1", 0.2, TRACE)
    duration, ttft = sorted(with_exemplars(metrics), key=lambda sample: sample.name)
    assert ttft.name == "cellgate_ttft_seconds_bucket"
    assert ttft.labels == {"cell": "a", "le": "0.2"}
    assert ttft.exemplar is not None
    assert ttft.exemplar.labels == {"trace_id": TRACE}
    assert ttft.exemplar.value == 0.2
    assert duration.name == "cellgate_request_duration_seconds_bucket"
    assert duration.labels["le"] == "2.0"
    for number in range(1000):
        traced(metrics, "a1", 0.2, f"{number:032x}")
    shown = with_exemplars(metrics)
    assert [each.exemplar.labels["trace_id"] for each in shown if each.exemplar] == [f"{999:032x}"] * 2
    metrics, _ = make(A1)
    traced(metrics, "", None, TRACE)
    assert [sample.name for sample in with_exemplars(metrics)] == [duration.name], "it had no token"


def test_without_traced_requests_and_for_others_the_format_stays_as_it_was() -> None:
    metrics, _ = make(A1)
    metrics.finished(DONE)
    assert metrics.encoding_for(PROMETHEUS) is PLAIN
    traced(metrics, "a1", 0.2, TRACE)
    assert metrics.encoding_for("text/plain") is PLAIN
    assert metrics.encoding_for("") is PLAIN
    assert b"# {" not in asyncio.run(metrics.render())
