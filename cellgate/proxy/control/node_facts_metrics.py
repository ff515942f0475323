"""Metrics of what the agents of nodes report of software and ranks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector

from cellgate.proxy.metrics.families import gauge
from cellgate.router.board import Board


class NodeFactsMetrics(Collector):
    """Of units with agents that report: whose software differs, whose ranks say something."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        """All families."""
        states = [state for state in self._board if state.facts.nodes]
        yield gauge(
            "unit_stack_drift",
            "1 while the software differs: `unit`, of its own nodes; `cell`, from other units of its cell.",
            ("unit", "cell", "within"),
            (
                ((state.unit.name, state.unit.cell, within), bool(words))
                for state in states
                for within, words in (("unit", state.facts.mixed), ("cell", state.facts.odd))
            ),
        )
        yield gauge(
            "unit_rank_findings",
            "Findings of the agents on ranks, links and devices of the unit that are true now, at most 4.",
            ("unit", "cell"),
            (((state.unit.name, state.unit.cell), len(state.facts.ranks)) for state in states),
        )
