"""One family of histograms that are kept for each unit and shown for each cell, or also for each unit.

A histogram of each unit is 20 to 25 series; a gate of 120 units would show 15,000 of them, which nobody looks
at. What units counted that have left stays in the sum of their cell: Prometheus takes a sum that falls for a
restart of the gate, and what is left of it for new observations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from prometheus_client import Metric

from cellgate.proxy.metrics.exemplars import Exemplars
from cellgate.proxy.metrics.families import histogram, summary
from cellgate.proxy.metrics.histogram import Buckets

T = TypeVar("T")
Counted = tuple[Buckets, float]
"""Cumulated buckets and the sum of all observations."""
_Row = tuple[tuple[str, ...], Buckets, float]
_Shown = tuple[tuple[str, ...], Sequence[Sequence[object]], float]


class UnitSource(NamedTuple, Generic[T]):
    """What one unit has counted. `of` lives as long as the unit, and is not used for another one."""

    cell: str
    unit: str
    of: T


class UnitHistograms(Generic[T]):
    """One family. `read` renders what a unit has counted; `per_unit`: each unit is shown; `has_means`:
    count and sum of each unit are shown besides, from which its mean follows. `exemplars` has those of all
    families.
    """

    def __init__(
        self,
        name: str,
        text: str,
        read: Callable[[T], Counted],
        *,
        per_unit: bool,
        has_means: bool = False,
        exemplars: Exemplars | None = None,
    ) -> None:
        self._name = name
        self._text = text
        self._read = read
        self._per_unit = per_unit
        self._has_means = has_means
        self._exemplars = Exemplars() if exemplars is None else exemplars
        self._shown: dict[tuple[int, str], UnitSource[T]] = {}
        self._departed: dict[str, Counted] = {}
        """By cell."""

    def collect(self, sources: Iterable[UnitSource[T]]) -> Iterator[Metric]:
        """The families as they stand; `sources` are all that there are. Each is read once."""
        counted = [(source, self._read(source.of)) for source in sources]
        labels, rows = self._rows(counted)
        yield histogram(self._name, self._text, labels, map(self._with_exemplars, rows))
        if self._has_means:
            means = (
                ((source.unit,), int(buckets[-1][1]), total)
                for source, (buckets, total) in counted
                if source.unit
            )
            yield summary(f"unit_{self._name}", f"{self._text} Its count and sum.", ("unit",), means)

    def _with_exemplars(self, row: _Row) -> _Shown:
        labels, buckets, total = row
        cell, *unit = labels
        shown = self._exemplars.beside(self._name, cell, unit[0] if unit else None, buckets)
        return labels, shown, total

    def _rows(self, counted: list[tuple[UnitSource[T], Counted]]) -> tuple[tuple[str, ...], Iterator[_Row]]:
        if self._per_unit:
            return ("cell", "unit"), (((one.cell, one.unit), *what) for one, what in counted)
        shown = {(id(source.of), source.cell): source for source, _ in counted}
        for key in self._shown.keys() - shown.keys():
            gone = self._shown[key]
            _add(self._departed, gone.cell, self._read(gone.of))
        self._shown = shown
        cells = dict(self._departed)
        for source, what in counted:
            _add(cells, source.cell, what)
        return ("cell",), (((cell,), *sums) for cell, sums in cells.items())


def _add(cells: dict[str, Counted], cell: str, counted: Counted) -> None:
    """Add to the sum of a cell."""
    if cell in cells:
        before, total = cells[cell]
        buckets, more = counted
        both = [(bound, one + other) for (bound, one), (_, other) in zip(before, buckets, strict=True)]
        counted = both, total + more
    cells[cell] = counted
