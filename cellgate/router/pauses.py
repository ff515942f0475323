"""Pauses: how long a unit under work has lately shown nothing before it went on by itself. Pure.

What one unit of a pool has shown is believed of all: they run the same software. So pauses that all have,
each in its turn (garbage collection, compilation, a shared disk), are nobody's fault after the first.
"""

from __future__ import annotations

from collections import deque

KEPT_S = 120.0
"""For so long a pause is remembered."""
LONGEST_S = 8.0
"""What was silent for longer has not paused: it hung, and was cured."""
PAUSES_KEPT = 16


class Pauses:
    """The last pauses that a unit, or a peer of it, has ended by itself.

    `since` is when the silence began that lasts now, on the process that had `restarted` then; below 0: none
    is watched.
    """

    __slots__ = ("_ended", "restarted", "since")

    def __init__(self) -> None:
        self._ended: deque[tuple[float, float]] = deque(maxlen=PAUSES_KEPT)
        self.since = -1.0
        self.restarted: tuple[str, float] | None = None

    def longest_s(self, at: float) -> float:
        """The longest that had ended not long before `at`; 0: none."""
        return max((pause_s for ended_at, pause_s in self._ended if at - ended_at < KEPT_S), default=0.0)

    def watch(self, since: float, restarted: tuple[str, float] | None) -> None:
        """It has been silent since then."""
        self.since, self.restarted = since, restarted

    def end(self, progress_at: float, restarted: tuple[str, float] | None) -> float:
        """The silence is over: for how long it was, if it was a pause; else 0."""
        since, self.since = self.since, -1.0
        pause_s = progress_at - since
        return pause_s if 0.0 < pause_s <= LONGEST_S and restarted == self.restarted else 0.0

    def learn(self, pause_s: float, at: float) -> None:
        """A pause has ended, here or at a peer."""
        self._ended.append((at, pause_s))
