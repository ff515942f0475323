"""The words of HAProxy's agent protocol for one verdict. Pure, but for what was last said of the weight.

1. Whatever is not taken back stands for ever: only `up` ends a `down`, only `ready` ends a `drain`. So every
   good answer says both, also when nothing bad was said by this process: the one before it may have.
2. A weight tells what a unit can do beside what it was configured for; how busy it is, HAProxy counts itself.
3. 0 has a meaning of its own (a weight of 0 is a drain, a maxconn of 0 no limit), and is never said.
4. Only what HAProxy 2.6 takes as well: to it `down#reason` without the space and `weight:62%` mean nothing,
   and it says so nowhere but in its statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cellgate.proxy.ingress.ready import why
from cellgate.router.board import Board
from cellgate.router.nouns import Verdict
from cellgate.router.unit_state import Desk

SUSPECT_PERCENT = 1
"""The weight of a suspected unit: in rotation, after all others."""
STEADY = 0.05
"""A weight or a maxconn is said anew when it has changed by more than this share of its whole."""
_REASON_MAX = 80


class Stand(Enum):
    """What HAProxy is to do with a server."""

    UP = "up"
    DRAIN = "drain"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Word:
    """What is to be said of a unit, or of the gate. `percent` is of its configured weight, `places` is how
    many requests all load balancers together may send at once; both of no meaning unless UP.
    """

    stand: Stand
    percent: int = 100
    places: int = 1
    reason: str = ""


def unit_word(desk: Desk, now: float, board: Board) -> Word:
    """The word about one unit."""
    if desk.drained:
        return Word(Stand.DRAIN)
    if not desk.is_usable():
        return Word(Stand.DOWN, reason=f"{desk.case.verdict.value}: {why(desk)}")
    if desk.case.verdict is Verdict.SUSPECT:
        percent = SUSPECT_PERCENT
    else:
        percent = _percent(desk.share(now, board.rules), desk.weight)
    return Word(Stand.UP, percent, desk.unit.max_in_flight)


def gate_word(board: Board, now: float, *, stopping: bool) -> Word:
    """The word about the gate itself: what it can do is what its usable units can."""
    if stopping:
        return Word(Stand.DRAIN)
    usable = [desk for desk in board if desk.is_usable()]
    if not usable:
        return Word(Stand.DOWN, reason=f"0/{len(board.desks)} units usable")
    share = sum(desk.share(now, board.rules) for desk in usable)
    return Word(
        Stand.UP,
        _percent(share, sum(desk.weight for desk in board)),
        sum(desk.unit.max_in_flight for desk in usable),
    )


class Speaker:
    """Puts words into lines, and keeps what was said as long as it is nearly so."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[int, int]] = {}

    def line(self, about: str, word: Word, balancers: int) -> bytes:
        """The answer about a unit or the gate, for each of so many load balancers."""
        if word.stand is Stand.DRAIN:
            return b"drain\n"
        if word.stand is Stand.DOWN:
            return b"down #%b\n" % _harmless(word.reason)
        places = max(1, word.places // balancers)
        percent_said, places_said = self._said.get(about, (0, 0))
        percent = _steady(percent_said, word.percent, 100)
        places = _steady(places_said, places, max(places, places_said))
        self._said[about] = percent, places
        return b"up ready %d%% maxconn:%d\n" % (percent, places)

    def forget(self, about: str) -> None:
        """This one is no more."""
        self._said.pop(about, None)


def _percent(part: float, whole: float) -> int:
    return max(1, min(100, round(100.0 * part / whole)))


def _steady(said: int, found: int, whole: int) -> int:
    """`said` as long as it is nearly right. The best there can be is always said, or it is never reached."""
    is_nearly = said > 0 and abs(found - said) <= STEADY * whole
    return said if is_nearly and found != 100 else found


def _harmless(reason: str) -> bytes:
    """A reason that stays within its line."""
    return "".join(c if " " <= c <= "~" else "?" for c in reason)[:_REASON_MAX].encode()
