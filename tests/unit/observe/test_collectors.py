"""What a scrape shows beside the gate's own counts: its lines to others, and the gate as one engine."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.registry import Collector

from cellgate.proxy.ingress.haproxy import Balancers, HaproxyAgent
from cellgate.proxy.observe.exposition import (
    AccessLogMetrics,
    AgentCheckMetrics,
    NodeAgentMetrics,
    PoolMetrics,
)
from cellgate.proxy.observe.routing_metrics import RoutingMetrics
from cellgate.proxy.redis.link import LinkState, RedisLink, RedisMetrics
from cellgate.proxy.redis.reports import Names, Roster, Seen, UnitReport
from cellgate.router.board import Board
from cellgate.router.cost_model import RemoteLoad
from cellgate.router.nouns import Ask, Evidence, Fleet, Load, Rules, Sign, Strength, Unit, Verdict
from cellgate.router.queue import FairRules, Queue

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"
NOW = 100.0


def a_link() -> tuple[RedisLink, Roster]:
    roster = Roster("me")
    link = RedisLink(
        lambda: None,  # type: ignore[arg-type,return-value]
        "me",
        lambda: (),
        roster,
        now=lambda: NOW,
        rng=random.Random(1),
        on_flip=lambda _: None,
        tell=lambda _: None,
        names=Names(),
    )
    return link, roster


def an_agent(board: Board) -> HaproxyAgent:
    return HaproxyAgent(board, lambda: NOW, lambda: False, lambda _: True, Balancers())


def a_board(*units: str) -> Board:
    """A board of units that are UP, with ten places each."""
    board = Board(Rules(slow_start_s=0.001))
    board.configure(
        Fleet(units=tuple(Unit(name, "c", f"http://{name}", max_in_flight=10) for name in units)), 0.0
    )
    for name in units:
        board.observe(Evidence(name, Sign.GOOD, Strength.STRONG, "canary", "a token", 1.0))
    return board


def samples(collector: Collector) -> dict[str, float]:
    """All samples as `name{label=value,…}`."""
    return dict(_shown(collector.collect()))


def _shown(families: Iterable[Metric]) -> Iterator[tuple[str, float]]:
    for family in families:
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sample.labels.items())
            yield (f"{sample.name}{{{labels}}}" if labels else sample.name), sample.value


def test_redis_is_up_once_it_answers_and_its_peers_are_who_was_heard_just_now() -> None:
    link, roster = a_link()
    board = a_board("u", "v")
    board.elsewhere = {"u": RemoteLoad(7)}
    shown = samples(RedisMetrics(link, board))
    assert shown.pop("cellgate_redis_up") == 0
    assert shown.pop("cellgate_in_flight_elsewhere{unit=u}") == 7
    assert len(shown) == 18
    assert set(shown.values()) == {0}
    link.state = LinkState.WELL
    link.counts["connects"] = 2
    for gate, age_s in (("one", 0.1), ("other", 0.7), ("gone", 0.8)):
        view = UnitReport("u", "c", gate, Verdict.UP)
        roster.update(("u", gate), Seen(view, age_s), NOW)
        roster.update(("v", gate), Seen(replace(view, unit="v"), age_s), NOW)
    shown = samples(RedisMetrics(link, board))
    assert shown["cellgate_redis_up"] == 1
    assert shown["cellgate_redis_peers"] == 2
    assert shown["cellgate_redis_connects_total{result=established}"] == 2


def test_questions_of_haproxy_are_counted_by_their_answers() -> None:
    agent = an_agent(a_board("u"))
    for question in (b"u\n", b"gate\n", b"v\n", b"what is up?\n"):
        agent.answer(question, "127.0.0.1")
    shown = samples(AgentCheckMetrics(agent))
    name = "cellgate_agent_check_questions_total"
    assert shown == {
        f"{name}{{answer={answer}}}": count
        for answer, count in {
            "up": 2,
            "drain": 0,
            "down": 0,
            "unknown": 1,
            "malformed": 1,
            "refused": 0,
            "too_many": 0,
        }.items()
    }


def test_agents_are_shown_by_unit_and_node() -> None:
    agents = {("u", "n0"): True, ("u", "n1"): False}
    assert samples(NodeAgentMetrics(lambda: agents)) == {
        "cellgate_agent_connected{unit=u,node=n0}": 1,
        "cellgate_agent_connected{unit=u,node=n1}": 0,
    }


def test_lost_lines_of_the_access_log_are_counted() -> None:
    assert samples(AccessLogMetrics(lambda: 3)) == {"cellgate_access_log_dropped_total": 3}


def test_the_gate_as_one_engine_sums_its_usable_units_and_its_own_queue() -> None:
    board = a_board("u", "v", "w", "x")
    board.report(Load("u", NOW, running=4, waiting=2, kv_use=0.25))
    board.report(Load("v", NOW, running=1, waiting=0, kv_use=0.75))
    board.report(Load("x", NOW, running=9, waiting=9, kv_use=1.0))
    board.drain("x", drained=True)
    # Nothing was heard of the engine of w: the gate goes by its own count.
    board.open("w", Ask(), NOW, retry=False)
    assert samples(PoolMetrics(board, lambda: 5)) == {
        "vllm:num_requests_running": 6,
        "vllm:num_requests_waiting": 7,
        "vllm:kv_cache_usage_perc": 0.5,
    }


def test_without_a_usable_unit_the_gate_is_a_full_engine() -> None:
    board = a_board("u")
    assert samples(PoolMetrics(board, int))["vllm:kv_cache_usage_perc"] == 0
    board.observe(Evidence("u", Sign.BAD, Strength.FATAL, "canary", "refused", 2.0))
    assert samples(PoolMetrics(board, int))["vllm:kv_cache_usage_perc"] == 1


def test_every_one_is_documented() -> None:
    board = a_board("u")
    collectors: list[Collector] = [
        RedisMetrics(a_link()[0], board),
        AgentCheckMetrics(an_agent(board)),
        NodeAgentMetrics(lambda: {("u", "n"): True}),
        AccessLogMetrics(int),
        PoolMetrics(board, int),
    ]
    names = {name.partition("{")[0] for collector in collectors for name in samples(collector)}
    documented = DOCS.read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in documented] == []


def test_those_of_routing_are_documented() -> None:
    families = list(RoutingMetrics(a_board("u"), Queue(FairRules())).collect())
    names = [f"{family.name}_total" if family.type == "counter" else family.name for family in families]
    assert len(names) == 9
    documented = DOCS.read_text()
    assert [name for name in names if f"`{name}`" not in documented] == []
