"""A run as a picture: what became of the requests, how long they took, and what was believed of each unit."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from loadtests.drill.answers import End
from loadtests.drill.run import Run

_ENDS = {
    End.WHOLE: "#7fb77e",
    End.ERROR_EVENT: "#f2b134",
    End.REFUSED: "#9e9e9e",
    End.LOST: "#d7263d",
    End.HUNG: "#7b1e7a",
    End.REPEATED: "#1b998b",
    End.WRONG: "#000000",
}
_VERDICTS = {
    "up": "#bfe3bf",
    "suspect": "#f7dc8f",
    "probation": "#b7d3f2",
    "starting": "#dddddd",
    "down": "#e07a7a",
}


def draw(run: Run, path: Path) -> None:
    """Write the picture."""
    matplotlib.use("Agg")
    units = run.drill.topology.unit_names()
    has_gates = run.drill.topology.router == "cellgate"
    heights = [3, 3, 1.6, 0.5 + 0.45 * len(units)] if has_gates else [3, 3]
    figure, rows = plt.subplots(
        len(heights), 1, sharex=True, figsize=(14, 1.5 + sum(heights)), height_ratios=heights, squeeze=False
    )
    axes: list[Any] = [row[0] for row in rows]
    _draw_ends(axes[0], run)
    _draw_latency(axes[1], run)
    if has_gates:
        _draw_rotation(axes[2], run, units)
        _draw_verdicts(axes[3], run, units)
    for axis in axes:
        _mark_blows(axis, run)
    _name_blows(axes[0], run)
    axes[-1].set_xlabel("seconds since the load began")
    axes[-1].set_xlim(0, max(run.drill.load.seconds, run.outcome.summary.seconds))
    broken = [verdict.name for verdict in run.verdicts if not verdict.kept]
    told = f"broken: {', '.join(broken)}" if broken else "every promise kept"
    figure.suptitle(f"{run.drill.name} through {run.drill.topology.router}: {told}", x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_ends(axis: Any, run: Run) -> None:
    records = run.outcome.summary.records
    width = max(1.0, run.outcome.summary.seconds / 240)
    counts = Counter((int((r.ended_at - run.began_at) / width), r.end) for r in records)
    slots = sorted({slot for slot, _ in counts})
    floor = [0.0] * len(slots)
    totals = run.outcome.summary.ends()
    for end, color in _ENDS.items():
        if totals[end]:
            heights = [counts[slot, end] / width for slot in slots]
            places = [(slot + 0.5) * width for slot in slots]
            axis.bar(places, heights, width, floor, color=color, label=f"{end.value}: {totals[end]}")
            floor = [low + high for low, high in zip(floor, heights, strict=True)]
    axis.set_ylabel("requests that\nended in a second")
    axis.legend(loc="center left", bbox_to_anchor=(1.005, 0.5), fontsize=8)


def _draw_latency(axis: Any, run: Run) -> None:
    streams = [r for r in run.outcome.summary.records if r.gaps_s and r.first_at is not None]
    first = [(r.first_at - run.began_at, r.ttft_s) for r in streams if r.first_at is not None]
    worst = [(r.ended_at - run.began_at, max(r.gaps_s)) for r in streams]
    for points, color, label in (
        (first, "#2a6f97", "TTFT"),
        (worst, "#e07a1f", "longest gap between\ntokens of a stream"),
    ):
        axis.plot(*_columns(points), ".", color=color, markersize=3, alpha=0.5, label=label)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(lambda *_: "")
    axis.set_ylabel("seconds")
    axis.grid(axis="y", alpha=0.3)
    axis.legend(loc="center left", bbox_to_anchor=(1.005, 0.5), fontsize=8, markerscale=3)


def _draw_rotation(axis: Any, run: Run, units: Sequence[str]) -> None:
    end = max(run.drill.load.seconds, run.outcome.summary.seconds)
    verdicts, points = dict.fromkeys(units, "up"), [(0.0, float(len(units)))]
    for flip in (f for f in run.flips if f.gate == 0 and f.unit in verdicts):
        verdicts[flip.unit] = flip.after
        points.append((flip.at - run.began_at, float(sum(each == "up" for each in verdicts.values()))))
    axis.step(
        *_columns([*points, (end, points[-1][1])]), where="post", color="#2e8b57", label="units in rotation"
    )
    axis.set_ylim(0, len(units) * 1.15)
    axis.set_ylabel("units")
    beside = axis.twinx()
    beside.step(
        *_columns([(at - run.began_at, count) for at, count in run.resumed]),
        where="post",
        color="#7b1e7a",
        label=f"streams resumed: {run.outcome.continued}",
    )
    beside.set_ylim(0, max(1, run.outcome.continued) * 1.15)
    beside.yaxis.get_major_locator().set_params(integer=True)
    handles = [*axis.get_lines(), *beside.get_lines()]
    beside.legend(handles=handles, loc="center left", bbox_to_anchor=(1.03, 0.5), fontsize=8)


def _draw_verdicts(axis: Any, run: Run, units: Sequence[str]) -> None:
    end = max(run.drill.load.seconds, run.outcome.summary.seconds)
    for row, unit in enumerate(units):
        since, verdict = 0.0, "up"
        for flip in (f for f in run.flips if f.unit == unit and f.gate == 0):
            at = flip.at - run.began_at
            axis.barh(row, at - since, left=since, height=0.7, color=_VERDICTS.get(verdict, "#ffffff"))
            since, verdict = at, flip.after
        axis.barh(row, end - since, left=since, height=0.7, color=_VERDICTS.get(verdict, "#ffffff"))
    axis.set_yticks(range(len(units)), units)
    axis.invert_yaxis()
    patches = [Patch(color=color, label=verdict) for verdict, color in _VERDICTS.items()]
    axis.legend(handles=patches, loc="center left", bbox_to_anchor=(1.005, 0.5), fontsize=8)


def _mark_blows(axis: Any, run: Run) -> None:
    for blow in run.outcome.blows:
        begin = blow.at - run.began_at
        axis.axvline(begin, color="#444444", linewidth=0.8)
        if blow.healed_at is not None:
            axis.axvspan(
                begin, blow.healed_at - run.began_at, color="#444444", alpha=0.1, linewidth=0, zorder=0
            )


def _name_blows(axis: Any, run: Run) -> None:
    for blow in run.outcome.blows:
        at = blow.at - run.began_at
        transform = axis.get_xaxis_transform()
        axis.text(at, 1.02, blow.what, transform=transform, rotation=35, fontsize=7, ha="left", va="bottom")


def _columns(points: Sequence[tuple[float, float | None]]) -> tuple[list[float], list[float | None]]:
    return [at for at, _ in points], [value for _, value in points]
