"""The gate's counters: plain ints while it works, rendered at scrape.

1. `finished` and `attempt` run once per request: no prometheus_client object is touched there.
2. Gauges are not kept: exposition.py reads them from the Board at scrape, so a removed unit disappears.
3. Every label is bounded by construction: unit and cell names from the configuration, enums, our own route
   names, status codes. Nothing that a client can choose (path, model, address) becomes a label.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import product
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, choose_encoder, generate_latest
from prometheus_client.registry import Collector

from cellgate.proxy.logs.record import Finished
from cellgate.proxy.metrics.continuations import ContinuationKind, ContinuationResult
from cellgate.proxy.metrics.exemplars import DURATION, TTFT, Exemplars
from cellgate.proxy.metrics.histogram import DURATION_BOUNDS_S, LOOP_LAG_BOUNDS_S, TTFT_BOUNDS_S, Histogram
from cellgate.proxy.process.tallies import TallyKey
from cellgate.router.board import Board
from cellgate.router.flip import DownCause, Flip
from cellgate.router.nouns import Outcome, Refusal, Verdict

RECENT = 0.1
"""The weight of the latest value in a moving mean, which covers the last ten or twenty."""
_EOF = b"# EOF\n"
"""The last line of OpenMetrics; families are encoded one by one."""
LAGS_KEPT = 240
"""A minute of the gate's ticks, so that no lag is missed between two scrapes."""


class Tally:
    """The counts of one unit. The name "" is for requests that no unit answered."""

    __slots__ = (
        "broken",
        "cell",
        "downs",
        "duration",
        "flips",
        "outcomes",
        "recent_ttft_s",
        "retries",
        "ttft",
    )

    def __init__(self, cell: str) -> None:
        self.cell = cell
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.downs = dict.fromkeys(DownCause, 0)
        self.flips: defaultdict[tuple[Verdict, Verdict], int] = defaultdict(int)
        self.retries = 0
        self.broken = 0
        """Streams that it broke in the middle."""
        self.ttft = Histogram(TTFT_BOUNDS_S)
        self.recent_ttft_s: float | None = None
        self.duration = Histogram(DURATION_BOUNDS_S)


class _Only(Collector):
    """One family as the collector that `generate_latest` wants."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)


class Encoding(NamedTuple):
    """How families become text."""

    encode: Callable[[Collector], bytes]
    content_type: str


PLAIN = Encoding(generate_latest, CONTENT_TYPE_LATEST)


class Metrics:
    """Counts what happens, and renders it with the registered collectors."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.tallies: dict[str, Tally] = {}
        self.responses: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.refusals = dict.fromkeys(Refusal, 0)
        self.continuations = dict.fromkeys(product(ContinuationKind, ContinuationResult), 0)
        self.recoveries: dict[tuple[str, str], int] = {}
        self.forged = 0
        """Requests that named a unit and came from a peer that is not trusted."""
        self.defects = 0
        """Exceptions in workers; those of this process are in proxy/logs/defects.py."""
        self.workers_tallies: Counter[TallyKey] = Counter()
        """What workers have counted; the counts of this process are in proxy/process/tallies.py."""
        self.limits: defaultdict[str, int] = defaultdict(int)
        """Limits that took effect in workers; those of this process are in proxy/config/limits.py."""
        self.bytes_in = 0
        self.bytes_out = 0
        self.exemplars = Exemplars()
        self.lag = Histogram(LOOP_LAG_BOUNDS_S)
        self.last_lags_s: deque[float] = deque(maxlen=LAGS_KEPT)
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)

    def include(self, collector: Collector) -> None:
        """Show its families as well."""
        self._registry.register(collector)

    def finished(self, record: Finished) -> None:
        """A request has ended, whoever answered it."""
        # Unpacked, and not read by name, because this is done for each request.
        _, _, _, _, route, _, status, _, unit, _, _, _, ttft_s, duration_s, _, bytes_in, bytes_out, _ = record
        self.responses[route, status] += 1
        self.bytes_in += bytes_in
        self.bytes_out += bytes_out
        tally = self.tallies.get(unit) or self.tally(unit)
        tally.duration.observe(duration_s)
        if ttft_s is not None:
            tally.ttft.observe(ttft_s)
            before_s = ttft_s if tally.recent_ttft_s is None else tally.recent_ttft_s
            tally.recent_ttft_s = before_s + RECENT * (ttft_s - before_s)

    def traced(self, unit: str, ttft_s: float | None, duration_s: float, trace_id: str) -> None:
        """A request that has ended was traced under this id."""
        cell = self.tally(unit).cell
        self.exemplars.note(DURATION, cell, unit, duration_s, trace_id)
        if ttft_s is not None:
            self.exemplars.note(TTFT, cell, unit, ttft_s, trace_id)

    def attempt(self, unit: str, outcome: Outcome) -> None:
        """An attempt on a unit has ended."""
        tally = self.tallies.get(unit) or self.tally(unit)
        tally.outcomes[outcome] += 1

    def flip(self, flip: Flip) -> None:
        """A verdict has changed."""
        tally = self.tally(flip.unit)
        tally.flips[flip.before, flip.after] += 1
        if flip.cause is not None:
            tally.downs[flip.cause] += 1

    def retry(self, unit: str) -> None:
        """A request is retried on another unit because this one failed."""
        self.tally(unit).retries += 1

    def continuation(self, unit: str, kind: ContinuationKind, result: ContinuationResult) -> None:
        """The result of a stream that this unit broke."""
        self.continuations[kind, result] += 1
        self.tally(unit).broken += 1

    def refusal(self, reason: Refusal) -> None:
        """A request was refused without a unit."""
        self.refusals[reason] += 1

    def loop_lag(self, seconds: float) -> None:
        """The gate's tick was late."""
        self.lag.observe(seconds)
        self.last_lags_s.append(seconds)

    def recent_ttft_s(self, unit: str) -> float | None:
        """The recent mean time to first token of this unit; None before the first."""
        return self.tallies[unit].recent_ttft_s if unit in self.tallies else None

    async def families(self) -> AsyncIterator[Metric]:
        """Everything that is counted, now.

        The loop turns between two families: all at once take 0.7 ms for each unit, which would delay streams.
        """
        self._forget_departed()
        for family in self._registry.collect():
            yield family
            await asyncio.sleep(0)

    def encoding_for(self, accept: str) -> Encoding:
        """How to render for who sent this `Accept`: OpenMetrics while there are exemplars, else plain."""
        if self.exemplars and "application/openmetrics-text" in accept:
            return Encoding(*choose_encoder(accept))
        return PLAIN

    async def render(self, encoding: Encoding = PLAIN) -> bytes:
        """Everything in Prometheus' text format, or in another one."""
        parts = [encoding.encode(_Only(family)).removesuffix(_EOF) async for family in self.families()]
        return b"".join(parts if encoding is PLAIN else [*parts, _EOF])

    def tally(self, unit: str) -> Tally:
        """The counts of a unit, zero at first."""
        if unit not in self.tallies:
            state = self.board.units.get(unit)
            self.tallies[unit] = Tally(state.unit.cell if state is not None else "")
        return self.tallies[unit]

    def _forget_departed(self) -> None:
        """Drop the counts of removed units, which would otherwise accumulate."""
        known = {"", *self.board.units, *(state.unit.name for state in self.board.leaving)}
        for name in self.tallies.keys() - known:
            del self.tallies[name]
        for name, state in self.board.units.items():
            if self.tally(name).cell != state.unit.cell:
                self.tallies[name] = Tally(state.unit.cell)
