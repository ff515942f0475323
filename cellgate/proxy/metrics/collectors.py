"""Metrics of agents, of what load balancers are told, of the access log, and of the gate as one engine. Each
is registered where its subject is created, so one without a subject shows nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from cellgate.probes.agent_link import AgentState
from cellgate.proxy.ingress.alb_weight import AlbWeight
from cellgate.proxy.ingress.haproxy_agent import HaproxyAgent
from cellgate.proxy.metrics.families import counter, gauge
from cellgate.proxy.process.tallies import FAMILIES, TALLIES, TallyKey
from cellgate.router.board import Board


class AgentCheckMetrics(Collector):
    """The port of HAProxy's agent checks."""

    def __init__(self, agent: HaproxyAgent) -> None:
        self._agent = agent

    def collect(self) -> Iterator[Metric]:
        """The one family."""
        text = "HAProxy agent checks, by the state that was answered."
        rows = (((answer,), count) for answer, count in self._agent.counts.items())
        yield counter("agent_check_questions", text, ("answer",), rows)


class AlbMetrics(Collector):
    """The weight of this gate's target group at a load balancer of AWS."""

    def __init__(self, alb: AlbWeight) -> None:
        self._alb = alb

    def collect(self) -> Iterator[Metric]:
        """All families."""
        if self._alb.weight is not None:
            text = "The weight of this gate's target group at the load balancer, as last seen or set."
            yield gauge("alb_weight", text, (), [((), self._alb.weight)])
        text = "Looks at the load balancer's rule, or changes of it, that failed."
        yield counter("alb_failures", text, (), [((), self._alb.failures)])


class NodeAgentMetrics(Collector):
    """The connections to the agents of nodes, by unit and node."""

    def __init__(self, agents: Callable[[], Mapping[tuple[str, str], AgentState]]) -> None:
        self._agents = agents

    def collect(self) -> Iterator[Metric]:
        """All families."""
        agents, labels = self._agents(), ("unit", "node")
        yield gauge(
            "agent_connected",
            "1 while the gate receives messages from the agent of this node.",
            labels,
            ((place, standing.connected) for place, standing in agents.items()),
        )
        yield counter(
            "agent_losses",
            "Connections to the agent of this node that were lost, or could not be made.",
            labels,
            ((place, standing.losses) for place, standing in agents.items()),
        )


class AccessLogMetrics(Collector):
    """The access log; `dropped` is how many lines were never written."""

    def __init__(self, dropped: Callable[[], int]) -> None:
        self._dropped = dropped

    def collect(self) -> Iterator[Metric]:
        """The one family."""
        text = "Lines of the access log that were lost because its output did not accept them."
        yield counter("access_log_dropped", text, (), [((), self._dropped())])


class TallyMetrics(Collector):
    """What any process counts (see proxy/process/tallies.py). `elsewhere` are the counts of workers."""

    def __init__(self, elsewhere: Mapping[TallyKey, int]) -> None:
        self._elsewhere = elsewhere

    def collect(self) -> Iterator[Metric]:
        """All families."""
        counts = TALLIES + Counter(self._elsewhere)
        for name, family in FAMILIES.items():
            keys = dict.fromkeys((name, *row) for row in family.known)
            keys |= dict.fromkeys(key for key in counts if key[0] == name)
            yield counter(name, family.text, family.labels, ((key[1:], counts[key]) for key in keys))


class PoolMetrics(Collector):
    """The gate and its usable units as one engine, under vLLM's names, by which an endpoint picker of the
    Gateway API Inference Extension compares the members of a pool. `waiting` is how many requests wait at the
    gate.
    """

    def __init__(self, board: Board, waiting: Callable[[], int]) -> None:
        self._board = board
        self._queue_size = waiting

    def collect(self) -> Iterator[Metric]:
        """All families; without a usable unit the pool is full."""
        usable = [state for state in self._board if state.is_usable()]
        loads = [state.load for state in usable if state.load is not None]
        running = sum(state.load.running if state.load is not None else state.in_flight for state in usable)
        waiting = self._queue_size() + sum(load.waiting for load in loads)
        kv_use = sum(load.kv_use for load in loads) / len(loads) if loads else float(not usable)
        for name, text, value in (
            ("num_requests_running", "Requests that usable units compute.", float(running)),
            ("num_requests_waiting", "Requests queued at the gate and at usable units.", float(waiting)),
            ("kv_cache_usage_perc", "Mean share of KV cache in use, 0 to 1.", kv_use),
        ):
            yield GaugeMetricFamily(f"vllm:{name}", text, value)
