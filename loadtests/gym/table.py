"""The gym's tables: one line a cell, worst first; and one line a rival, for one who looks into a cell."""

from __future__ import annotations

from collections.abc import Sequence

from loadtests.gym.cells import GATE
from loadtests.gym.figures import Row
from loadtests.kit.report import columns

HEAD = (
    "cell", "req/s", "TTFT", "x simple", "x oracle", "p99", "x simple", "whole", "x simple", "x oracle",
    "refused", "wrongly", "idle", "noise", "per unit", "fails",
)  # fmt: skip


def cells(rows: Sequence[Row], *, markdown: bool) -> str:
    """All cells, the failed ones first, then by the worst of their ratios."""
    ranked = sorted(rows, key=lambda row: (not row.fails, -row.worst))
    return _table(HEAD, [_line(row) for row in ranked], markdown=markdown)


def rivals(row: Row, *, markdown: bool) -> str:
    """All rivals of a cell."""
    head = ("rival", "TTFT", "p99", "whole", "p50 whole", "refused", "idle", "hits", "per unit")
    lines = [
        (
            name,
            _s(each.ttft_s),
            _s(each.p99_s),
            _s(each.whole_s),
            _s(each.p50_whole_s),
            f"{each.refused:.3g}",
            f"{each.idle_s:.2f}",
            f"{each.hits:.0%}",
            _units(each.per_unit),
        )
        for name, each in row.figures.items()
    ]
    return f"{row.outcome.cell}, {row.outcome.rate:.3g}/s\n" + _table(head, lines, markdown=markdown)


def _line(row: Row) -> tuple[str, ...]:
    own, best, oracle = row.figures[GATE], row.best, row.figures.get("oracle")
    return (
        str(row.outcome.cell),
        f"{row.outcome.rate:.3g}",
        _s(own.ttft_s),
        _x(own.ttft_s, best.get("ttft_s")),
        _x(own.ttft_s, oracle and oracle.ttft_s),
        _s(own.p99_s),
        _x(own.p99_s, best.get("p99_s")),
        _s(own.whole_s),
        _x(own.whole_s, best.get("whole_s")),
        _x(own.whole_s, oracle and oracle.whole_s),
        f"{own.refused:.3g}",
        f"{row.wrongly_refused:.3g}",
        f"{own.idle_s:.2f}",
        f"{row.noise:.1%}",
        _units(own.per_unit),
        " ".join(row.fails) or "-",
    )


def _s(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 10.0 else f"{seconds:.1f}"


def _x(own: float, other: float | None) -> str:
    return f"{own / other:.2f}" if other else ""


def _units(counts: Sequence[int]) -> str:
    if len(counts) <= 6:
        return " ".join(map(str, counts))
    return f"{min(counts)} to {max(counts)}"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]], *, markdown: bool) -> str:
    if markdown:
        rows = [head, ["---"] * len(head), *lines]
        return "\n".join("| " + " | ".join(each) + " |" for each in rows)
    return columns([head, *lines])
