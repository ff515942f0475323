"""The exchange of a request that a trusted peer has addressed to units (placement.py says how).

It goes there and nowhere else, or comes back with a 503 whose `x-cellgate-reason` says why, so that whoever
chose may choose again. From anybody else it is forged: 403, and counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellgate.proxy.request.exchange import Exchange
from cellgate.proxy.request.placement import may_place, place, why_not
from cellgate.proxy.request.routes import RouteKind
from cellgate.proxy.request.selection import Search, Tell
from cellgate.proxy.wire.failure import Failure, Fault, Kind
from cellgate.router.lease import Lease
from cellgate.router.nouns import Ask, Refusal
from cellgate.router.retry import Attempts

if TYPE_CHECKING:
    from cellgate.proxy.gate import Gate

_ELSEWHERE = frozenset({Kind.NO_UNIT, Kind.FULL, Kind.LATE, Kind.EVICTED})


class PlacedSearch(Search):
    """One such request's. `units` are to be tried in this order; None: any that has not been tried."""

    __slots__ = ("units",)

    def __init__(self, gate: Gate, size: int, *, once: bool = False) -> None:
        super().__init__(gate, size, once=once)
        self.units: tuple[str | None, ...] = (None,)

    def _pick(self, tried: tuple[str, ...], *, evicted: bool, draws: bool) -> Lease | Refusal:
        answer: Lease | Refusal = Refusal.NO_UNIT
        for unit in self.units:
            if unit is not None:
                self.ask = self.ask._replace(unit=unit)
            answer = super()._pick(tried, evicted=evicted, draws=draws)
            if isinstance(answer, Lease):
                break
        return answer

    def _wait(self, answer: Refusal, tell: Tell, *, must_wait: bool = False) -> Lease | Refusal:
        # Whoever chose the unit may find another one with room: it need not wait for this one.
        return answer if answer is Refusal.FULL else super()._wait(answer, tell, must_wait=must_wait)


class PlacedExchange(Exchange):
    """Answers one such request."""

    __slots__ = ()
    _SEARCH = PlacedSearch
    _search: PlacedSearch

    def start(self) -> None:
        """As for any request, once it is known where it may go."""
        if self._route.kind is RouteKind.OWN:
            super().start()
        elif not self._is_trusted():
            self._gate.metrics.forged += 1
            reason = "only trusted peers may say which unit a request goes to; see `trusted`"
            self._answer.refuse(Failure(Kind.NOT_TRUSTED, reason))
        elif self._find_place():
            super().start()
        else:
            self._refuse(Failure(Kind.NO_UNIT, "this gate has no unit that the request is addressed to"))

    def _is_trusted(self) -> bool:
        gate = self._gate
        return may_place(self._client.peer, self._request.fields, gate.peers, gate.settings.admin_token)

    def _find_place(self) -> bool:
        """Whether there is a unit that it may go to."""
        board = self._gate.board
        wanted = place(self._request.fields, board)
        if wanted.ordered:
            self._search.units = wanted.units
        else:
            # As if it had tried all others: whatever is decided later, it does not go there.
            self._search.history = Attempts(tried=tuple(board.desks.keys() - set(wanted.units)))
        return bool(wanted.units)

    def _asked(self, ask: Ask | Failure) -> None:
        # Who has chosen the unit knows which one made a response, though this gate may not.
        if isinstance(ask, Failure) and self._route.kind is RouteKind.STICKY:
            ask = Ask()
        super()._asked(ask)

    def _refuse(self, failure: Failure) -> None:
        if self._answer.shown is not None or (
            failure.kind not in _ELSEWHERE and failure.kind.row.fault is not Fault.UNIT
        ):
            super()._refuse(failure)
            return
        kind, board = failure.kind, self._gate.board
        reason = why_not(board, self._search.ask.unit) if kind is Kind.NO_UNIT else kind.value
        self._answer.refuse(Failure(Kind.NOT_HERE, f"{reason}: {failure.message}"), reason=reason)
