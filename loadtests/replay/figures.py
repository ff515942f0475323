"""What a replay comes to: one row of figures for each cell, and the table of medians over the seeds."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil
from statistics import fmean, median

from loadtests.replay.client import Answer

GOOD_TTFT_S = 2.0
GOOD_TPOT_S = 0.1
LATE_LIMIT_MS = 20.0
"""Later than this, a cell was disturbed by other work on the machine: it says little about a router."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of all requests of one cell; times in virtual seconds, over the answers that are whole.

    `goodput` is the share of all requests whose TTFT is at most 2 s and whose time per output token at most
    0.1 s, refused and broken ones counting as missed; `hits` the share of prompt tokens that were found in a
    prefix cache; `imbalance` the most uncached prompt tokens that a unit computed, over the mean.
    """

    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    e2e_p99_s: float
    goodput: float
    hits: float
    imbalance: float
    refused: float
    broken: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One router at one load with one seed; `missing` says why there are no figures.

    `engine_cpu`, `client_cpu`, `router_cpu`: shares of one core; `late_p99_ms`: how late the units wrote or
    the client sent, whichever is later, in real milliseconds.
    """

    router: str
    load: float
    seed: int
    figures: Figures | None
    answers: Sequence[Answer] = ()
    missing: str = ""
    engine_cpu: float = 0.0
    client_cpu: float = 0.0
    router_cpu: float = 0.0
    late_p99_ms: float = 0.0


def figures_of(answers: Sequence[Answer], units: int) -> Figures:
    """The figures of one cell of so many units."""
    whole = [each for each in answers if not each.trouble]
    ttft = sorted(each.ttft_s for each in whole) or [0.0]
    good = sum(each.ttft_s <= GOOD_TTFT_S and each.tpot_s <= GOOD_TPOT_S for each in whole)
    computed = dict.fromkeys((each.unit for each in whole), 0)
    for each in whole:
        computed[each.unit] += each.prompt_tokens - each.cached_tokens
    cached, prompts = sum(each.cached_tokens for each in whole), sum(each.prompt_tokens for each in whole)
    return Figures(
        ttft_mean_s=fmean(ttft),
        ttft_p50_s=quantile(ttft, 0.5),
        ttft_p90_s=quantile(ttft, 0.9),
        ttft_p99_s=quantile(ttft, 0.99),
        tpot_mean_s=fmean(each.tpot_s for each in whole) if whole else 0.0,
        e2e_p99_s=quantile(sorted(each.e2e_s for each in whole) or [0.0], 0.99),
        goodput=good / len(answers),
        hits=cached / max(prompts, 1),
        imbalance=max(computed.values(), default=0) * units / max(sum(computed.values()), 1),
        refused=sum(each.is_refused for each in answers) / len(answers),
        broken=sum(bool(each.trouble) and not each.is_refused for each in answers) / len(answers),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of `ordered` does not exceed."""
    return ordered[max(ceil(round(share * len(ordered), 6)), 1) - 1]


def saturation(answers: Sequence[Answer], span_s: float) -> float:
    """What a router saturates at, as a multiple of the trace's own arrival rate.

    `answers` are of a replay far beyond it: the rate at which answers were completed between the
    10th and the 90th percentile of completions, when every unit had more than it could do, over the rate of
    arrivals of the trace as it is (`span_s` from first to last).
    """
    ends = sorted(each.due_s + each.e2e_s for each in answers if not each.trouble)
    first, last = int(0.1 * len(ends)), int(0.9 * len(ends)) - 1
    return (last - first) / (ends[last] - ends[first]) / ((len(answers) - 1) / span_s)


_COLUMNS = {
    "ttft_mean_s": ("TTFT mean", "{:.2f}"),
    "ttft_p50_s": ("p50", "{:.2f}"),
    "ttft_p90_s": ("p90", "{:.2f}"),
    "ttft_p99_s": ("p99", "{:.2f}"),
    "tpot_mean_s": ("TPOT", "{:.3f}"),
    "e2e_p99_s": ("e2e p99", "{:.1f}"),
    "goodput": ("goodput", "{:.1%}"),
    "hits": ("hits", "{:.1%}"),
    "imbalance": ("imbalance", "{:.2f}"),
    "refused": ("refused", "{:.1%}"),
    "broken": ("broken", "{:.1%}"),
}


def table(cells: Sequence[Cell], gate: str) -> list[tuple[str, ...]]:
    """A row for each load and router: medians over the seeds, the range of the mean TTFT, the ratio of the
    gate's mean TTFT to this one, and how late units or client were at worst (99th percentile of a cell).
    """
    heads = [head for head, _ in _COLUMNS.values()]
    rows: list[tuple[str, ...]] = [("load", "router", *heads, "TTFT mean, range", f"{gate} is", "late")]
    for load, router in sorted(dict.fromkeys((each.load, each.router) for each in cells), key=_load):
        own = [each for each in cells if (each.load, each.router) == (load, router)]
        means = _means(cells, load, router)
        start = (f"{load:g}", router)
        rows.append(
            (*start, *_row(own, means, _means(cells, load, gate))) if means else (*start, own[0].missing)
        )
    return rows


def line(cell: Cell) -> str:
    """What is printed as soon as a cell is done."""
    name = f"load {cell.load:g}  seed {cell.seed}  {cell.router:28}"
    if cell.figures is None:
        return f"{name}{cell.missing}"
    values = "  ".join(
        f"{head} {form.format(getattr(cell.figures, name))}" for name, (head, form) in _COLUMNS.items()
    )
    cpu = f"CPU router {cell.router_cpu:.0%} engine {cell.engine_cpu:.0%} client {cell.client_cpu:.0%}"
    return f"{name}{values}  {cpu}, late p99 <= {cell.late_p99_ms:g} ms"


def as_text(rows: Sequence[tuple[str, ...]]) -> str:
    """The table for a terminal, or for a page in Markdown."""
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(len(row[column]) for row in full) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _load(row: tuple[float, str]) -> float:
    return row[0]


def _means(cells: Sequence[Cell], load: float, router: str) -> list[float]:
    own = [each.figures for each in cells if (each.load, each.router) == (load, router)]
    return [each.ttft_mean_s for each in own if each is not None]


def _row(cells: Sequence[Cell], means: Sequence[float], of_gate: Sequence[float]) -> tuple[str, ...]:
    found = [each.figures for each in cells if each.figures is not None]
    values = [
        form.format(median(getattr(each, name) for each in found)) for name, (_, form) in _COLUMNS.items()
    ]
    ratio = f"{median(of_gate) / median(means):.2f} x" if of_gate else "-"
    late_ms = max(each.late_p99_ms for each in cells)
    late = f"{late_ms:g} ms" + (", disturbed" if late_ms > LATE_LIMIT_MS else "")
    return (*values, f"{min(means):.2f}-{max(means):.2f}", ratio, late)


assert [each.name for each in fields(Figures)] == list(_COLUMNS)
