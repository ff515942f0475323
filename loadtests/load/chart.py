"""A line chart as SVG: no script, no file beside it, the same on paper."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from loadtests.load.figures import Points

WIDTH, HEIGHT = 460, 230
LONG = 940
"""The width of a chart whose axis is time."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 34, 30
_COLOURS = ("#1f5fbf", "#d9730d", "#2e8b57", "#b3261e", "#7b1e7a", "#444444")
_TICKS = 4


def line_chart(
    title: str,
    lines: Mapping[str, Points],
    x_title: str,
    *,
    marks: Sequence[tuple[float, str]] = (),
    most_x: float = 0.0,
    width: int = WIDTH,
) -> str:
    """The chart. Lines without a point are left out; without any it says that there is nothing to show.

    `marks` are texts at a place of the x axis, which ends at `most_x`, or at the last point.
    """
    shown = {name: points for name, points in lines.items() if points}
    most_x = most_x or max((x for points in shown.values() for x, _ in points), default=0.0) or 1.0
    step = _step(max((y for points in shown.values() for _, y in points), default=0.0))
    parts = [
        f'<svg viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{_LEFT}" y="14">{escape(title)}</text>',
        *_grid(step, width),
        *_x_axis(sorted({x for points in shown.values() for x, _ in points}), most_x, x_title, width),
        *(part for x, text in marks for part in _mark(_x(x, most_x, width), str(text))),
    ]
    if not shown:
        parts.append(f'<text x="{width / 2}" y="{HEIGHT / 2}" text-anchor="middle">nothing yet</text>')
    for number, (name, points) in enumerate(shown.items()):
        parts += _line(number, name, points, most_x, _TICKS * step, width)
    return "".join([*parts, "</svg>"])


def _mark(x: float, text: str) -> Iterator[str]:
    yield f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
    yield f'<text class="mark" x="{x + 4:.1f}" y="{_TOP + 10}">{escape(text)}</text>'


def _line(number: int, name: str, points: Points, most_x: float, most_y: float, width: int) -> Iterator[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    places = " ".join(f"{_x(x, most_x, width):.1f},{_y(y, most_y):.1f}" for x, y in points)
    yield f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
    if len(points) < 30:
        for x, y in points:
            at = f'cx="{_x(x, most_x, width):.1f}" cy="{_y(y, most_y):.1f}"'
            yield f'<circle {at} r="2.6" fill="{colour}"/>'
    left = _LEFT + 112 * number
    yield f'<rect x="{left}" y="21" width="10" height="3" fill="{colour}"/>'
    yield f'<text x="{left + 14}" y="26">{escape(name)}</text>'


def _grid(step: float, width: int) -> Iterator[str]:
    for number in range(_TICKS + 1):
        y = _y(number, _TICKS)
        yield f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number * step:g}</text>'


def _x_axis(values: Sequence[float], most_x: float, title: str, width: int) -> Iterator[str]:
    """Few values are marked themselves, of many some round parts of the way."""
    few = len(values) <= _TICKS + 1
    for x in values if few else [most_x * number / _TICKS for number in range(_TICKS + 1)]:
        yield f'<text x="{_x(x, most_x, width):.1f}" y="{HEIGHT - 14}" text-anchor="middle">{x:.3g}</text>'
    yield f'<text x="{width - _RIGHT}" y="{HEIGHT - 2}" text-anchor="end">{escape(title)}</text>'


def _step(most: float) -> float:
    """The distance of two grid lines: 1, 2, 2.5 or 5 times a power of ten, so that `most` is in the chart."""
    wanted = most / _TICKS or 0.25
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= 0.999 * wanted)


def _x(x: float, most: float, width: int) -> float:
    return _LEFT + x / most * (width - _LEFT - _RIGHT)


def _y(y: float, most: float) -> float:
    return HEIGHT - _BOTTOM - y / most * (HEIGHT - _TOP - _BOTTOM)
