"""Response headers that Envoy reads for health. Pure.

1. `x-envoy-immediate-health-check-fail` takes the whole host out at once, and out of the count of those that
   should be there. So it says one thing only: this gate is stopping. It is never a word about one unit.
2. `x-envoy-degraded` is read from replies to health checks only: the host is used after those that are not.
"""

from __future__ import annotations

from cellgate.router.board import Board
from cellgate.router.nouns import Verdict
from cellgate.router.unit_state import UnitState

FAIL_NOW = ("x-envoy-immediate-health-check-fail", "1")
DEGRADED = ("x-envoy-degraded", "1")

DEGRADED_SHARE = 0.5
"""A gate with no more than this share of its configured weight in good order is degraded."""

HeaderPairs = tuple[tuple[str, str], ...]


def lines(headers: HeaderPairs) -> bytes:
    """Headers as lines of a head."""
    return b"".join(f"{name}: {value}\r\n".encode() for name, value in headers)


def readyz_headers(board: Board, *, stopping: bool) -> HeaderPairs:
    """What a reply to /readyz says beside its status."""
    if stopping:
        return (FAIL_NOW,)
    return (DEGRADED,) if gate_is_degraded(board) else ()


def response_line(*, stopping: bool) -> bytes:
    """The header line of any other response: a stopping gate gets no request more, not one check later."""
    return _FAIL_NOW_LINE if stopping else b""


def unit_headers(board: Board, name: str) -> HeaderPairs:
    """What a reply to /healthz/unit/NAME says beside its status, which `unit_health` decides."""
    state = board.units.get(name)
    return (DEGRADED,) if state is not None and state.is_usable() and is_degraded(state) else ()


def is_degraded(state: UnitState) -> bool:
    """Whether a usable unit should come after others: it is suspected, in doubt, or slower than the rest."""
    return (
        state.case.verdict is Verdict.SUSPECT or state.is_restart_suspected() or state.outlier.degraded > 0.0
    )


_FAIL_NOW_LINE = lines((FAIL_NOW,))


def gate_is_degraded(board: Board) -> bool:
    """Whether a gate should come after others: half of its units are lost or degraded, or it is cut off."""
    weight = sum(state.weight for state in board)
    well = sum(state.weight for state in board if state.is_usable() and not is_degraded(state))
    return board.panic_at is not None or well <= DEGRADED_SHARE * weight
