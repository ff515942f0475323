"""The rotation state of a unit: in one word, what decides whether it gets requests. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cellgate.proxy.logs.text import duration
from cellgate.router.board import Board
from cellgate.router.nouns import Rules, Verdict
from cellgate.router.unit_state import UnitState


class Rotation(Enum):
    """What decides at the moment whether a unit gets requests."""

    DRAINED = "drained"
    ON_HOLD = "on_hold"
    HELD = "held"
    RESTART_SUSPECTED = "restart_suspected"
    SUSPECT = "suspect"
    FULL = "full"
    IN = "in"
    STARTING = "starting"
    DOWN = "down"
    PROBATION = "probation"


@dataclass(frozen=True, slots=True)
class Moment:
    """The time at which a unit is shown, with facts that the Board does not have.

    `canary_s` is within what time its next canary begins (0: it is in flight; None: none is planned),
    `panic_at` since when the gate is in panic (None: it is not).
    """

    now: float
    rules: Rules
    panic_at: float | None = None
    canary_s: float | None = None

    def ago(self, at: float) -> str:
        """How long ago something was, for a person to read."""
        seconds = max(0.0, self.now - at)
        return f"{seconds:.1f} s" if seconds < 60.0 else duration(seconds)


def rotation_of(state: UnitState, moment: Moment) -> Rotation:
    """The one fact that decides; other facts change nothing as long as it is true."""
    if state.drained:
        return Rotation.DRAINED
    if state.hold is not None:
        return Rotation.ON_HOLD
    if not state.is_usable():
        return Rotation(state.case.verdict.value)
    if moment.panic_at is not None and state.is_unreachable(moment.now):
        return Rotation.HELD
    if state.is_restart_suspected():
        return Rotation.RESTART_SUSPECTED
    if state.case.verdict is Verdict.SUSPECT:
        return Rotation.SUSPECT
    return Rotation.FULL if state.in_flight >= state.unit.max_in_flight else Rotation.IN


def is_held(state: UnitState, board: Board, now: float) -> bool:
    """Whether a unit is in rotation only because of panic."""
    return board.panic_at is not None and state.is_usable() and state.is_unreachable(now)


def silent_s(state: UnitState, now: float) -> float | None:
    """For how long a unit with requests has stalled; None when it has none."""
    return now - state.quiet_since if state.leases else None
