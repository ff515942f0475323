"""Which unit made which stored response (`/v1/responses`; or conversation, file, batch), and for whom: only
that unit can answer requests that follow it, and only who made it may ask.

1. With keys it belongs to their tenant. Without, an id that nobody can guess is as good as a key: who knows
   it may ask from any address. One that a client has chosen belongs to the address that chose it.
2. One that belongs to somebody else is unknown: nobody learns whether it exists.
3. So many are kept. Where there are more, the oldest goes of whoever has most.

In this order: `StoredResponses`, `PayersResponses`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.router.board import Board
from cellgate.router.nouns import Ask, Verdict

RESPONSES_KEPT = 65_536
RANDOM_CHARS, DIFFERENT, CHANGES = 24, 8, 4
"""An id that nobody can guess ends with so many letters and digits, so many of them different, and goes so
often from letters to digits or back: 32 random hexadecimal digits do, with one exception in a million."""


class StoredResponse(NamedTuple):
    """One that a unit has, and who pays for it."""

    id: str
    payer: str
    unit: str


class StoredResponses:
    """Remembers the most recent ones. `keyed`: payers are the tenants of keys, not addresses.

    `on_made` and `on_forgotten` are called for each, as gates that share them need it.
    """

    def __init__(self, board: Board, *, keyed: bool = False) -> None:
        self._board = board
        self._keyed = keyed
        self._kept = PayersResponses()
        self._payers: dict[str, tuple[str, ...]] = {}
        """For whom one of this id was made; one whose id is as good as a key has one payer."""
        self._reported: set[str] = set()
        """Units that were not there when they were needed, and that was reported."""
        self.on_made: list[Callable[[StoredResponse], object]] = []
        self.on_forgotten: list[Callable[[StoredResponse], object]] = []

    def made(self, response: str, unit: str, payer: str) -> None:
        """A unit has made a response for somebody."""
        if (one := self.take(StoredResponse(response, payer, unit))) is not None:
            for listener in self.on_made:
                listener(one)

    def take(self, one: StoredResponse) -> StoredResponse | None:
        """Remember one, of this gate or told by another; None: another unit has made one of this id before,
        for somebody else, and is still there.
        """
        if self.is_open(one.id):
            known = self._find(one.id, one.payer)
            if known is not None and known.unit != one.unit and known.unit in self._board.units:
                return None
            one = one._replace(payer=known.payer if known is not None else one.payer)
        out = self._kept.put(one, RESPONSES_KEPT)
        payers = self._payers.get(one.id, ())
        if one.payer not in payers:
            self._payers[one.id] = (*payers, one.payer)
        if out is not None:
            self._forget(out)
        return one

    def bind(self, ask: Ask) -> Ask | Failure | None:
        """`ask`, bound to the unit that made the response it follows; or why there is none for it. None: this
        gate does not know, and others may.
        """
        follows = ask.follows
        if follows is None:
            return ask
        known = self._find(follows, ask.payer)
        if known is not None:
            return self._lost(ask, known.unit) or ask._replace(unit=known.unit)
        if self.is_open(follows) and len(self._board.units) == 1:
            # It is the only one that may have it.
            return ask._replace(unit=None)
        return None

    def unknown(self, ask: Ask) -> Failure:
        """The failure where nobody knows what `ask` follows, or it belongs to somebody else."""
        reason = f"no response {ask.follows} is known to this gate for you"
        if ask.unit == "":
            return Failure(FailureKind.UNKNOWN_PATH, reason)
        message = f"{reason}; begin a new conversation"
        return Failure(FailureKind.RESPONSE_GONE, message, param="previous_response_id")

    def newly_lost(self, ask: Ask) -> str:
        """The unit that has what `ask` follows and is not there, once for each time it goes; else empty."""
        known = self._find(ask.follows or "", ask.payer)
        if known is None or known.unit in self._reported:
            return ""
        self._reported.add(known.unit)
        return known.unit

    def inherit(self, known: Iterable[Iterable[str]]) -> None:
        """Take over what the gate's previous process has known."""
        for one in known:
            self.take(StoredResponse(*one))

    def rivals(self, ask: Ask) -> tuple[str, ...]:
        """The units that have somebody else's response of the name that its client wants for its own: they
        would write it over.
        """
        wanted = ask.wanted_id
        if wanted is None or ask.route != "responses":
            return ()
        found = (self._kept.get(wanted, who) for who in self._payers.get(wanted, ()) if who != ask.payer)
        return tuple(one.unit for one in found if one is not None)

    def owner(self, response: str, payer: str) -> str:
        """Who may ask for it: its payer; empty: whoever knows its id."""
        return "" if self.is_open(response) else payer

    def is_open(self, response: str) -> bool:
        """Whether its id is all that one needs."""
        return not self._keyed and is_unguessable(response)

    def __iter__(self) -> Iterator[StoredResponse]:
        """All, of each payer the oldest first."""
        return iter(self._kept)

    def _find(self, response: str, payer: str) -> StoredResponse | None:
        if self.is_open(response):
            (payer,) = self._payers.get(response, (payer,))
        return self._kept.get(response, payer)

    def _forget(self, out: StoredResponse) -> None:
        left = tuple(who for who in self._payers[out.id] if who != out.payer)
        if left:
            self._payers[out.id] = left
        else:
            del self._payers[out.id]
        for listener in self.on_forgotten:
            listener(out)

    def _lost(self, ask: Ask, unit: str) -> Failure | None:
        """The failure where only a unit that is not there could answer."""
        state = self._board.units.get(unit)
        if state is not None and state.case.verdict is not Verdict.DOWN:
            self._reported.discard(unit)
            return None
        if state is None:
            what = f"unit {unit} made response {ask.follows} and is gone; begin a new conversation"
            return Failure(FailureKind.RESPONSE_GONE, what, param="previous_response_id")
        what = f"unit {unit} made response {ask.follows} and is down; begin a new conversation, or try later"
        return Failure(FailureKind.RESPONSE_AWAY, what, param="previous_response_id")


class PayersResponses:
    """The units of responses, by who pays for them. Each step takes the same time, whatever is kept."""

    def __init__(self) -> None:
        self._units: dict[str, dict[str, str]] = {}
        """By payer and id, the oldest first."""
        self._having: dict[int, dict[str, None]] = {}
        """The payers that have so many."""
        self._most = 0
        self._size = 0

    def __iter__(self) -> Iterator[StoredResponse]:
        for payer, units in list(self._units.items()):
            for response, unit in list(units.items()):
                yield StoredResponse(response, payer, unit)

    def get(self, response: str, payer: str) -> StoredResponse | None:
        """One of a payer."""
        unit = self._units.get(payer, {}).get(response)
        return None if unit is None else StoredResponse(response, payer, unit)

    def put(self, one: StoredResponse, most: int) -> StoredResponse | None:
        """Keep one, as the newest of its payer. Returns what is forgotten for it, if there are `most`."""
        units = self._units.setdefault(one.payer, {})
        is_new = units.pop(one.id, None) is None
        units[one.id] = one.unit
        if is_new:
            self._move(one.payer, len(units) - 1, len(units))
        return self._forget() if self._size > most else None

    def _forget(self) -> StoredResponse:
        """Forget the oldest one of whoever has most."""
        payer = next(iter(self._having[self._most]))
        units = self._units[payer]
        response = next(iter(units))
        out = StoredResponse(response, payer, units.pop(response))
        self._move(payer, len(units) + 1, len(units))
        if not units:
            del self._units[payer]
        return out

    def _move(self, payer: str, before: int, now: int) -> None:
        self._size += now - before
        if before:
            self._having[before].pop(payer)
            if not self._having[before]:
                del self._having[before]
        if now:
            self._having.setdefault(now, {})[payer] = None
        if now > self._most or self._most not in self._having:
            # Numbers change by one: whoever had most, alone, is still the one with most.
            self._most = now


def is_unguessable(response: str) -> bool:
    """Whether an id is so random that who has it was given it."""
    text = response.rpartition("_")[2].replace("-", "")
    if len(text) < RANDOM_CHARS or not (text.isascii() and text.isalnum()) or len(set(text)) < DIFFERENT:
        return False
    kinds = [char.isdigit() for char in text]
    return sum(one is not other for one, other in pairwise(kinds)) >= CHANGES
