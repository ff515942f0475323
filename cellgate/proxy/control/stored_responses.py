"""Which unit made which stored response (`/v1/responses`): only this unit can answer requests that follow
it.
"""

from __future__ import annotations

from collections import OrderedDict

from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.router.board import Board
from cellgate.router.nouns import Ask, Verdict

RESPONSES_KEPT = 10_000


class StoredResponses:
    """Remembers the most recent ones."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._made_by: OrderedDict[str, str] = OrderedDict()
        self._told: set[str] = set()
        """Units that were not there when they were needed, and that was reported."""

    def made(self, response: str, unit: str) -> None:
        """Record which unit made a response."""
        self._made_by[response] = unit
        if len(self._made_by) > RESPONSES_KEPT:
            self._made_by.popitem(last=False)

    def bind(self, ask: Ask) -> Ask | Failure:
        """`ask`, bound to the unit that made the response it follows; or that this unit is not there.

        If that is not known any unit may try, unless the ask is only for that response (its unit is "") and
        there are several units.
        """
        unit = self._made_by.get(ask.follows) if ask.follows is not None else None
        if unit is not None:
            return self._lost(ask, unit) or ask._replace(unit=unit)
        if ask.unit != "":
            return ask
        if len(self._board.units) == 1:
            return ask._replace(unit=None)
        reason = f"this gate does not know which unit made response {ask.follows}"
        return Failure(FailureKind.UNKNOWN_PATH, reason)

    def newly_lost(self, ask: Ask) -> str:
        """The unit that has what `ask` follows and is not there, once for each time it goes; else empty."""
        unit = self._made_by.get(ask.follows or "", "")
        is_news = unit != "" and unit not in self._told
        self._told.add(unit)
        return unit if is_news else ""

    def _lost(self, ask: Ask, unit: str) -> Failure | None:
        """The failure where only a unit that is not there could answer."""
        state = self._board.units.get(unit)
        if state is not None and state.case.verdict is not Verdict.DOWN:
            self._told.discard(unit)
            return None
        if state is None:
            what = f"unit {unit} made response {ask.follows} and is gone; begin a new conversation"
            return Failure(FailureKind.RESPONSE_GONE, what, param="previous_response_id")
        what = f"unit {unit} made response {ask.follows} and is down; begin a new conversation, or try later"
        return Failure(FailureKind.RESPONSE_AWAY, what, param="previous_response_id")
