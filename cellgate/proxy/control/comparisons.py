"""All that is found by comparing: other builds or software, a place that failing units share, a rank that is
behind.
"""

from __future__ import annotations

from collections.abc import Callable

from cellgate.proxy.control.drift_watch import DriftWatch
from cellgate.proxy.control.fate_watch import FateWatch
from cellgate.proxy.control.node_facts_metrics import NodeFactsMetrics
from cellgate.proxy.control.rank_watch import RankWatch
from cellgate.proxy.control.stack_watch import StackWatch
from cellgate.proxy.logs.events import EventLog
from cellgate.router.board import Board
from cellgate.router.nouns import Evidence


class Comparisons:
    """The comparisons of one gate. `observe` takes evidence."""

    def __init__(self, board: Board, events: EventLog, observe: Callable[[Evidence], object]) -> None:
        self.metrics = NodeFactsMetrics(board)
        self._watches = (
            DriftWatch(board, events),
            FateWatch(board, events),
            StackWatch(board, events, observe),
            RankWatch(board, events, observe),
        )

    def tick(self, now: float) -> None:
        """Compare, now and then."""
        for watch in self._watches:
            watch.tick(now)
