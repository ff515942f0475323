"""What a cell shows: means over its seeds, ratios to the best of the simple rivals and the oracle, verdicts.

Requests that the gate has refused are left out of what it is compared with as well; refusing one that the
oracle answers in time is a failure by itself.
"""

from __future__ import annotations

from collections import Counter
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
    prefixes repeat unevenly; where the oracle does not get there either, 1.05 times what it comes to. oracle
    (1.15): of its mean TTFT on unequal units. idle_s (0.5): beyond what a long prompt takes from scratch, for
    which it may be better to wait for the unit that holds it. far (0.02): the share of requests that may go
    to a cell far away, at loads for which the near ones have room.
    """

    ttft: float = 1.05
    p99: float = 1.1
    whole: float = 1.05
    prefix: float = 0.8
    oracle: float = 1.15
    ttft_s: float = 0.003
    p99_s: float = 0.02
    whole_s: float = 0.02
    idle_s: float = 0.5
    far: float = 0.02


LIMITS = Limits()
_LIMITED = {
    "ttft_s": (LIMITS.ttft, LIMITS.ttft_s),
    "p99_s": (LIMITS.p99, LIMITS.p99_s),
    "whole_s": (LIMITS.whole, LIMITS.whole_s),
}


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


Missing = list[set[int]]
"""By seed, the numbers of requests that do not count."""


@dataclass(frozen=True, slots=True)
class Row:
    """A cell as the table shows it. `best` is the best of the simple rivals, term by term; `fails` are the
    limits that the gate is beyond, by more than noise; `noise` is by how much the mean TTFT of two runs of
    least connections with other chances differs; `worst` is the largest ratio to `best`.
    """

    outcome: Outcome
    figures: dict[str, Figure]
    best: dict[str, float]
    noise: float
    wrongly_refused: float
    fails: tuple[str, ...]
    worst: float


def row(outcome: Outcome, *, uneven: bool, unequal: bool) -> Row:
    """Compare. `uneven`: prefixes repeat unevenly; `unequal`: units differ in speed."""
    refused = [{c.request.number for c in run.calls if c.refused} for run in outcome.runs[GATE]]
    figures = {name: figure(runs, refused) for name, runs in outcome.runs.items()}
    own, best, wrongly = figures[GATE], best_of(figures), _wrongly_refused(outcome, refused)
    fails = beyond(figures)
    if uneven and "leastconn" in figures and own.ttft_s > _prefix_limit_s(figures):
        fails.append("prefix")
    if unequal and "oracle" in figures:
        limit_s = LIMITS.oracle * figures["oracle"].ttft_s + LIMITS.ttft_s
        fails += ["oracle"] if own.ttft_s > limit_s else []
    if own.idle_s > LIMITS.idle_s + _longest_prefill_s(outcome):
        fails.append("idle")
    if wrongly:
        fails.append("refused")
    if _far_share(outcome) > LIMITS.far:
        fails.append("far")
    fails += [
        f"{name} of model {model}" for model in _minor_models(outcome) for name in _of_model(outcome, model)
    ]
    worst = max((getattr(own, name) / best[name] for name in best), default=0.0)
    return Row(outcome, figures, best, spread(figures, "ttft_s"), wrongly, tuple(fails), worst)


def figure(runs: list[Run], without: Missing) -> Figure:
    """The figures of a rival."""
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


def _prefix_limit_s(figures: dict[str, Figure]) -> float:
    """What caches have to bring: a fifth off what least connections takes, or what the oracle gets."""
    at_best_s = LIMITS.ttft * figures["oracle"].ttft_s if "oracle" in figures else 0.0
    return max(LIMITS.prefix * figures["leastconn"].ttft_s, at_best_s + LIMITS.ttft_s)


def best_of(figures: dict[str, Figure]) -> dict[str, float]:
    """The least of what the simple rivals come to; nothing where none was run."""
    simple = [figures[name] for name in SIMPLE if name in figures]
    return {name: min(getattr(each, name) for each in simple) for name in _LIMITED} if simple else {}


def beyond(figures: dict[str, Figure]) -> list[str]:
    """In what the gate is worse than the best of the simple rivals by more than is allowed and noise."""
    own, best = figures[GATE], best_of(figures)
    return [
        name.removesuffix("_s")
        for name, (limit, slack_s) in _LIMITED.items()
        if best and getattr(own, name) > best[name] * (limit + spread(figures, name)) + slack_s
    ]


def spread(figures: dict[str, Figure], name: str) -> float:
    """By how much two runs of least connections with other chances differ, as a share."""
    if AGAIN not in figures or "leastconn" not in figures:
        return 0.0
    one, other = getattr(figures["leastconn"], name), getattr(figures[AGAIN], name)
    return float(abs(other / one - 1.0))


def _longest_prefill_s(outcome: Outcome) -> float:
    slowest = min(place.model.prefill_tokens_s for place in FLEETS[outcome.cell.fleet].places)
    tokens = sorted(c.request.prompt.tokens for c in outcome.runs[GATE][0].calls)
    return tokens[int(0.99 * len(tokens))] / slowest


def _far_share(outcome: Outcome) -> float:
    """The share of requests that the gate has sent to cells that are far away."""
    fleet = FLEETS[outcome.cell.fleet]
    far = {number for number, place in enumerate(fleet.places) if fleet.cell(place).spill_s}
    counts = [
        (number in far, count) for run in outcome.runs[GATE] for number, count in enumerate(run.per_unit)
    ]
    return sum(count for is_far, count in counts if is_far) / max(sum(count for _, count in counts), 1)


def _minor_models(outcome: Outcome) -> list[str]:
    """The models of which less is asked than of another: their requests must not wait for the other's."""
    asked = Counter(c.request.model for c in outcome.runs[GATE][0].calls)
    return [model for model, _ in asked.most_common()[1:]]


def _of_model(outcome: Outcome, model: str) -> list[str]:
    gate = outcome.runs[GATE]
    others = [{c.request.number for c in run.calls if c.refused or c.request.model != model} for run in gate]
    return beyond({name: figure(runs, others) for name, runs in outcome.runs.items()})


def _wrongly_refused(outcome: Outcome, refused: Missing) -> float:
    """Requests, by seed, that the gate has refused and the oracle has answered in time."""
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
