"""The plot of a replay, as PNG: how long users wait with each router."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.ticker import PercentFormatter

from loadtests.replay.figures import GOOD_TTFT_S, Result

_COLOURS = ("#d62728", "#1f77b4", "#17becf", "#9467bd", "#ff7f0e", "#7f7f7f", "#8c564b", "#2ca02c")


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write `ttft.png` into `folder`; what has no figures is left out."""
    results = [each for each in results if each.figures is not None]
    if not results:
        return []
    names = list(dict.fromkeys(each.router for each in results))
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    return [_distributions(results, colours, folder / "ttft.png")]


def _distributions(results: Sequence[Result], colours: dict[str, str], path: Path) -> Path:
    """For each load the share of requests that had their first token by then, all seeds together."""
    cells = list(dict.fromkeys(each.cell for each in results))
    figure, panels = _panels(len(cells), 4.8, 4.2)
    for panel, cell in zip(panels, cells, strict=True):
        for router, colour in colours.items():
            own = [each for each in results if (each.cell, each.router) == (cell, router)]
            asked = sum(len(each.answers) for each in own)
            waits = sorted(a.ttft_s for each in own for a in each.answers if not a.trouble)
            shares = [(index + 1) / asked for index in range(len(waits))]
            panel.plot(
                waits, shares, color=colour, label=router, linewidth=2 if "cellgate" in router else 1.2
            )
        panel.axvline(GOOD_TTFT_S, color="black", linewidth=0.8, linestyle=":")
        panel.set(title=cell, xscale="log", xlabel="TTFT, virtual s", xlim=(0.005, None))
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("requests")
    return _save(figure, panels, path)


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
