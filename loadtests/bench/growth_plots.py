"""The plots of growth.py, as one PNG."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from loadtests.bench.figures import Point

_COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e")
_PANELS: tuple[tuple[str, str, str, Callable[[Point], float]], ...] = (
    ("streams", "streams, an event a second each", "CPU, % of a core", lambda each: 100 * each.share),
    ("streams", "streams, an event a second each", "resident, MB", lambda each: each.figure.loaded_mb),
    ("prompt", "bytes of a request", "CPU a request, us", lambda each: each.figure.cpu_us),
    ("units", "units, probed as by default", "CPU at rest, % of a core", lambda each: 100 * each.idle_share),
    (
        "units",
        "units, probed as by default",
        "CPU a request, us, without that",
        lambda each: each.net_us,
    ),
    ("agents", "bytes of an agent's turn", "CPU a turn, us", lambda each: each.figure.cpu_us),
)


def draw(points: Sequence[Point], path: Path) -> None:
    """Write the picture."""
    names = sorted({each.figure.target for each in points})
    colours = dict(zip(names, _COLOURS, strict=False))
    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7.5))
    panels = list(axes.flat)
    for panel, (sweep, x, y, value) in zip(panels, _PANELS, strict=False):
        _panel(panel, [each for each in points if each.sweep == sweep], colours, value)
        panel.set(xlabel=x, ylabel=y, xscale="log", ylim=(0, None))
        panel.grid(alpha=0.3)
    panels[2].set(yscale="log", ylim=(10, None))
    panels[-1].set(xscale="linear")
    panels[-1].legend(loc="upper left", frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(
    panel: Any, points: Sequence[Point], colours: dict[str, str], value: Callable[[Point], float]
) -> None:
    for name, colour in colours.items():
        own = [each for each in points if each.figure.target == name]
        panel.plot([each.at for each in own], list(map(value, own)), color=colour, marker="o", label=name)
