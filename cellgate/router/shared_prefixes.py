"""How often prompts share a prefix: the cost of computing a prefix once more is divided by it. Pure.

A shared system prompt is computed once on a unit and reused there by all later requests. Charging it to each
of them would keep all requests where it is cached, and the other units idle.
"""

from __future__ import annotations

HALF_LIFE_S = 60.0
"""What was shared so long ago counts half. Engines keep what is used for longer than that."""
STEP_S = 0.5
"""What fades in a minute need not be faded more often."""
BEGINNINGS_MAX = 65_536
"""So many beginnings are counted at most (10 MB); the one not seen for longest goes first."""


class Reuses:
    """How many prompts that share one beginning, and no more, came of late (`count`, as of `at`)."""

    __slots__ = ("at", "count")

    def __init__(self, at: float) -> None:
        self.at = at
        self.count = 0.0


class SharedPrefixes:
    """By the last block that a prompt had in common with one before it: how many had, of late."""

    __slots__ = ("_beginnings",)

    def __init__(self) -> None:
        self._beginnings: dict[int, Reuses] = {}

    def __len__(self) -> int:
        return len(self._beginnings)

    def of(self, block: int, now: float) -> Reuses:
        """How often the beginning up to `block` came of late. Who sends one more counts it there."""
        known = self._beginnings.get(block)
        if known is None:
            known = self._beginnings[block] = Reuses(now)
            if len(self._beginnings) > BEGINNINGS_MAX:
                del self._beginnings[next(iter(self._beginnings))]
        elif now - known.at > STEP_S:
            known.count *= 0.5 ** ((now - known.at) / HALF_LIFE_S)
            known.at = now
            # The one not seen for longest comes first.
            self._beginnings[block] = self._beginnings.pop(block)
        return known
