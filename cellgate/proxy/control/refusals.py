"""Why a request got no unit: the failures for clients."""

from __future__ import annotations

from math import ceil

from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.request.models import ModelNames
from cellgate.router.board import Board
from cellgate.router.nouns import Ask, Refusal
from cellgate.router.unit_state import UnitState

RETRY_MAX_S = 600
NAMES_SHOWN = 20
UNITS_SHOWN = 5


class Refusals:
    """Of one control plane."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._models = ModelNames(board)

    def explain(self, refusal: Refusal, ask: Ask, drain_s: float) -> Failure:
        """The failure for a refusal. `drain_s`: until all waiting requests have been served."""
        if refusal is Refusal.UNKNOWN_MODEL:
            known = self._models.names()
            more = f" and {len(known) - NAMES_SHOWN} more" if len(known) > NAMES_SHOWN else ""
            shown = ", ".join(known[:NAMES_SHOWN]) or "none"
            message = f"the model `{ask.model}` does not exist; the units here serve: {shown}{more}"
            return Failure(FailureKind.UNKNOWN_MODEL, message, param="model")
        # It is infinite while there is no unit.
        after_s = ceil(min(max(drain_s, 1.0), RETRY_MAX_S))
        if refusal is Refusal.FULL:
            reason = "every usable unit and the queue are full; retry after the time in Retry-After"
            return Failure(FailureKind.FULL, reason, retry_after_s=after_s)
        if refusal is Refusal.LATE:
            reason = (
                "the request could not be answered before its deadline; retry after the time in Retry-After"
            )
            return Failure(FailureKind.LATE, reason, retry_after_s=after_s)
        states = [f"{d.unit.name} is {_word(d)}" for d in self._board]
        more = f" and {len(states) - UNITS_SHOWN} more" if len(states) > UNITS_SHOWN else ""
        shown = ", ".join(states[:UNITS_SHOWN])
        reason = f"no unit can take this request: {shown}{more}; see /units on the gate's admin port"
        return Failure(FailureKind.NO_UNIT, reason)


def _word(state: UnitState) -> str:
    """Why a unit gets no requests, in a word or two."""
    if state.drained:
        return "drained"
    return state.case.verdict.value if state.hold is None else "on hold"
