"""The metrics of a gate and their encoding: plain counters while it works, rendered at scrape.

1. `finished` and `attempt` run once per request: no prometheus_client object is touched there.
2. Gauges are not kept: exposition.py reads them from the Board at scrape, so a removed unit disappears.
3. Every label is bounded by construction: unit and cell names from the configuration, enums, our own route
   names, status codes. Nothing that a client can choose (path, model, address) becomes a label.

In this order: `Metrics`, `Histogram`, `Exemplars`, `Continuations`, `TallyFamily`.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise, product
from operator import mul

from prometheus_client import Metric, ProcessCollector
from prometheus_client.samples import Exemplar

from cellgate.proxy.observe.access_log import Finished
from cellgate.proxy.observe.events import Action, EventLog
from cellgate.proxy.observe.families import PLAIN, Encoding, open_encoding
from cellgate.proxy.observe.text import only_visible
from cellgate.router.board import Board, DownCause, Flip
from cellgate.router.nouns import Outcome, Refusal, Verdict

RECENT = 0.1
"""The weight of the latest value in a moving mean, which covers the last ten or twenty."""
LAGS_KEPT = 240
"""A minute of the gate's ticks, so that no lag is missed between two scrapes."""


Collect = Callable[[], Iterable[Metric | None]]
"""Gives families of metrics, as they are now; None: it has worked for a while, and others may have a turn."""


class Metrics:
    """Counts what happens, and renders it with the registered collectors."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.tallies: dict[str, Tally] = {}
        self.responses: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.refusals = dict.fromkeys(Refusal, 0)
        self.continuations = dict.fromkeys(product(ResumeKind, ResumeResult), 0)
        self.recoveries: dict[tuple[str, str], int] = {}
        self.forged = 0
        """Requests that named a unit and came from a peer that is not trusted."""
        self.defects = 0
        """Exceptions in workers; those of this process are in proxy/observe/defects.py."""
        self.workers_tallies: Counter[TallyKey] = Counter()
        """What workers have counted; the counts of this process are in proxy/observe/counters.py."""
        self.limits: defaultdict[str, int] = defaultdict(int)
        """Limits that took effect in workers; those of this process are in proxy/config/limits.py."""
        self.bytes_in = 0
        self.bytes_out = 0
        self.exemplars = Exemplars()
        self.last_lags_s: deque[float] = deque(maxlen=LAGS_KEPT)
        self._collectors: list[Collect] = [ProcessCollector(registry=None).collect]

    def include(self, collect: Collect) -> None:
        """Show these families as well."""
        self._collectors.append(collect)

    def finished(self, record: Finished) -> None:
        self.responses[record.route, record.status] += 1
        self.bytes_in += record.bytes_in
        self.bytes_out += record.bytes_out
        tally = self.tallies.get(record.unit) or self.tally(record.unit)
        tally.duration.observe(record.duration_s)
        if (ttft_s := record.ttft_s) is not None:
            tally.ttft.observe(ttft_s)
            before_s = ttft_s if tally.recent_ttft_s is None else tally.recent_ttft_s
            tally.recent_ttft_s = before_s + RECENT * (ttft_s - before_s)

    def traced(self, unit: str, ttft_s: float | None, duration_s: float, trace_id: str) -> None:
        """A request that has ended was traced under this id."""
        cell = self.tally(unit).cell
        self.exemplars.note(DURATION, cell, duration_s, trace_id)
        if ttft_s is not None:
            self.exemplars.note(TTFT, cell, ttft_s, trace_id)

    def attempt(self, unit: str, outcome: Outcome) -> None:
        """An attempt on a unit has ended."""
        tally = self.tallies.get(unit) or self.tally(unit)
        tally.outcomes[outcome] += 1

    def flip(self, flip: Flip) -> None:
        tally = self.tally(flip.unit)
        tally.flips[flip.before, flip.after] += 1
        if flip.cause is not None:
            tally.downs[flip.cause] += 1

    def count_forged(self) -> None:
        """A peer that is not trusted named a unit, or asked for an explanation."""
        self.forged += 1

    def retry(self, unit: str) -> None:
        """A request is retried on another unit because this one failed."""
        self.tally(unit).retries += 1

    def stream_resume(self, unit: str, kind: ResumeKind, result: ResumeResult) -> None:
        """The result of a stream that this unit broke."""
        self.continuations[kind, result] += 1
        self.tally(unit).broken += 1

    def refusal(self, reason: Refusal) -> None:
        self.refusals[reason] += 1

    def loop_lag(self, seconds: float) -> None:
        """The gate's tick was late."""
        self.last_lags_s.append(seconds)

    def recent_ttft_s(self, unit: str) -> float | None:
        """The recent mean time to first token of this unit; None before the first."""
        return self.tallies[unit].recent_ttft_s if unit in self.tallies else None

    async def families(self) -> AsyncIterator[Metric]:
        """Everything that is counted, now. The loop turns between two: streams would wait for all of them."""
        self._forget_departed()
        for collect in self._collectors:
            for family in collect():
                if family is not None:
                    yield family
                await asyncio.sleep(0)

    def encoding_for(self, accept: str) -> Encoding:
        """How to render for who sent this `Accept`: OpenMetrics while there are exemplars, else plain."""
        if self.exemplars and "application/openmetrics-text" in accept:
            return open_encoding(accept)
        return PLAIN

    async def render(self, encoding: Encoding = PLAIN) -> bytes:
        """Everything in Prometheus' text format, or in another one."""
        parts: list[bytes] = []
        async for family in self.families():
            for part in encoding.parts(family):
                parts.append(part)
                await asyncio.sleep(0)
        # Labels may be what a unit says of itself: this is the one place that all of them pass.
        return only_visible(encoding.whole(parts))

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


class Tally:
    """The counts of one unit. The name "" is for requests that no unit answered."""

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


# Histograms that need two additions for each observation: plain ints in a list, rendered only at scrape.
#
# The bounds are those of LLM serving, where the usual web buckets (5 ms to 10 s) are wrong at both ends: a
# time to first token runs from a cached prefill to minutes of queue, a whole answer from a second to half an
# hour, and what decides between good and bad inter-token latency happens between 10 and 200 ms.


TTFT_BOUNDS_S = (
    *(0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),  # cached or short prompts: where objectives are set
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0),  # long prompts
    *(20.0, 30.0, 60.0, 120.0, 300.0),  # queues, warm-up, and what is lost
)
DURATION_BOUNDS_S = (
    *(0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0),
    *(15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
GAP_BOUNDS_MS = (5, 10, 15, 20, 25, 30, 40, 50, 75, 100, 150, 200, 300, 500, 750, 1000, 2000, 4000)
"""Around the steps of engines (10 to 50 ms), reading speed (about 200 ms a token) and stalls."""
Counted = tuple[Sequence[int], float]
"""Observations by bucket, not cumulated, and their sum."""
Buckets = list[tuple[str, float]]
"""What Prometheus wants to see: (upper bound, observations up to it), the last bound being +Inf."""


class Histogram:
    """Counts of observations by upper bound (inclusive); the last count takes what is above all bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def counted(self) -> Counted:
        """What was observed until now: kept when it goes on in another cell."""
        return tuple(self.counts), self.total

    def read(self) -> tuple[Buckets, float]:
        """The cumulated buckets and the sum."""
        return cumulated(self.bounds, self.counts), self.total


def counted_gaps(gaps_ms: Sequence[int]) -> Counted:
    """The gaps within GAP_BOUNDS_MS, and their sum in seconds, of gaps counted per whole millisecond.

    `gaps_ms[i]` counts the gaps of i to i + 1 ms, so that a bound in milliseconds falls between two counts
    and the buckets are exact. The sum takes the middle of each millisecond, and the end of the list for all
    that is longer.
    """
    if not any(gaps_ms):
        return (), 0.0
    edges = list(pairwise((0, *GAP_BOUNDS_MS, len(gaps_ms))))
    counts = [sum(gaps_ms[start:end]) for start, end in edges]
    # Of the longest ones, which are most of the list, there are mostly none.
    filled = (edge for edge, count in zip(edges, counts, strict=True) if count)
    total_ms = sum(sum(map(mul, gaps_ms[start:end], range(start, end))) for start, end in filled)
    return counts, (total_ms + 0.5 * sum(counts)) / 1000


def cumulated(bounds: Sequence[float], counts: Sequence[int]) -> Buckets:
    """The buckets of these counts."""
    return list(zip([*map(repr, map(float, bounds)), "+Inf"], accumulate(counts), strict=True))


# Exemplars: beside a bucket of a histogram stands one request that fell into it, by the id of its trace.
#
# Only requests that are traced have one, and only the OpenMetrics format can show them:
# https://github.com/OpenObservability/OpenMetrics/blob/main/specification/OpenMetrics.md#exemplars


TTFT, DURATION = "ttft_seconds", "request_duration_seconds"
_BOUNDS = {TTFT: TTFT_BOUNDS_S, DURATION: DURATION_BOUNDS_S}


class Exemplars:
    """The latest traced request of each bucket, by family and cell: as many as there are buckets at most."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, str], dict[int, Exemplar]] = {}

    def __bool__(self) -> bool:
        return bool(self._latest)

    def note(self, family: str, cell: str, value_s: float, trace_id: str) -> None:
        """A traced request was observed."""
        bucket = bisect_left(_BOUNDS[family], value_s)
        shown = Exemplar({"trace_id": trace_id}, value_s, round(time.time(), 3))
        self._latest.setdefault((family, cell), {})[bucket] = shown

    def beside(self, family: str, cell: str, buckets: Buckets) -> Sequence[Sequence[object]]:
        """The buckets of a cell, each with its exemplar, if it has one."""
        found = self._latest.get((family, cell))
        if not found:
            return buckets
        return [
            (*bucket, found[number]) if number in found else bucket for number, bucket in enumerate(buckets)
        ]


# Results of streams that a unit broke: each is counted, and one event for each unit sums them up.


REPORT_AFTER_S = 1.0
"""A unit breaks its streams together: the event follows this long after the first."""


class ResumeKind(Enum):
    """What kind of stream a unit broke."""

    TEXT = "text"
    """Of chat or completions, as are the next ones; with nothing but text."""
    TOOLS = "tools"
    """It may call tools, and has not yet."""
    TOOL_CALL = "tool_call"
    """It has shown a tool call, or a part of one."""
    REASONING = "reasoning"
    """It has shown reasoning."""
    LOGPROBS = "logprobs"
    PENALTIES = "penalties"
    CONSTRAINED = "constrained"
    """A grammar, a forced tool call or something else shapes it."""
    MESSAGES = "messages"
    RESPONSES = "responses"
    OTHER = "other"


class ResumeResult(Enum):
    """The result of a broken stream."""

    RESUMED = "continued"
    """Another unit resumed it to its end, or until that one broke it as well, or its client left."""
    COMPLETED = "completed"
    """The text was complete; the gate sent the last events."""
    NOT_CONTINUABLE = "not_continuable"
    """Its request, its events or the configuration do not allow it."""
    REFUSED = "refused"
    """The other unit could not resume it, or could not prove it."""
    NO_UNIT = "no_unit"
    CLIENT_LEFT = "client_left"


Count = Callable[[str, ResumeKind, ResumeResult], None]


class Continuations:
    """Collects all results. `count` is called for each."""

    def __init__(self, count: Count, events: EventLog) -> None:
        self._count = count
        self._events = events
        self._unreported: dict[str, Counter[str]] = {}
        self._due: dict[str, float] = {}

    def record(self, unit: str, kind: ResumeKind, result: ResumeResult, reason: str = "") -> None:
        """The result of a stream that `unit` broke, and why it was not resumed."""
        self._count(unit, kind, result)
        what = result.value.replace("_", " ")
        self._unreported.setdefault(unit, Counter())[f"{what} ({reason})" if reason else what] += 1

    def tick(self, now: float) -> None:
        """Report events that are due; called a few times a second."""
        for unit in list(self._unreported):
            if now < self._due.setdefault(unit, now + REPORT_AFTER_S):
                continue
            counts = self._unreported.pop(unit)
            del self._due[unit]
            detail = ", ".join(f"{count} {what}" for what, count in counts.most_common(5))
            self._events.add(Action("broken_streams", "gate", unit, detail))


# What any process of a gate counts: workers report to the control process, which shows the sum.


@dataclass(frozen=True, slots=True)
class TallyFamily:
    """One family of `/metrics`, a counter. `known`: rows that are shown from the start, with 0."""

    text: str
    labels: tuple[str, ...]
    known: tuple[tuple[str, ...], ...] = ()


RELOADS = "reloads"
NAMED = "named_requests"
FALLBACKS = "fallbacks"
GUARDRAIL = "guardrail_verdicts"
EXPORTS = "otlp_exports"
JWKS = "jwks_fetches"

FAMILIES = {
    RELOADS: TallyFamily(
        "Times that files were read again while the gate runs; refused: what was in use stays.",
        ("what", "result"),
        tuple(
            (what, result)
            for what in ("configuration", "certificates", "keys")
            for result in ("taken", "refused")
        ),
    ),
    NAMED: TallyFamily(
        "Requests for a name of `models`, by the model that was to serve them first.", ("name", "model")
    ),
    FALLBACKS: TallyFamily(
        "Requests that fell back to another name, because no unit could serve the one before.",
        ("name", "fallback"),
    ),
    EXPORTS: TallyFamily(
        "Batches for a collector (OTLP): sent, or dropped because it did not accept them.", ("what", "result")
    ),
    JWKS: TallyFamily("Fetches of the keys of JSON Web Tokens from their issuer.", ("result",)),
    GUARDRAIL: TallyFamily(
        "Questions to the guardrail by their result: a verdict, or why there was none.",
        ("phase", "result"),
        tuple(
            (phase, result)
            for phase in ("request", "answer")
            for result in (
                "allowed",
                "denied",
                "changed",
                "timeout",
                "unreachable",
                "nonsense",
                "too_many",
                "too_large",
                "unreadable",
            )
        ),
    ),
}
"""By name. Values of labels come from the configuration or from a table, never from a client."""

TallyKey = tuple[str, ...]
"""The family, and the values of its labels."""

TALLIES: Counter[TallyKey] = Counter(
    {(name, *row): 0 for name, family in FAMILIES.items() for row in family.known}
)
"""What this process has counted since it began."""


def tally(family: str, *labels: str) -> None:
    TALLIES[family, *labels] += 1
