"""The replies of HAProxy's agent protocol for one verdict. Pure, but for the last weight that was sent.

1. Whatever is not taken back stands for ever: only `up` ends a `down`, only `ready` ends a `drain`. So every
   good answer says both, also when this process has reported nothing bad: the one before it may have.
2. A weight tells what a unit can do beside what it was configured for; how busy it is, HAProxy counts itself.
3. 0 has a meaning of its own (a weight of 0 is a drain, a maxconn of 0 no limit), and is never sent.
4. Only what HAProxy 2.6 takes as well: to it `down#reason` without the space and `weight:62%` mean nothing,
   and it says so nowhere but in its statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cellgate.proxy.ingress.ready import why
from cellgate.router.board import Board
from cellgate.router.nouns import Verdict
from cellgate.router.unit_state import UnitState

SUSPECT_PERCENT = 1
"""The weight of a suspected unit: in rotation, after all others."""
STEADY = 0.05
"""A weight or a maxconn is sent anew when it has changed by more than this share of its whole."""
_REASON_MAX = 80


class ServerState(Enum):
    """What HAProxy is to do with a server."""

    UP = "up"
    DRAIN = "drain"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class AgentReply:
    """The reply about a unit, or the gate. `percent` is of its configured weight, `slots` is how
    many requests all load balancers together may send at once; both of no meaning unless UP.
    """

    state: ServerState
    percent: int = 100
    slots: int = 1
    reason: str = ""


def unit_reply(state: UnitState, now: float, board: Board) -> AgentReply:
    """The word about one unit."""
    if state.drained or state.hold is not None:
        return AgentReply(ServerState.DRAIN)
    if not state.is_usable():
        return AgentReply(ServerState.DOWN, reason=f"{state.case.verdict.value}: {why(state)}")
    if state.case.verdict is Verdict.SUSPECT:
        percent = SUSPECT_PERCENT
    else:
        percent = _percent(state.share(now, board.rules), state.weight)
    return AgentReply(ServerState.UP, percent, state.unit.max_in_flight)


def gate_reply(board: Board, now: float, *, stopping: bool) -> AgentReply:
    """The word about the gate itself: what it can do is what its usable units can."""
    if stopping:
        return AgentReply(ServerState.DRAIN)
    usable = [state for state in board if state.is_usable()]
    if not usable:
        return AgentReply(ServerState.DOWN, reason=f"0/{len(board.units)} units usable")
    share = sum(state.share(now, board.rules) for state in usable)
    return AgentReply(
        ServerState.UP,
        _percent(share, sum(state.weight for state in board)),
        sum(state.unit.max_in_flight for state in usable),
    )


class ReplyFormatter:
    """Formats replies as lines, and repeats the last weight while the new one is nearly the same."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}

    def line(self, about: str, reply: AgentReply, balancers: int) -> bytes:
        """The answer about a unit or the gate, for each of so many load balancers."""
        if reply.state is ServerState.DRAIN:
            return b"drain\n"
        if reply.state is ServerState.DOWN:
            return b"down #%b\n" % _harmless(reply.reason)
        places = max(1, reply.slots // balancers)
        percent_said, places_said = self._last.get(about, (0, 0))
        percent = _steady(percent_said, reply.percent, 100)
        places = _steady(places_said, places, max(places, places_said))
        self._last[about] = percent, places
        return b"up ready %d%% maxconn:%d\n" % (percent, places)

    def forget(self, about: str) -> None:
        """This one is no more."""
        self._last.pop(about, None)


def _percent(part: float, whole: float) -> int:
    return max(1, min(100, round(100.0 * part / whole)))


def _steady(last: int, found: int, whole: int) -> int:
    """`last` while it is nearly right. 100 percent is always sent, or it is never reached."""
    is_nearly = last > 0 and abs(found - last) <= STEADY * whole
    return last if is_nearly and found != 100 else found


def _harmless(reason: str) -> bytes:
    """A reason that stays within its line."""
    return "".join(c if " " <= c <= "~" else "?" for c in reason)[:_REASON_MAX].encode()
