"""When the gate must not act: a gate that is cut off sees a dead fleet, and would restart a healthy one.

Pure.
"""

from __future__ import annotations

from cellgate.router.board import Board


def reason_to_wait(board: Board, now: float, *, stopping: bool, gate_fault: bool) -> str:
    """Why recovery must not act now; empty: it may."""
    if stopping:
        return "the gate is stopping"
    if board.panic_at is not None:
        return "the gate is in panic"
    if gate_fault:
        return "the gate cannot open connections of its own"
    mute = sum(state.is_unreachable(now) for state in board)
    # Panic ends after a while, and units then go DOWN, which still does not prove that they are.
    units, rules = len(board.units), board.rules
    if (mute >= rules.panic_min_units and mute > rules.panic_share * units) or mute == units > 1:
        return f"{mute} of {units} units do not answer at all; the gate's own network may be cut off"
    return ""
