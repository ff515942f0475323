"""Metrics of the agreement of gates on who acts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector

from cellgate.proxy.metrics.families import gauge


class ActingMetrics(Collector):
    """For which cells this gate acts, of those that it stands for."""

    def __init__(self, cells: Callable[[], Collection[str]], acts_for: Callable[[str], bool]) -> None:
        self._cells = cells
        self._acts_for = acts_for

    def collect(self) -> Iterator[Metric]:
        """One family."""
        text = "1 while this gate is the one that acts on units of the cell that stay DOWN."
        yield gauge(
            "acting", text, ("cell",), (((cell,), self._acts_for(cell)) for cell in sorted(self._cells()))
        )
