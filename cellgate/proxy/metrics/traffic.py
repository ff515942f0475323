"""Renders what clients asked for and what they got, by unit and cell, as Prometheus metric families."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector

from cellgate.proxy.metrics.exemplars import DURATION, TTFT
from cellgate.proxy.metrics.families import counter, renamed
from cellgate.proxy.metrics.histogram import Buckets, Histogram, gap_buckets
from cellgate.proxy.metrics.metrics import Metrics
from cellgate.proxy.metrics.unit_histograms import UnitHistograms, UnitSource
from cellgate.router.nouns import Outcome
from cellgate.router.unit_state import UnitState

OWN_ROUTES = frozenset({"health", "models", "unit_health"})
"""Paths that the gate answers itself, such as health checks: they would drown what clients ask for."""


class Traffic(Collector):
    """Renders the counts of `metrics` at each scrape. `per_unit`: latencies of each unit as histograms."""

    def __init__(self, metrics: Metrics, *, per_unit: bool) -> None:
        self._metrics = metrics
        self._board = metrics.board
        self._ttft = UnitHistograms(
            TTFT,
            "From a request's first byte to the first token sent to its client.",
            Histogram.read,
            per_unit=per_unit,
            has_means=True,
            exemplars=metrics.exemplars,
        )
        self._gaps: UnitHistograms[UnitState] = UnitHistograms(
            "inter_token_latency_seconds",
            "Between two pieces of a stream as the unit sent them.",
            _read_gaps,
            per_unit=per_unit,
            has_means=True,
        )
        self._duration = UnitHistograms(
            DURATION,
            "From a request's first byte to its answer's last.",
            Histogram.read,
            per_unit=per_unit,
            exemplars=metrics.exemplars,
        )

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield from self._requests()
        yield from self._failures()
        yield from self._latencies()

    def _requests(self) -> Iterator[Metric]:
        m = self._metrics
        units = [(name, tally) for name, tally in m.tallies.items() if name]
        yield from renamed(
            "requests",
            counter(
                "attempts",
                "Attempts on a unit, by how they ended.",
                ("unit", "outcome"),
                (
                    ((name, outcome.value), n)
                    for name, tally in units
                    for outcome, n in tally.outcomes.items()
                    if n or outcome is Outcome.OK
                ),
            ),
        )
        answered = [((route, str(status)), n) for (route, status), n in m.responses.items()]
        yield counter(
            "client_requests",
            "Requests of clients, by path and by the status sent (499: the client left before).",
            ("route", "status"),
            (row for row in answered if row[0][0] not in OWN_ROUTES),
        )
        # The old name had the gate's own paths as well.
        yield counter("responses", "Deprecated, now cellgate_client_requests.", ("route", "status"), answered)
        yield counter(
            "refusals",
            "Requests that got no unit, by reason.",
            ("reason",),
            (((reason.value,), n) for reason, n in m.refusals.items()),
        )
        yield counter(
            "forged_placements",
            "Requests that named a unit, or asked to be explained, and came from a peer that is not trusted.",
            (),
            [((), m.forged)],
        )

    def _failures(self) -> Iterator[Metric]:
        units = [(name, tally) for name, tally in self._metrics.tallies.items() if name]
        yield counter(
            "retries",
            "Requests that were retried on another unit because this one failed.",
            ("unit",),
            (((name,), tally.retries) for name, tally in units),
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
            ("unit",),
            (((name,), tally.broken) for name, tally in units),
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

    def _latencies(self) -> Iterator[Metric]:
        tallies = self._metrics.tallies
        ttft = [UnitSource(tally.cell, name, tally.ttft) for name, tally in tallies.items() if name]
        duration = [UnitSource(tally.cell, name, tally.duration) for name, tally in tallies.items()]
        gaps = [UnitSource(state.unit.cell, state.unit.name, state) for state in self._board]
        yield from self._ttft.collect(ttft)
        yield from self._gaps.collect(gaps)
        yield from self._duration.collect(duration)


def _read_gaps(state: UnitState) -> tuple[Buckets, float]:
    return gap_buckets(state.gaps_ms)
