"""The benchmark's figures and the table they end in."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

PACE_LIMIT = 1.05
"""Streams later than this were not measured at the rate asked for; a backlog is cheap, served in batches."""

QUIET_LIMIT = 0.10
"""Share of the machine that others may take; beyond it, wake-ups and backlogs change what a byte costs."""

COLUMNS = (
    "target",
    "us a request",
    "range",
    "x HAProxy",
    "us a chunk",
    "range",
    "x HAProxy",
    "requests/s",
    "stream pace",
    "reads a chunk",
    "lag ms",
    "others",
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One load on one target in one round.

    `cpu_us` is the proxy's CPU for one answer (a request or a streamed token), `pace` how long the median
    stream took against how long its engine took to emit it, `reads_each` how often a client read per answer,
    `lag_ms` the 99th percentile of the generator's own timer lateness, `others` the share of the machine that
    processes outside the benchmark took.
    """

    target: str
    kind: str
    cpu_us: float
    answers_per_s: float
    pace: float
    reads_each: float
    lag_ms: float
    others: float

    def line(self) -> str:
        """What is printed as soon as it is measured."""
        pace = f", pace {self.pace:.3f}" if self.kind == "streams" else ""
        return (
            f"{self.target:10}{self.kind:10}{self.cpu_us:8.1f} us CPU each {self.answers_per_s:9.0f}/s"
            f"{pace}, generator lag p99 {self.lag_ms:.1f} ms, others took {self.others:.0%}"
        )


def table(figures: Sequence[Figure]) -> list[tuple[str, ...]]:
    """One row a target, in the order measured: medians over the rounds, and ratios of those medians."""
    targets = list(dict.fromkeys(each.target for each in figures))
    return [COLUMNS, *(_row(figures, target) for target in targets)]


def _row(figures: Sequence[Figure], target: str) -> tuple[str, ...]:
    requests = [each for each in figures if (each.target, each.kind) == (target, "requests")]
    streams = [each for each in figures if (each.target, each.kind) == (target, "streams")]
    return (
        target,
        *_cpu(figures, requests),
        *_cpu(figures, streams),
        f"{median(each.answers_per_s for each in requests):.0f}",
        f"{median(each.pace for each in streams):.3f}",
        f"{median(each.reads_each for each in streams):.2f}",
        f"{max(each.lag_ms for each in (*requests, *streams)):.1f}",
        f"{median(each.others for each in (*requests, *streams)):.0%}",
    )


def _cpu(figures: Sequence[Figure], own: Sequence[Figure]) -> tuple[str, str, str]:
    """Median, range and ratio of a target's CPU; dashes where no proxy stands."""
    costs = [each.cpu_us for each in own]
    if not any(costs):
        return "-", "-", "-"
    haproxy = [each.cpu_us for each in figures if (each.target, each.kind) == ("haproxy", own[0].kind)]
    ratio = f"{median(costs) / median(haproxy):.2f}" if haproxy else "-"
    return f"{median(costs):.1f}", f"{min(costs):.1f}-{max(costs):.1f}", ratio


def as_text(rows: Sequence[tuple[str, ...]]) -> str:
    """The table for a terminal."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def as_markdown(rows: Sequence[tuple[str, ...]]) -> str:
    """The table for docs/performance.md."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---" + "|---:" * (len(COLUMNS) - 1) + "|")
    return "\n".join(lines)


def machine() -> str:
    """One line on what the figures were taken on, and how busy it was."""
    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    cpu = models[0].partition(":")[2].strip() if models else platform.machine()
    return (
        f"{os.cpu_count()} x {cpu}, Linux {platform.release()}, Python {platform.python_version()}, "
        f"load average {os.getloadavg()[0]:.1f}"
    )
