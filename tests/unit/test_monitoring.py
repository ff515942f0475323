"""Alerts and the dashboard: they go by metrics that there are, alerts have pages, panels do not overlap."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import yaml
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from cellgate.proxy.control.comparisons import node_facts_metrics
from cellgate.proxy.control.containment import Containment, poison_metrics
from cellgate.proxy.control.model_capacity import Capacity, Starts
from cellgate.proxy.discovery.follow import Discovery, discovery_metrics
from cellgate.proxy.ingress.haproxy import Balancers, HaproxyAgent
from cellgate.proxy.observe.counters import Metrics
from cellgate.proxy.observe.events import EventLog
from cellgate.proxy.observe.exposition import (
    Exposition,
    Traffic,
    access_log_metrics,
    agent_check_metrics,
    node_agent_metrics,
    pool_metrics,
)
from cellgate.proxy.observe.helpers import Helpers
from cellgate.proxy.observe.routing_metrics import RoutingMetrics
from cellgate.proxy.process.certificates import Expiry, certificate_metrics
from cellgate.router.board import Board
from cellgate.router.nouns import (
    Ask,
    Evidence,
    Fleet,
    Load,
    Models,
    Node,
    NodeFacts,
    Role,
    Rules,
    Sign,
    Strength,
    Unit,
)
from cellgate.router.queue import FairRules, Queue
from tests.extras import needs
from tests.unit.observe.test_metrics import DONE

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
RUNBOOKS = ROOT / "docs" / "runbooks"
RULES: list[dict[str, Any]] = yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"][0]["rules"]
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
# Prometheus makes `up` itself.
NAME = re.compile(r"\b(?:cellgate|process)_\w+|\bup(?=\{)")


def exposed() -> list[Family]:
    """What a gate exposes that has units, agents, balancers, workers and a Redis."""
    from cellgate.extras.redis.link import redis_metrics
    from cellgate.extras.workers.control_process import WorkerMetrics, WorkerTotals

    board = Board(Rules())
    board.configure(Fleet(units=(Unit("a1", "a", "http://a1", nodes=(Node("a1-0", Role.LEADER),)),)), 0.0)
    board.observe(Evidence("a1", Sign.GOOD, Strength.WEAK, "agent", "all run", 1.0, node="a1-0"))
    board.report(Load("a1", 1.0))
    metrics = Metrics(board)
    sides = {"client": 0, "unit": 0}
    metrics.include(Exposition(metrics, waiting=lambda: 0, connections=lambda: sides).collect)
    metrics.include(Traffic(metrics).collect)
    metrics.finished(DONE)
    metrics.recoveries["a", "gave_up"] = 0
    events = EventLog(float, 2, log=lambda _level, _line: None)
    nobody = cast("Any", None)
    metrics.include(
        partial(poison_metrics, Containment(board, nobody, events, float, nobody, answered=len, ban_s=1.0))
    )
    routing = RoutingMetrics(board, Queue(FairRules()))
    routing.completed(board.open("a1", Ask(), 1.0, retry=False), None, 3)
    metrics.include(routing.collect)
    workers: Any = SimpleNamespace(totals={0: WorkerTotals()}, deaths=0, lost_attempts=0, accepting=int)
    metrics.include(WorkerMetrics(workers, 0).collect)
    link: Any = SimpleNamespace(state="", peers=lambda: 0, counts=Counter[str]())
    metrics.include(partial(redis_metrics, link, board))
    sources = SimpleNamespace(connected=lambda: {"file units.yaml": True})
    metrics.include(partial(discovery_metrics, cast("Discovery", sources)))
    board.units["a1"].facts.nodes["a1-0"] = NodeFacts("a1", "a1-0", 1.0)
    metrics.include(partial(node_facts_metrics, board))
    helpers = Helpers(events, float)
    helpers.watch(lambda: {"Redis": None})
    helpers.look()
    metrics.include(helpers.collect)
    metrics.include(partial(certificate_metrics, lambda: [Expiry("tls.cert", "a.pem", 1.0)]))
    metrics.include(partial(node_agent_metrics, lambda: {("a1", "a1-0"): True}))
    agent = HaproxyAgent(board, float, lambda: False, lambda _: True, Balancers())
    capacity, starts = Capacity(board, lambda _: None, float), Starts(board, lambda _: None)
    board.set_models(Models("a1", ("tiny",), 1.0))
    board.observe(Evidence("a1", Sign.GOOD, Strength.STRONG, "canary", "", 1.0))
    board.configure(Fleet(units=(*(each.unit for each in board), Unit("a2", "a", "http://a2"))), 2.0)
    capacity.tick(2.0)
    starts.tick(9000.0)
    metrics.include(capacity.collect)
    metrics.include(starts.collect)
    metrics.include(partial(agent_check_metrics, agent))
    metrics.include(partial(access_log_metrics, int))
    metrics.include(partial(pool_metrics, board, int))
    return list(text_string_to_metric_families(asyncio.run(metrics.render()).decode()))


@needs("redis")
@needs("workers")
def test_every_metric_is_documented() -> None:
    names = [f"{each.name}_total" if each.type == "counter" else each.name for each in exposed()]
    documented = re.findall(
        r"`((?:cellgate_|vllm:)\w+)(?:\{\w|`)", (ROOT / "docs" / "metrics.md").read_text()
    )
    ours = {name for name in names if name.startswith(("cellgate_", "vllm:"))}
    assert ours - set(documented) == set()
    assert len(ours) > 50


def expressions() -> list[str]:
    """All that Prometheus is asked for."""
    panels = [target["expr"] for panel in PANELS for target in panel["targets"]]
    variables = [
        each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"
    ]
    return (
        [rule["expr"] for rule in RULES] + panels + variables + [DASHBOARD["annotations"]["list"][0]["expr"]]
    )


@needs("redis")
@needs("workers")
def test_every_metric_and_label_that_is_asked_for_exists() -> None:
    """Prometheus adds job and instance to each; quantiles need le."""
    shown = {sample.name: set(sample.labels) for family in exposed() for sample in family.samples}
    asked = {name for expr in expressions() for name in NAME.findall(expr)}
    assert asked - shown.keys() == {"up"}
    assert len(asked) > 25
    for expr in expressions():
        for name, labels in re.findall(r"\b(cellgate_\w+)\{([^}]*)\}", expr):
            terms = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", labels))
            assert terms <= shown[name] | {"job", "instance"}, (name, expr)


def test_every_alert_says_how_urgent_it_is_and_has_a_page_that_tells_what_to_do_and_a_test() -> None:
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket")
        address = urlsplit(rule["annotations"]["runbook_url"])
        assert address.scheme == "https"
        page = (ROOT / address.path.lstrip("/")).read_text()
        assert page.startswith("# ")
        for words in (rule["alert"], "## What it means", "## What to do", "## When it clears"):
            assert words in page, (rule["alert"], words)
    tests = yaml.safe_load((MONITORING / "rules_test.yaml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in RULES}, "a test sees each fire"


def test_there_is_no_page_without_an_alert_and_each_is_in_the_list() -> None:
    pages = {rule["annotations"]["runbook_url"].rpartition("/")[2] for rule in RULES}
    assert {path.name for path in RUNBOOKS.glob("*.md")} == pages | {"README.md"}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", (RUNBOOKS / "README.md").read_text())) == pages


def test_the_dashboard_is_what_its_maker_makes() -> None:
    made = runpy.run_path(str(MONITORING / "make_dashboard.py"))["text"]()
    assert (MONITORING / "dashboard.json").read_text() == made


def test_panels_stand_side_by_side_can_be_told_apart_and_say_what_they_show() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert 0 <= at["x"] < at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        refs = [target["refId"] for target in panel["targets"]]
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["datasource"]["uid"] == "${source}"
        assert len(set(refs)) == len(refs) > 0
