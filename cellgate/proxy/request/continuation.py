"""What follows when a unit breaks a stream: another unit resumes it, or the client gets an error with the
reason.

The exchange has the attempts and their leases. This module decides whether a stream can be resumed, and
records the result. failures.py decides when a stream counts as broken; resume/ has the ways in which another
unit is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import orjson

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.observe.counters import ResumeKind, ResumeResult
from cellgate.proxy.request.body import has_more_nodes
from cellgate.proxy.request.ports import Resumed
from cellgate.proxy.resume.chat import MakeHead, Proved
from cellgate.proxy.resume.eligible import why_not_resumed
from cellgate.proxy.resume.replay import ReplayBuffer, plain
from cellgate.proxy.resume.shown import SentText
from cellgate.proxy.resume.streams import PLAIN_ROUTES, STREAMS, ResumeMethod
from cellgate.proxy.resume.transcript import kind_of

if TYPE_CHECKING:
    from cellgate.proxy.http.request import Request
    from cellgate.proxy.request.response import Response
    from cellgate.proxy.request.services import Services
    from cellgate.router.nouns import Ask
    from cellgate.router.unit_state import UnitState


class StreamResume:
    """The continuation of one stream, from its first break. It may end the response, but owns no lease."""

    __slots__ = ("_broken", "_gate", "_kind", "_request", "_response", "_resumption")

    def __init__(self, gate: Services, request: Request, response: Response) -> None:
        self._gate = gate
        self._request = request
        self._response = response
        self._kind = STREAMS[response.route].kind if response.route in STREAMS else ResumeKind.OTHER
        self._resumption: ResumeMethod | None = None
        self._broken = ""
        """The unit that broke it, until the result is known."""

    @property
    def is_proving(self) -> bool:
        """Whether a unit is being asked for a proof."""
        return self._resumption is not None and self._resumption.is_proving

    def broke(self, unit: str, ask: Ask, failure: Failure) -> bool:
        """Whether another unit is to resume the stream that `unit` broke. If not, the response has ended."""
        response = self._response
        if failure.kind is not FailureKind.NOT_RESUMED:
            # The previous break was resumed, until now.
            self.record_result(ResumeResult.RESUMED)
            response.record_break(unit)
        if not ask.stream:
            response.break_off(failure)
            return False
        self._broken = self._broken or unit
        if response.route in PLAIN_ROUTES:
            self._kind = _kind_of(self._request, response)
        if response.reader is not None and response.reader.is_done:
            # Nothing of the answer is missing, so the failure does not matter.
            self.conclude(b"")
            return False
        way = self._resumption or find_way(self._gate, self._request, ask, response)
        reason = way if isinstance(way, str) else way.why_not()
        if isinstance(way, str) or reason:
            self.end_unresumed(failure, ResumeResult.NOT_CONTINUABLE, reason)
        elif (events := way.last_events()) is not None:
            self.conclude(events)
        else:
            self._resumption = way
            return True
        return False

    @property
    def replay(self) -> ReplayBuffer:
        """What was shown of it, once another unit is to resume it."""
        assert self._resumption is not None
        return self._resumption.replay

    def begin(self, tell: Callable[[Proved], None], state: UnitState, head: MakeHead, *, fresh: bool) -> None:
        """Ask a unit to resume the stream; `tell` gets the result, once, unless that is abandoned."""
        assert self._resumption is not None
        self._resumption.begin(tell, self._gate.pool(state), state.engine, head, fresh=fresh)

    def abandon(self) -> None:
        if self._resumption is not None:
            self._resumption.abandon()

    # -- how it ends ---------------------------------------------------------------------------------------

    def record_result(self, result: ResumeResult, reason: str = "") -> None:
        """Record the result of the last break, if it is not known yet."""
        if self._broken:
            self._gate.reports.send(Resumed(self._broken, self._kind, result, reason))
            self._response.record_result(result)
            self._broken = ""

    def conclude(self, events: bytes) -> None:
        """End the response: only these last events were missing."""
        self.record_result(ResumeResult.COMPLETED)
        self._response.conclude(events)

    def end_unresumed(self, failure: Failure, result: ResumeResult, reason: str = "") -> None:
        """End the response with an error: the stream is not resumed."""
        self.record_result(result, reason)
        message = failure.message + (f"; it could not be continued: {reason}" if reason else "")
        self._response.break_off(Failure(failure.kind, message))

    def no_unit(self, failure: Failure) -> None:
        """End the response with an error: no other unit could take it."""
        self.record_result(ResumeResult.NO_UNIT)
        is_final = failure.kind.row.is_final
        self.end_unresumed(failure, ResumeResult.NO_UNIT, "" if is_final else "no other unit could take it")


def find_way(gate: Services, request: Request, ask: Ask, response: Response) -> ResumeMethod | str:
    """How another unit would resume the stream, or why none can."""
    if response.route not in STREAMS:
        return f"only streams of {', '.join(STREAMS)} can be"
    if reason := why_not_resumed(gate.settings.no_continuation, request, ask):
        return reason
    if response.replay is None:
        return "its answer is not a stream of events"
    if has_more_nodes(request.body, limit := LIMITS.json_nodes_on_loop):
        return f"its request has more than {limit} values"
    way = STREAMS[response.route].way(request, response.replay)
    return way.why_not() or way


def _kind_of(request: Request, response: Response) -> ResumeKind:
    """The kind of a stream of chat or completions. A request that is too large is not parsed."""
    limits = LIMITS.json_bytes_on_loop, LIMITS.json_nodes_on_loop
    is_large = request.body_size > limits[0] or has_more_nodes(request.body, limits[1])
    shown = SentText() if response.replay is None else plain(response.replay).shown
    return kind_of({} if is_large else orjson.loads(request.body), shown)
