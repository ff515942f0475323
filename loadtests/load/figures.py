"""What a load came to: the figures of one step of it, and how they went over time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from loadtests.drill.answers import End
from loadtests.drill.records import Record
from loadtests.drill.summary import Summary, percentile
from loadtests.load.seen import Seen

SHARES = {"median": 0.5, "95 %": 0.95, "99 %": 0.99}
"""Percentiles that are shown: the time that this share of all do not exceed."""
Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class LoadStep:
    """So many users of one workload. `failovers`: requests that the gate moved or resumed meanwhile; None: it
    was not asked.
    """

    workload: str
    users: int
    summary: Summary
    failovers: int | None = None
    seen: Seen = field(default_factory=Seen)

    @property
    def failed(self) -> int:
        """Requests without a whole answer."""
        return len(self.summary.records) - self.summary.ends()[End.WHOLE]

    @property
    def requests_per_s(self) -> float:
        """Requests that ended in a second."""
        return len(self.summary.records) / max(self.summary.seconds, 1e-9)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers in a second, of all users together."""
        return sum(record.tokens for record in self.summary.records) / max(self.summary.seconds, 1e-9)

    def times(self) -> dict[str, list[float]]:
        """Each latency by its name: all its values, in seconds."""
        summary = self.summary
        return {
            "first token": summary.ttft_s(),
            "between tokens": summary.itl_s(),
            "whole answer": summary.e2e_s(),
        }

    def why(self) -> list[tuple[str, int]]:
        """The commonest reasons of failures."""
        reasons = Counter(
            f"{record.end.value}: {record.why}"
            for record in self.summary.records
            if record.end is not End.WHOLE
        )
        return reasons.most_common(3)


@dataclass(frozen=True, slots=True)
class Course:
    """A load over time: lines of points (second, value) by the name of each chart, so many seconds, and what
    befell units when.
    """

    lines: dict[str, dict[str, Points]]
    seconds: float = 0.0
    faults: Sequence[tuple[float, str]] = ()


def course(records: Sequence[Record], seen: Seen | None = None) -> Course:
    """How the records went, second by second from the first request on, and what the gate said meanwhile."""
    if not records:
        return Course({})
    seen = seen or Seen()
    start = min(record.sent_at for record in records)
    firsts, gaps = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    ends, tokens = Counter[tuple[int, End]](), Counter[int]()
    in_flight = defaultdict[int, float](float)
    for record in records:
        _add_flight(in_flight, record.sent_at - start, record.ended_at - start)
        ends[int(record.ended_at - start), record.end] += 1
        if record.first_at is None or record.ttft_s is None:
            continue
        if record.gaps_s:
            firsts[int(record.first_at - start)].append(record.ttft_s)
        came_at = accumulate(record.gaps_s, initial=record.first_at - start)
        per_piece = record.tokens / (len(record.gaps_s) + 1)
        for at, gap_s in zip(came_at, [0.0, *record.gaps_s], strict=True):
            tokens[int(at)] += per_piece  # type: ignore[assignment]  # a Counter adds up any number
            if gap_s:
                gaps[int(at)].append(gap_s)
    seconds = range(int(max(record.ended_at for record in records) - start) + 1)
    failed = sorted({end for _, end in ends} - {End.WHOLE})
    lines: dict[str, dict[str, Points]] = {
        "Requests that ended in a second": {
            str(end): [(at, ends[at, end]) for at in seconds] for end in (End.WHOLE, *failed)
        },
        "TTFT, s": _percentiles(firsts),
    }
    if seen.rotation:
        lines["Units in rotation"] = {"units": _since(seen.rotation, start, len(seconds))}
        lines["Streams resumed so far"] = {"streams": _since(seen.resumed, start, len(seconds))}
    lines |= {
        "Between tokens, ms": _percentiles(gaps, 1000.0),
        "Output tokens a second": {"tokens": [(at, tokens[at]) for at in seconds]},
        "Requests in flight": {"in flight": [(float(at), in_flight[at]) for at in seconds]},
    }
    faults = [(max(0.0, at - start), what) for at, what in sorted(seen.faults.items())]
    return Course(lines, float(len(seconds)), faults)


def _add_flight(in_flight: dict[int, float], sent_at: float, ended_at: float) -> None:
    """Adds to each second the share of it in which a request was in flight."""
    for second in range(int(sent_at), int(ended_at) + 1):
        in_flight[second] += max(0.0, min(ended_at, second + 1) - max(sent_at, second))


def _since(points: Points, start: float, seconds: int) -> Points:
    return [(at - start, value) for at, value in points if 0 <= at - start <= seconds]


def _percentiles(values: dict[int, list[float]], factor: float = 1.0) -> dict[str, Points]:
    return {
        name: [(at, factor * percentile(found, share)) for at, found in sorted(values.items())]
        for name, share in SHARES.items()
        if name != "99 %"  # Of the few values of one second it would be the largest.
    }
