"""What a replay comes to: figures of each run, and a table of their means over the seeds."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil
from statistics import fmean

from loadtests.replay.client import Answer

GOOD_TTFT_S = 2.0
GOOD_TPOT_S = 0.1
LATE_LIMIT_MS = 20.0
"""Later than this, a run was disturbed by other work on the machine: it says little about a router."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of all requests of one run; times in virtual seconds, over the answers that are whole; `whole` is until
    the last token.

    `goodput` is the share of all requests whose TTFT is at most 2 s and whose time per output token at most
    0.1 s, refused and broken ones counting as missed; `hits` the share of prompt tokens that were found in a
    prefix cache.
    """

    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    whole_mean_s: float
    whole_p50_s: float
    whole_p99_s: float
    tpot_mean_s: float
    goodput: float
    hits: float
    refused: float
    broken: float
    per_unit: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """One router under one load with one seed; `missing` says why there are no figures.

    `engine_cpu`, `client_cpu`, `router_cpu`: shares of one core; `late_p99_ms`: how late the units wrote or
    the client sent, whichever is later, in real milliseconds.
    """

    cell: str
    router: str
    seed: int
    figures: Figures | None
    answers: Sequence[Answer] = ()
    missing: str = ""
    engine_cpu: float = 0.0
    client_cpu: float = 0.0
    router_cpu: float = 0.0
    late_p99_ms: float = 0.0


def figures_of(answers: Sequence[Answer], units: int) -> Figures:
    """The figures of one run before so many units."""
    whole = [each for each in answers if not each.trouble]
    ttft = sorted(each.ttft_s for each in whole) or [0.0]
    ends = sorted(each.e2e_s for each in whole) or [0.0]
    good = sum(each.ttft_s <= GOOD_TTFT_S and each.tpot_s <= GOOD_TPOT_S for each in whole)
    cached, prompts = sum(each.cached_tokens for each in whole), sum(each.prompt_tokens for each in whole)
    served = Counter(each.unit for each in whole)
    return Figures(
        ttft_mean_s=fmean(ttft),
        ttft_p50_s=quantile(ttft, 0.5),
        ttft_p99_s=quantile(ttft, 0.99),
        whole_mean_s=fmean(ends),
        whole_p50_s=quantile(ends, 0.5),
        whole_p99_s=quantile(ends, 0.99),
        tpot_mean_s=fmean(each.tpot_s for each in whole) if whole else 0.0,
        goodput=good / len(answers),
        hits=cached / max(prompts, 1),
        refused=sum(each.is_refused for each in answers) / len(answers),
        broken=sum(bool(each.trouble) and not each.is_refused for each in answers) / len(answers),
        per_unit=tuple(served[f"unit-{number}"] for number in range(units)),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of `ordered` does not exceed."""
    return ordered[max(ceil(round(share * len(ordered), 6)), 1) - 1]


_COLUMNS = {
    "ttft_mean_s": ("TTFT mean", "{:.3f}"),
    "ttft_p50_s": ("p50", "{:.3f}"),
    "ttft_p99_s": ("p99", "{:.3f}"),
    "whole_mean_s": ("whole mean", "{:.2f}"),
    "whole_p50_s": ("p50", "{:.2f}"),
    "whole_p99_s": ("p99", "{:.1f}"),
    "tpot_mean_s": ("TPOT", "{:.4f}"),
    "goodput": ("goodput", "{:.1%}"),
    "hits": ("hits", "{:.1%}"),
    "refused": ("refused", "{:.1%}"),
    "broken": ("broken", "{:.1%}"),
}


def table(results: Sequence[Result], gate: str) -> list[tuple[str, ...]]:
    """A row for each load and router: means over the seeds, the ratio of the gate's mean TTFT and whole time
    to this router's, requests per unit with the first seed, and how late units or client were at worst (99th
    percentile of a run).
    """
    heads = [head for head, _ in _COLUMNS.values()]
    ratios = (f"{gate}: TTFT", "whole")
    rows: list[tuple[str, ...]] = [("load", "router", *heads, *ratios, "per unit", "late")]
    for cell, router in dict.fromkeys((each.cell, each.router) for each in results):
        own = [each for each in results if (each.cell, each.router) == (cell, router)]
        found, of_gate = _found(results, cell, router), _found(results, cell, gate)
        start = (cell, router)
        rows.append((*start, *_row(own, found, of_gate)) if found else (*start, own[0].missing))
    return rows


def line(result: Result) -> str:
    """What is printed as soon as a run is done."""
    name = f"{result.cell}  seed {result.seed}  {result.router:24}"
    if result.figures is None:
        return f"{name}{result.missing}"
    values = "  ".join(
        f"{head} {form.format(getattr(result.figures, name))}" for name, (head, form) in _COLUMNS.items()
    )
    cpu = f"CPU router {result.router_cpu:.0%} engine {result.engine_cpu:.0%} client {result.client_cpu:.0%}"
    units = " ".join(map(str, result.figures.per_unit))
    return f"{name}{values}  per unit {units}  {cpu}, late p99 <= {result.late_p99_ms:g} ms"


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


def _found(results: Sequence[Result], cell: str, router: str) -> list[Figures]:
    return [
        each.figures
        for each in results
        if (each.cell, each.router) == (cell, router) and each.figures is not None
    ]


def _row(own: Sequence[Result], found: Sequence[Figures], of_gate: Sequence[Figures]) -> tuple[str, ...]:
    values = [form.format(_mean(found, name)) for name, (_, form) in _COLUMNS.items()]
    ratios = [
        f"{_mean(of_gate, name) / _mean(found, name):.2f} x" if of_gate and _mean(found, name) else "-"
        for name in ("ttft_mean_s", "whole_mean_s")
    ]
    late_ms = max(each.late_p99_ms for each in own)
    late = f"{late_ms:g} ms" + (", disturbed" if late_ms > LATE_LIMIT_MS else "")
    return (*values, *ratios, " ".join(map(str, found[0].per_unit)), late)


def _mean(found: Sequence[Figures], name: str) -> float:
    return fmean(getattr(each, name) for each in found)


assert [each.name for each in fields(Figures)] == [*_COLUMNS, "per_unit"]
