"""Renders the counts of the gate and the state of the Board as Prometheus metric families.

Series that may be watched by an alert exist at zero from the start: Prometheus sees no increase in a series
that is born with its first event.

In this order: `Exposition`, `pool_metrics`, `Traffic`, `History`.
"""

from __future__ import annotations

import asyncio
import platform
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from cellgate import VERSION
from cellgate.proxy.config.limits import REACHED
from cellgate.proxy.ingress.haproxy import HaproxyAgent
from cellgate.proxy.observe.counters import (
    DURATION,
    DURATION_BOUNDS_S,
    FAMILIES,
    GAP_BOUNDS_MS,
    TALLIES,
    TTFT,
    TTFT_BOUNDS_S,
    Histogram,
    Metrics,
    TallyKey,
    counted_gaps,
)
from cellgate.proxy.observe.defects import DEFECTS
from cellgate.proxy.observe.families import counter, gauge, one_counter, one_gauge
from cellgate.proxy.observe.routing_metrics import UnitHistograms, UnitSource
from cellgate.router.board import Board
from cellgate.router.departures import is_draining
from cellgate.router.nouns import Outcome, Sign, Verdict
from cellgate.router.unit_state import UnitState


class Exposition:
    """Renders everything at each scrape; has no state.

    `waiting` tells how many requests wait for a unit, `connections` how many connections are open by side
    (`client`, `unit`), `suspended` how much evidence was not counted, `gate_faults` how many connections
    the gate could not open by its own fault; all are called at scrape only.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        waiting: Callable[[], int],
        connections: Callable[[], Mapping[str, int]],
        suspended: Callable[[], int] = int,
        gate_faults: Callable[[], int] = int,
    ) -> None:
        self._metrics = metrics
        self._board = metrics.board
        self._queue_size = waiting
        self._connections = connections
        self._suspended = suspended
        self._gate_faults = gate_faults

    def collect(self) -> Iterator[Metric]:
        yield gauge(
            "build_info",
            "Constant 1; the labels describe the running gate.",
            ("version", "python"),
            [((VERSION, platform.python_version()), 1)],
        )
        yield from self._gate()
        yield from self._units()
        yield from self._judgement()
        yield from self._troubles()
        yield from self._loads()

    def _gate(self) -> Iterator[Metric]:
        m = self._metrics
        yield counter(
            "bytes",
            "Bytes from (in) and to (out) clients.",
            "direction",
            [("in", m.bytes_in), ("out", m.bytes_out)],
        )
        yield one_gauge(
            "loop_lag_max_seconds",
            "How late the latest timer of the last minute fired.",
            max(m.last_lags_s, default=0.0),
        )
        yield one_gauge(
            "tasks", "Running asyncio tasks: probes and the admin port.", len(asyncio.all_tasks())
        )
        yield one_gauge("waiting", "Requests waiting for a unit with room.", self._queue_size())
        yield gauge("connections", "Open connections, by peer.", "side", self._connections().items())

    def _units(self) -> Iterator[Metric]:
        board = self._board
        # A unit that was replaced may be on the Board twice under one name while its last streams end.
        in_flight: Counter[str] = Counter()
        for state in (*board, *board.leaving):
            in_flight[state.unit.name] += state.in_flight
        yield gauge("in_flight", "Attempts in flight at a unit.", "unit", in_flight.items())
        yield gauge(
            "unit_verdict",
            "Verdict of a unit: 1 for the current one, 0 for the others.",
            ("unit", "cell", "verdict"),
            (
                ((state.unit.name, state.unit.cell, verdict.value), state.case.verdict is verdict)
                for state in board
                for verdict in Verdict
            ),
        )
        yield gauge(
            "unit_state",
            "1 while this holds for the unit, whatever its verdict.",
            ("unit", "cell", "state"),
            (
                ((state.unit.name, state.unit.cell, name), holds(state))
                for state in board
                for name, holds in UNIT_STATES.items()
            ),
        )

    def _judgement(self) -> Iterator[Metric]:
        board = self._board
        yield gauge(
            "unit_degraded",
            "How much slower than the others of its cell a unit is: 0 not at all, 0.5 half as fast.",
            ("unit", "cell"),
            (((state.unit.name, state.unit.cell), state.outlier.degraded) for state in board),
        )
        yield gauge(
            "node_up",
            "1 when the last evidence of this source about the node was good.",
            ("unit", "node", "source"),
            (
                ((state.unit.name, node, source), word.sign is Sign.GOOD)
                for state in board
                for (node, source), word in state.last_evidence.items()
                if node is not None
            ),
        )
        yield one_gauge(
            "panic",
            "1 during panic: units that do not answer are kept in rotation.",
            board.panic_at is not None,
        )

    def _troubles(self) -> Iterator[Metric]:
        yield counter(
            "recoveries",
            "Attempts to recover a unit of a cell, by how they ended.",
            ("cell", "result"),
            self._metrics.recoveries.items(),
        )
        yield one_counter(
            "evidence_suspended",
            "Evidence against units that was not counted because the gate lagged.",
            self._suspended(),
        )
        yield one_counter(
            "gate_faults",
            "Connections that the gate could not open by its own fault, and times it stopped accepting.",
            self._gate_faults(),
        )
        yield one_counter(
            "defects",
            "Unexpected exceptions in the gate; each is in the log.",
            DEFECTS.count + self._metrics.defects,
        )
        yield counter(
            "limits",
            "Times that a limit on one client or unit took effect, by limit.",
            "limit",
            ((name, count + self._metrics.limits[name]) for name, count in REACHED.items()),
        )

    def _loads(self) -> Iterator[Metric]:
        known = [(state, state.load) for state in self._board if state.load is not None]
        yield gauge(
            "unit_load_requests",
            "Requests that the engine says it is computing (running), or has queued (waiting).",
            ("unit", "state"),
            (
                ((state.unit.name, name), count)
                for state, load in known
                for name, count in (("running", load.running), ("waiting", load.waiting))
            ),
        )
        yield gauge(
            "unit_load_kv_use",
            "Share of the engine's KV cache in use, 0 to 1.",
            "unit",
            ((state.unit.name, load.kv_use) for state, load in known),
        )


UNIT_STATES: Mapping[str, Callable[[UnitState], bool]] = {
    "drained": lambda state: state.drained,
    "draining": is_draining,
    "on_hold": lambda state: state.hold is not None,
    "restart_suspected": UnitState.is_restart_suspected,
    "other_build": lambda state: bool(state.other_builds),
    "answers_differ": UnitState.has_odd_answers,
    "canary_refused": lambda state: bool(state.canary_refused),
}
"""What may hold for a unit whatever its verdict: an operator took it out; it takes nothing new, and may be
finishing what it has; its engine stands still on purpose, or has yet to show work after that; it gets no
requests because it may have restarted; another unit of its cell and model is another build; its answers to
the known prompt differ, whether or not it is out for them.
"""


# Metrics of agents, of what load balancers are told, of the access log, and of the gate as one engine. Each
# is registered where its subject is created, so one without a subject shows nothing.


def agent_check_metrics(agent: HaproxyAgent) -> Iterator[Metric]:
    """The port of HAProxy's agent checks."""
    text = "HAProxy agent checks, by the state that was answered."
    yield counter("agent_check_questions", text, "answer", agent.counts.items())


def build_metrics(board: Board) -> Iterator[Metric]:
    """What units say that they are."""
    yield gauge(
        "unit_build_info",
        "Constant 1; the labels are what the unit's engine says that it is.",
        ("unit", "cell", "engine", "version", "fingerprint"),
        (((s.unit.name, s.unit.cell, s.engine, s.build.version, s.build.fingerprint), 1) for s in board),
    )


def node_agent_metrics(agents: Callable[[], Mapping[tuple[str, str], bool]]) -> Iterator[Metric]:
    """The connections to the agents of nodes, by unit and node."""
    yield gauge(
        "agent_connected",
        "1 while the gate receives messages from the agent of this node.",
        ("unit", "node"),
        agents().items(),
    )


def access_log_metrics(dropped: Callable[[], int]) -> Iterator[Metric]:
    """The access log; `dropped` is how many lines were never written."""
    text = "Lines of the access log that were lost because its output did not accept them."
    yield one_counter("access_log_dropped", text, dropped())


def tally_metrics(of_workers: Mapping[TallyKey, int]) -> Iterator[Metric]:
    """What any process counts (see proxy/observe/counters.py). `of_workers` are the counts of workers."""
    counts = TALLIES + Counter(of_workers)
    for name, family in FAMILIES.items():
        keys = dict.fromkeys((name, *row) for row in family.known)
        keys |= dict.fromkeys(key for key in counts if key[0] == name)
        yield counter(name, family.text, family.labels, ((key[1:], counts[key]) for key in keys))


def pool_metrics(board: Board, waiting: Callable[[], int]) -> Iterator[Metric]:
    """The gate and its usable units as one engine, under vLLM's names, by which an endpoint picker of the
    Gateway API Inference Extension compares the members of a pool. `waiting` is how many requests wait at the
    gate.
    """
    usable = [state for state in board if state.is_usable()]
    loads = [state.load for state in usable if state.load is not None]
    running = sum(state.load.running if state.load is not None else state.in_flight for state in usable)
    queued = waiting() + sum(load.waiting for load in loads)
    kv_use = sum(load.kv_use for load in loads) / len(loads) if loads else float(not usable)
    for name, text, value in (
        ("num_requests_running", "Requests that usable units compute.", float(running)),
        ("num_requests_waiting", "Requests queued at the gate and at usable units.", float(queued)),
        ("kv_cache_usage_perc", "Mean share of KV cache in use, 0 to 1.", kv_use),
    ):
        yield GaugeMetricFamily(f"vllm:{name}", text, value)


OWN_ROUTES = frozenset({"health", "models", "unit_health"})
"""Paths that the gate answers itself, such as health checks: they would drown what clients ask for."""


class Traffic:
    """Renders what clients asked for and got, by unit and cell, at each scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._board = metrics.board
        self._ttft = UnitHistograms(
            TTFT,
            "From a request's first byte to the first token sent to its client.",
            TTFT_BOUNDS_S,
            Histogram.counted,
            has_means=True,
            exemplars=metrics.exemplars,
        )
        self._gaps: UnitHistograms[UnitState] = UnitHistograms(
            "inter_token_latency_seconds",
            "Between two pieces of a stream as the unit sent them.",
            [bound_ms / 1000 for bound_ms in GAP_BOUNDS_MS],
            lambda state: counted_gaps(state.gaps_ms),
            has_means=True,
        )
        self._duration = UnitHistograms(
            DURATION,
            "From a request's first byte to its answer's last.",
            DURATION_BOUNDS_S,
            Histogram.counted,
            exemplars=metrics.exemplars,
        )

    def collect(self) -> Iterator[Metric | None]:
        yield from self._requests()
        yield from self._failures()
        yield from self._latencies()

    def _requests(self) -> Iterator[Metric]:
        m = self._metrics
        units = [(name, tally) for name, tally in m.tallies.items() if name]
        yield counter(
            "attempts",
            "Attempts on a unit, by how they ended.",
            ("unit", "outcome"),
            (
                ((name, outcome.value), n)
                for name, tally in units
                for outcome, n in tally.outcomes.items()
                if n or outcome is Outcome.OK
            ),
        )
        answered = [((route, str(status)), n) for (route, status), n in m.responses.items()]
        yield counter(
            "client_requests",
            "Requests of clients, by path and by the status sent (499: the client left before).",
            ("route", "status"),
            (row for row in answered if row[0][0] not in OWN_ROUTES),
        )
        yield counter(
            "refusals",
            "Requests that got no unit, by reason.",
            "reason",
            ((reason.value, n) for reason, n in m.refusals.items()),
        )
        yield one_counter(
            "forged_placements",
            "Requests that named a unit, or asked to be explained, and came from a peer that is not trusted.",
            m.forged,
        )

    def _failures(self) -> Iterator[Metric]:
        units = [(name, tally) for name, tally in self._metrics.tallies.items() if name]
        yield counter(
            "retries",
            "Requests that were retried on another unit because this one failed.",
            "unit",
            ((name, tally.retries) for name, tally in units),
        )
        m = self._metrics
        yield counter(
            "continuations",
            "Streams that their unit broke, by kind and result.",
            ("kind", "result"),
            (((kind.value, result.value), n) for (kind, result), n in m.continuations.items()),
        )
        yield counter(
            "streams_broken",
            "Streams that this unit broke.",
            "unit",
            ((name, tally.broken) for name, tally in units),
        )
        yield counter(
            "flips",
            "Changes of verdict.",
            ("unit", "before", "after"),
            (
                ((name, before.value, after.value), n)
                for name, tally in units
                for (before, after), n in tally.flips.items()
            ),
        )
        yield counter(
            "unit_downs",
            "Changes of verdict to down, by cause.",
            ("unit", "cause"),
            (((name, cause.value), n) for name, tally in units for cause, n in tally.downs.items()),
        )

    def _latencies(self) -> Iterator[Metric | None]:
        tallies = self._metrics.tallies
        ttft = [UnitSource(tally.cell, name, tally.ttft) for name, tally in tallies.items() if name]
        duration = [UnitSource(tally.cell, name, tally.duration) for name, tally in tallies.items()]
        gaps = [UnitSource(state.unit.cell, state.unit.name, state) for state in self._board]
        yield from self._ttft.collect(ttft)
        yield from self._gaps.collect(gaps)
        yield from self._duration.collect(duration)


# The last hour of the gate in a few rows of numbers, for the plots of the status page.


STEP_S = 10.0
SAMPLES = 360
"""An hour."""


class Totals(NamedTuple):
    """What has been counted so far: requests of clients, those of them that were refused or failed (5xx and
    429), or were the client's fault (other 4xx), first tokens and the sum of their times, tokens of answers.
    """

    requests: int
    failed: int
    faulty: int
    first_tokens: int
    ttft_s: float
    tokens: int


class HourSample(NamedTuple):
    """One step; rates are for each second. `ttft_s` is the mean, None without a first token."""

    requests: float
    failed: float
    faulty: float
    ttft_s: float | None
    tokens: float
    usable: int
    waiting: int


class History:
    """Takes a sample every `STEP_S`. `tokens` is how many tokens of answers were counted, `waiting` how many
    requests wait for a unit.
    """

    def __init__(self, metrics: Metrics, tokens: Callable[[], int], waiting: Callable[[], int]) -> None:
        self._metrics = metrics
        self._tokens = tokens
        self._queue_size = waiting
        self._samples: deque[HourSample] = deque(maxlen=SAMPLES)
        self._before: Totals | None = None
        self._at = 0.0

    def tick(self, now: float) -> None:
        """Called a few times a second."""
        if self._before is None:
            self._before, self._at = self._totals(), now
        elif now - self._at >= STEP_S:
            self._take(self._before, self._totals(), now - self._at)
            self._at = now

    def shown(self) -> dict[str, Any]:
        """A list of each field of `HourSample`, oldest first, ready for JSON."""
        columns = zip(*self._samples, strict=True) if self._samples else [()] * len(HourSample._fields)
        return {"step_s": STEP_S} | dict(zip(HourSample._fields, map(list, columns), strict=True))

    def _take(self, before: Totals, after: Totals, passed_s: float) -> None:
        # A unit that has left takes its counts with it.
        grown = [max(0.0, new - old) for new, old in zip(after, before, strict=True)]
        requests, failed, faulty, first_tokens, ttft_s, tokens = grown
        self._before = after
        self._samples.append(
            HourSample(
                requests=round(requests / passed_s, 2),
                failed=round(failed / passed_s, 2),
                faulty=round(faulty / passed_s, 2),
                ttft_s=round(ttft_s / first_tokens, 4) if first_tokens else None,
                tokens=round(tokens / passed_s, 1),
                usable=self._metrics.board.room()[0],
                waiting=self._queue_size(),
            )
        )

    def _totals(self) -> Totals:
        metrics = self._metrics
        work = {key: n for key, n in metrics.responses.items() if key[0] not in OWN_ROUTES}
        ttfts = [tally.ttft for tally in metrics.tallies.values()]
        return Totals(
            requests=sum(work.values()),
            failed=sum(n for (_, status), n in work.items() if status >= 500 or status == 429),
            faulty=sum(n for (_, status), n in work.items() if 400 <= status < 499 and status != 429),
            first_tokens=sum(sum(ttft.counts) for ttft in ttfts),
            ttft_s=sum(ttft.total for ttft in ttfts),
            tokens=self._tokens(),
        )
