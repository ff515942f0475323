"""Where a unit stands: in one word, what decides whether it gets requests. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cellgate.proxy.logs.text import duration
from cellgate.router.board import Board
from cellgate.router.nouns import Rules, Verdict
from cellgate.router.unit_state import Desk


class Standing(Enum):
    """What decides at the moment whether a unit gets requests."""

    DRAINED = "drained"
    HELD = "held"
    DOUBTED = "doubted"
    SUSPECT = "suspect"
    FULL = "full"
    IN = "in"
    STARTING = "starting"
    DOWN = "down"
    PROBATION = "probation"


@dataclass(frozen=True, slots=True)
class Moment:
    """When a unit is looked at, and what only others know.

    `canary_s` is within what time its next canary begins (0: it is on its way; None: none is planned),
    `panic_at` since when the gate holds its rotation (None: it does not).
    """

    now: float
    rules: Rules
    panic_at: float | None = None
    canary_s: float | None = None

    def ago(self, at: float) -> str:
        """How long ago something was, for a person to read."""
        seconds = max(0.0, self.now - at)
        return f"{seconds:.1f} s" if seconds < 60.0 else duration(seconds)


def standing(desk: Desk, moment: Moment) -> Standing:
    """The one thing that decides; what else is so of the unit changes nothing as long as this is."""
    if desk.drained:
        return Standing.DRAINED
    if not desk.is_usable():
        return Standing(desk.case.verdict.value)
    if moment.panic_at is not None and desk.is_mute(moment.now):
        return Standing.HELD
    if desk.is_doubted():
        return Standing.DOUBTED
    if desk.case.verdict is Verdict.SUSPECT:
        return Standing.SUSPECT
    return Standing.FULL if desk.in_flight >= desk.unit.max_in_flight else Standing.IN


def is_held(desk: Desk, board: Board, now: float) -> bool:
    """Whether a unit is in rotation only because the gate takes itself to be cut off."""
    return board.panic_at is not None and desk.is_usable() and desk.is_mute(now)


def silent_s(desk: Desk, now: float) -> float | None:
    """For how long nothing has moved on a unit that has requests; None when it has none."""
    return now - desk.quiet_since if desk.leases else None
