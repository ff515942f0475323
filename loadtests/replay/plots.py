"""The plots of a replay, as PNG: how long users wait with each router, and how that grows with load."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.ticker import PercentFormatter

from loadtests.replay.figures import GOOD_TTFT_S, Cell, Figures

_COLOURS = ("#d62728", "#1f77b4", "#17becf", "#9467bd", "#ff7f0e", "#7f7f7f", "#8c564b", "#2ca02c")
_PANELS: tuple[tuple[str, Callable[[Figures], float], bool], ...] = (
    ("mean TTFT, s", lambda each: each.ttft_mean_s, False),
    ("p99 TTFT, s", lambda each: each.ttft_p99_s, False),
    ("goodput", lambda each: each.goodput, True),
    ("prefix hits", lambda each: each.hits, True),
)


def draw(cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Write `ttft.png` and `loads.png` into `folder`; what has no figures is left out."""
    cells = [each for each in cells if each.figures is not None]
    if not cells:
        return []
    names = list(dict.fromkeys(each.router for each in cells))
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    return [
        _distributions(cells, colours, folder / "ttft.png"),
        _by_load(cells, colours, folder / "loads.png"),
    ]


def _distributions(cells: Sequence[Cell], colours: dict[str, str], path: Path) -> Path:
    """For each load the share of requests that had their first token by then, all seeds together."""
    loads = sorted({each.load for each in cells})
    figure, panels = _panels(len(loads), 4.8, 4.2)
    for panel, load in zip(panels, loads, strict=True):
        for router, colour in colours.items():
            own = [each for each in cells if (each.load, each.router) == (load, router)]
            asked = sum(len(each.answers) for each in own)
            waits = sorted(a.ttft_s for each in own for a in each.answers if not a.trouble)
            shares = [(index + 1) / asked for index in range(len(waits))]
            panel.plot(
                waits, shares, color=colour, label=router, linewidth=2 if "cellgate" in router else 1.2
            )
        panel.axvline(GOOD_TTFT_S, color="black", linewidth=0.8, linestyle=":")
        panel.set(title=f"load {load:g}", xscale="log", xlabel="TTFT, virtual s", xlim=(0.02, None))
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("requests")
    return _save(figure, panels, path)


def _by_load(cells: Sequence[Cell], colours: dict[str, str], path: Path) -> Path:
    """Medians over the seeds against the load, with the range of the seeds."""
    figure, panels = _panels(len(_PANELS), 4.0, 4.0)
    for panel, (title, value, is_share) in zip(panels, _PANELS, strict=True):
        for router, colour in colours.items():
            points = _points(cells, router, value)
            middles = [median(values) for _, values in points]
            low = [middle - min(values) for middle, (_, values) in zip(middles, points, strict=True)]
            high = [max(values) - middle for middle, (_, values) in zip(middles, points, strict=True)]
            loads = [load for load, _ in points]
            panel.errorbar(
                loads, middles, yerr=[low, high], color=colour, label=router, marker="o", capsize=3
            )
        panel.set(title=title, xlabel="load", ylim=(0, None), xticks=sorted({each.load for each in cells}))
        if is_share:
            panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        panel.grid(alpha=0.3)
    return _save(figure, panels, path)


def _points(
    cells: Sequence[Cell], router: str, value: Callable[[Figures], float]
) -> list[tuple[float, list[float]]]:
    own = [each for each in cells if each.router == router]
    loads = sorted({each.load for each in own})
    return [
        (load, [value(each.figures) for each in own if each.load == load and each.figures is not None])
        for load in loads
    ]


def _panels(count: int, width: float, height: float) -> tuple[Any, list[Any]]:
    figure, axes = pyplot.subplots(1, count, figsize=(max(width * count, 8.0), height), squeeze=False)
    return figure, list(axes[0])


def _save(figure: Any, panels: Sequence[Any], path: Path) -> Path:
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False)
    rows = -(-len(labels) // 3)
    figure.tight_layout(rect=(0, 0.03 + 0.055 * rows, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
