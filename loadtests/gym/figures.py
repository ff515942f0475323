"""What a cell shows: means over its seeds, ratios to the best of the simple rivals and the oracle, verdicts.

Requests that the gate has refused are left out of what it is compared with as well; refusing one that the
oracle answers in time is a failure by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from statistics import fmean, median
from typing import NamedTuple

from loadtests.gym.cells import AGAIN, GATE, Outcome
from loadtests.gym.fleets import FLEETS
from loadtests.gym.nouns import Run
from loadtests.gym.rivals import SIMPLE

MAX_WAIT_S = 60.0
"""Nobody is expected to wait longer than the gate's queue would let him."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Ratios that the gate must keep to, and what is nothing in seconds.

    ttft, whole (1.05), p99 (1.1): of the best simple rival. prefix (0.8): of leastconn's mean TTFT where
    prefixes repeat unevenly. oracle (1.15): of its mean TTFT on unequal units. idle_s (0.5): beyond what a
    long prompt takes from scratch, for which it may be better to wait for the unit that holds it.
    """

    ttft: float = 1.05
    p99: float = 1.1
    whole: float = 1.05
    prefix: float = 0.8
    oracle: float = 1.15
    ttft_s: float = 0.003
    p99_s: float = 0.015
    whole_s: float = 0.02
    idle_s: float = 0.5


LIMITS = Limits()


class Figure(NamedTuple):
    """One rival in one cell: seconds, means over seeds but for the idle time, which is the longest."""

    ttft_s: float
    p99_s: float
    whole_s: float
    p50_whole_s: float
    refused: float
    idle_s: float
    hits: float
    per_unit: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A cell as the table shows it. `fails` are the limits it is beyond, by more than noise; `noise` is by
    how much two runs of least connections with other chances differ, as a ratio of their TTFT.
    """

    outcome: Outcome
    figures: dict[str, Figure]
    best: dict[str, float]
    noise: float
    wrongly_refused: float
    fails: tuple[str, ...]
    worst: float


def figure(runs: list[Run], without: list[set[int]]) -> Figure:
    """The figures of a rival; the numbers in `without` (by seed) do not count."""
    firsts, ends = [], []
    for run, left_out in zip(runs, without, strict=True):
        calls = [c for c in run.calls if not c.refused and c.request.number not in left_out]
        firsts.append(sorted(c.first_at - c.came_at for c in calls) or [nan])
        ends.append([c.ended_at - c.came_at for c in calls] or [nan])
    return Figure(
        fmean(map(fmean, firsts)),
        fmean(ttfts[int(0.99 * len(ttfts))] for ttfts in firsts),
        fmean(map(fmean, ends)),
        fmean(map(median, ends)),
        fmean(sum(1 for c in run.calls if c.refused) for run in runs),
        max(run.idle_beside_queue_s for run in runs),
        fmean(run.hits for run in runs),
        runs[0].per_unit,
    )


def row(outcome: Outcome, *, uneven: bool, unequal: bool, limits: Limits = LIMITS) -> Row:
    """Compare. `uneven`: prefixes repeat unevenly; `unequal`: units differ in speed."""
    gate = outcome.runs[GATE]
    refused = [{c.request.number for c in run.calls if c.refused} for run in gate]
    figures = {name: figure(runs, refused) for name, runs in outcome.runs.items()}
    simple = [figures[name] for name in SIMPLE if name in figures]
    best = (
        {name: min(getattr(each, name) for each in simple) for name in ("ttft_s", "p99_s", "whole_s")}
        if simple
        else {}
    )
    own = figures[GATE]
    noise = _spread(figures, "ttft_s")
    fails = [
        name
        for name, limit, slack_s, noisy in (
            ("ttft_s", limits.ttft, limits.ttft_s, noise),
            ("p99_s", limits.p99, limits.p99_s, _spread(figures, "p99_s")),
            ("whole_s", limits.whole, limits.whole_s, _spread(figures, "whole_s")),
        )
        if best and getattr(own, name) > best[name] * (limit + noisy) + slack_s
    ]
    if uneven and "leastconn" in figures and own.ttft_s > limits.prefix * figures["leastconn"].ttft_s:
        fails.append("prefix")
    if (
        unequal
        and "oracle" in figures
        and own.ttft_s > limits.oracle * figures["oracle"].ttft_s + limits.ttft_s
    ):
        fails.append("oracle")
    if own.idle_s > limits.idle_s + _longest_prefill_s(outcome):
        fails.append("idle")
    wrongly = _wrongly_refused(outcome, refused)
    if wrongly:
        fails.append("refused")
    worst = max((getattr(own, name) / best[name] for name in best), default=0.0)
    return Row(outcome, figures, best, noise, wrongly, tuple(n.removesuffix("_s") for n in fails), worst)


def _spread(figures: dict[str, Figure], name: str) -> float:
    if AGAIN not in figures or "leastconn" not in figures:
        return 0.0
    one, other = getattr(figures["leastconn"], name), getattr(figures[AGAIN], name)
    return float(abs(other / one - 1.0))


def _longest_prefill_s(outcome: Outcome) -> float:
    slowest = min(place.model.prefill_tokens_s for place in FLEETS[outcome.cell.fleet].places)
    tokens = sorted(c.request.prompt.tokens for c in outcome.runs[GATE][0].calls)
    return tokens[int(0.99 * len(tokens))] / slowest


def _wrongly_refused(outcome: Outcome, refused: list[set[int]]) -> float:
    """Requests that the gate has refused and the oracle, by seed, has answered in time."""
    oracle = outcome.runs.get("oracle")
    if oracle is None:
        return fmean(map(len, refused))
    return fmean(
        sum(
            1
            for c in run.calls
            if c.request.number in numbers and c.first_at - c.came_at <= min(c.request.deadline_s, MAX_WAIT_S)
        )
        for run, numbers in zip(oracle, refused, strict=True)
    )
