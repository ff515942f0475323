"""A run in figures, laid out as vLLM's serving benchmark does it."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from loadtests.drill.answers import End
from loadtests.drill.records import Record

_WIDTH = 50


@dataclass(frozen=True, slots=True)
class Goal:
    """What goodput counts: whole answers whose first token and mean time per token are within these."""

    ttft_s: float
    tpot_s: float

    def met_by(self, record: Record) -> bool:
        """Whether this one counts."""
        if record.end is not End.WHOLE or record.ttft_s is None:
            return False
        return record.ttft_s <= self.ttft_s and (record.tpot_s or 0.0) <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Summary:
    """All that is asked of a run's records; `seconds` from the first request to the last end."""

    records: Sequence[Record]
    goal: Goal

    @property
    def seconds(self) -> float:
        """How long the load lasted."""
        if not self.records:
            return 0.0
        return max(r.ended_at for r in self.records) - min(r.sent_at for r in self.records)

    def ends(self) -> Counter[End]:
        """How many requests ended how."""
        return Counter(record.end for record in self.records)

    def goodput_share(self) -> float:
        """The share of all requests that met the goal."""
        return sum(map(self.goal.met_by, self.records)) / max(1, len(self.records))

    def ttft_s(self) -> list[float]:
        """Of every stream that showed a token; answers in one piece have no first token to speak of."""
        return [r.ttft_s for r in self.records if r.gaps_s and r.ttft_s is not None]

    def tpot_s(self) -> list[float]:
        """Of every stream, the mean time per token after the first."""
        return [r.tpot_s for r in self.records if r.tpot_s is not None]

    def itl_s(self) -> list[float]:
        """Every gap between two tokens of a stream."""
        return [gap for record in self.records for gap in record.gaps_s]

    def e2e_s(self) -> list[float]:
        """Of every whole answer."""
        return [r.e2e_s for r in self.records if r.end is End.WHOLE]

    def lines(self) -> Iterator[str]:
        """The table for people."""
        seconds, ends = max(self.seconds, 1e-9), self.ends()
        tokens, prompt = sum(r.tokens for r in self.records), sum(r.prompt_tokens for r in self.records)
        yield " Serving Benchmark Result ".center(_WIDTH, "=")
        for end in End:
            yield _row(f"Requests, {end.value}:", f"{ends[end]}")
        yield _row("Benchmark duration (s):", f"{self.seconds:.2f}")
        yield _row("Total input tokens:", f"{prompt}")
        yield _row("Total generated tokens:", f"{tokens}")
        yield _row("Request throughput (req/s):", f"{len(self.records) / seconds:.2f}")
        yield _row("Request goodput (req/s):", f"{sum(map(self.goal.met_by, self.records)) / seconds:.2f}")
        yield _row("Output token throughput (tok/s):", f"{tokens / seconds:.2f}")
        for title, short, values in self._latencies():
            yield f" {title} ".center(_WIDTH, "-")
            for name, figure in FIGURES.items():
                shown = f"{1000 * figure(values):.2f}" if values else "-"
                yield _row(f"{name} {short} (ms):", shown)
        yield "=" * _WIDTH

    def _latencies(self) -> Iterator[tuple[str, str, list[float]]]:
        yield "Time to First Token", "TTFT", self.ttft_s()
        yield "Time per Output Token (excl. 1st token)", "TPOT", self.tpot_s()
        yield "Inter-token Latency", "ITL", self.itl_s()
        yield "End-to-end Latency", "E2EL", self.e2e_s()


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


FIGURES: dict[str, Callable[[Sequence[float]], float]] = {
    "Mean": lambda values: sum(values) / len(values),
    "Median": lambda values: percentile(values, 0.5),
    "P99": lambda values: percentile(values, 0.99),
}


def _row(label: str, value: str) -> str:
    return f"{label:<40}{value:<10}".rstrip()
