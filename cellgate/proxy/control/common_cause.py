"""Reports units that are DOWN together because of a switch, a rack or a zone: one event for each of these."""

from __future__ import annotations

from cellgate.proxy.observe.events import Action, EventLog
from cellgate.router.board import Board
from cellgate.router.health import shared_fates
from cellgate.router.nouns import Place

FATE_PERIOD_S = 1.0
SETTLE_S = 3.0
"""Units under a lost switch go DOWN one after the other: it is named once they are the same for so long."""


class FateWatch:
    """The look-out of one gate."""

    def __init__(self, board: Board, events: EventLog) -> None:
        self._board = board
        self._events = events
        self._look_at = 0.0
        self._since: dict[tuple[Place, tuple[str, ...]], float] = {}
        """Since when a place and its units are as they are."""
        self._told: set[Place] = set()

    def tick(self, now: float) -> None:
        """Look at all units, now and then."""
        if now < self._look_at:
            return
        self._look_at = now + FATE_PERIOD_S
        fates = shared_fates(self._board)
        keys = [(fate.place, fate.units) for fate in fates]
        self._since = {key: self._since.get(key, now) for key in keys}
        self._told &= {fate.place for fate in fates}
        for fate in fates:
            is_settled = now - self._since[(fate.place, fate.units)] >= SETTLE_S
            if is_settled and fate.place not in self._told:
                self._told.add(fate.place)
                detail = f"{fate.in_words()}; look at it first, the units may be well"
                self._events.add(Action("shared_fate", "gate", detail=detail))
