"""What becomes of a stream that its unit breaks: another one goes on with it, or its client is told why not.

The exchange has the attempts and their leases; here stands what is kept of a stream, when it counts as
broken, whether it can go on, and what came of it. How another unit is asked stands in resumption.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.metrics.continuations import Result
from cellgate.proxy.request.ask import has_more_nodes
from cellgate.proxy.resume.resumption import MakeHead, Resuming, Resumption
from cellgate.proxy.wire.failure import Failure, Kind

if TYPE_CHECKING:
    from cellgate.proxy.gate import Gate
    from cellgate.proxy.request.relay import Relay
    from cellgate.proxy.request.response import Answer
    from cellgate.proxy.request.selection import Selection
    from cellgate.proxy.wire.request import Request
    from cellgate.router.lease import Lease
    from cellgate.router.unit_state import Desk

_ROUTES = ("chat", "completions")
_SILENT_S = 1.0
"""A stream on a unit that went DOWN is given up once it has been silent for so long: a unit that closes its
listener to shut down in good order goes on with the streams it has."""
_LOST_S = 30.0
"""A stream that has been silent for so long while its unit worked on others has most likely been forgotten.
A unit that had only set it aside loses some work, and the client nothing."""
_LIVELY_S = 1.0


class Continuation:
    """One request's: asked from its commit on. What ends the answer here says so; leases are not touched."""

    __slots__ = ("_answer", "_broken", "_gate", "_request", "_resumption", "_search")

    def __init__(self, gate: Gate, request: Request, answer: Answer, search: Selection) -> None:
        self._gate = gate
        self._request = request
        self._answer = answer
        self._search = search
        self._resumption: Resumption | None = None
        self._broken = ""
        """The unit that broke it, as long as it is not known what came of that."""

    @property
    def is_under_way(self) -> bool:
        """Whether the stream was broken, and is another unit's to go on with."""
        return self._resumption is not None

    @property
    def is_proving(self) -> bool:
        """Whether a unit is being asked if it can go on."""
        return self._resumption is not None and self._resumption.is_proving

    # -- while all is well ---------------------------------------------------------------------------------

    def begin_keeping(self, relay: Relay) -> None:
        """Something is about to be shown: all of it is kept where another unit could go on, else its end."""
        ask = self._search.ask
        if ask.stream and self._answer.route in _ROUTES:
            relay.begin_keeping(whole=ask.continuable and not self._ruled_out())

    def silence(self, lease: Lease, relay: Relay, now: float) -> Failure | None:
        """The failure that the silence of a stream has come to be, if it has."""
        unit, silent_s = lease.unit, now - relay.last_at
        if lease.evicted and silent_s > _SILENT_S:
            return Failure(Kind.CUT, f"unit {unit} went down in the middle of its answer")
        if silent_s > _LOST_S and self._is_lost(lease, relay, now):
            reason = f"unit {unit} sent nothing of it for {silent_s:.0f} s while others went on"
            return Failure(Kind.CUT, reason)
        if silent_s > self._gate.settings.timeouts.answer_s:
            reason = f"unit {unit} sent nothing for {silent_s:.0f} s in the middle of its answer"
            return Failure(Kind.TRUNCATED, reason)
        return None

    def _is_lost(self, lease: Lease, relay: Relay, now: float) -> bool:
        """Whether the unit has forgotten this stream, and another one can go on with it."""
        board, desk, keep, search = self._gate.board, lease.desk, relay.keep, self._search
        limit_s = max(_LOST_S, 4.0 * desk.silent_limit_s(board.rules))
        if now - relay.last_at < limit_s or now - desk.life_at > _LIVELY_S or keep is None or not keep.whole:
            return False
        if isinstance(self._find_way(relay), str):
            relay.keep_end()
            return False
        return board.could_serve(search.ask, (*search.history.tried, lease.unit))

    # -- when it breaks ------------------------------------------------------------------------------------

    def broke(self, unit: str, relay: Relay, failure: Failure) -> bool:
        """Whether another unit is to go on where `unit` failed. If not, the answer has ended here."""
        if failure.kind is not Kind.NOT_CONTINUED:
            # What an earlier one had broken did go on, until now.
            self.settle(Result.CONTINUED)
        self._answer.shown = self._answer.shown or relay
        if not self._search.ask.stream:
            self._answer.break_off(failure)
            return False
        self._broken = self._broken or unit
        if relay.keep is not None and relay.keep.read().is_done:
            # Whatever it was: nothing of the answer is missing.
            self.conclude(b"")
            return False
        way = self._find_way(relay)
        if isinstance(way, str):
            self.give_up(failure, Result.NOT_CONTINUABLE, way)
        elif (events := way.last_events()) is not None:
            self.conclude(events)
        else:
            self._resumption = way
            return True
        return False

    def begin(self, owner: Resuming, desk: Desk, head: MakeHead, *, fresh: bool) -> None:
        """Ask a unit to go on; `owner` is told what came of it."""
        assert self._resumption is not None
        self._resumption.begin(owner, self._gate.pool(desk), desk.engine, head, fresh=fresh)

    def abandon(self) -> None:
        """Stop asking."""
        if self._resumption is not None:
            self._resumption.abandon()

    # -- how it ends ---------------------------------------------------------------------------------------

    def settle(self, result: Result, reason: str = "") -> None:
        """What came of the last break, if there is one of which that is open."""
        if self._broken:
            self._gate.continuations.note(self._broken, result, reason)
            self._answer.continued += result is Result.CONTINUED
            self._broken = ""

    def conclude(self, events: bytes) -> None:
        """The end: all had been said but these last events."""
        self.settle(Result.COMPLETED)
        self._answer.conclude(events)

    def give_up(self, failure: Failure, result: Result, reason: str = "") -> None:
        """The end: nobody goes on with it."""
        self.settle(result, reason)
        message = failure.message + (f"; it could not be continued: {reason}" if reason else "")
        self._answer.break_off(Failure(failure.kind, message))

    def no_unit(self, failure: Failure) -> None:
        """The end: no other unit could take it."""
        self.settle(Result.NO_UNIT)
        is_final = failure.kind.row.is_final
        self.give_up(failure, Result.NO_UNIT, "" if is_final else "no other unit could take it")

    def _find_way(self, relay: Relay) -> Resumption | str:
        """How the stream would go on, or why it cannot."""
        if self._answer.route not in _ROUTES:
            return "only streams of chat and completions are"
        if reason := self._ruled_out():
            return reason
        if relay.keep is None:
            return "its answer is no stream of events"
        if has_more_nodes(self._request.body, limit := LIMITS.json_nodes_on_loop):
            return f"its request has more than {limit} values"
        chat = self._answer.route == "chat"
        way = self._resumption or Resumption(self._request, relay.keep, chat=chat)
        return way.why_not() or way

    def _ruled_out(self) -> str:
        """Why it is not to be continued, whatever its body and its events say; empty when it may be."""
        request, switched_off = self._request, self._gate.settings.no_continuation
        if switched_off and ("*" in switched_off or self._search.ask.model in switched_off):
            return "the configuration says so (no_continuation)"
        if request.is_uncontinued:
            return "its client does not want it"
        limit = LIMITS.json_bytes_on_loop
        return f"its request is larger than {limit} bytes" if request.body_size > limit else ""
