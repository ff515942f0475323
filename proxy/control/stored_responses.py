"""Which unit made which stored response (`/v1/responses`): only this unit can answer requests that follow
it.
"""

from __future__ import annotations

from collections import OrderedDict

from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.router.board import Board
from cellgate.router.nouns import Ask

RESPONSES_KEPT = 10_000


class StoredResponses:
    """Remembers the most recent ones."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._made_by: OrderedDict[str, str] = OrderedDict()

    def made(self, response: str, unit: str) -> None:
        """Record which unit made a response."""
        self._made_by[response] = unit
        if len(self._made_by) > RESPONSES_KEPT:
            self._made_by.popitem(last=False)

    def bind(self, ask: Ask) -> Ask | Failure:
        """`ask`, bound to the unit that made the response it follows.

        If that is not known any unit may try, unless the ask is only for that response (its unit is "") and
        there are several units.
        """
        unit = self._made_by.get(ask.follows) if ask.follows is not None else None
        if unit is not None:
            return ask._replace(unit=unit)
        if ask.unit != "":
            return ask
        if len(self._board.units) == 1:
            return ask._replace(unit=None)
        reason = f"this gate does not know which unit made response {ask.follows}"
        return Failure(FailureKind.UNKNOWN_PATH, reason)
