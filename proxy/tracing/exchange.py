"""The exchange of a request that is traced: at each step its trace is told, and nothing else is different."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellgate.proxy.metrics.continuations import Result
from cellgate.proxy.request.continuation import Continuation
from cellgate.proxy.request.exchange import Exchange
from cellgate.proxy.request.response import Answer
from cellgate.proxy.wire.failure import Failure, Kind
from cellgate.router.lease import Lease
from cellgate.router.nouns import Outcome

if TYPE_CHECKING:
    from cellgate.proxy.request.relay import Relay
    from cellgate.proxy.tracing.trace import Trace
    from cellgate.proxy.wire.upstream import ReplyHead


class TracedAnswer(Answer):
    """Holds the trace, and ends it."""

    __slots__ = ("trace",)
    trace: Trace

    def _record(self, outcome: Outcome, code: str) -> None:
        super()._record(outcome, code)
        self.trace.end(self, outcome, code, self._gate.now())


class TracedContinuation(Continuation):
    """Tells of breaks."""

    __slots__ = ()
    _answer: TracedAnswer

    def broke(self, unit: str, relay: Relay, failure: Failure) -> bool:
        """Whether another unit is to go on where `unit` failed."""
        if failure.kind is not Kind.NOT_CONTINUED:
            self._answer.trace.broke(unit, self._gate.now())
        return super().broke(unit, relay, failure)

    def settle(self, result: Result, reason: str = "") -> None:
        """What came of the last break, if there is one of which that is open."""
        if self._broken:
            self._answer.trace.settled(result)
        super().settle(result, reason)


class TracedExchange(Exchange):
    """Tells of attempts, and of waiting for them."""

    _ANSWER = TracedAnswer
    _CONTINUATION = TracedContinuation
    __slots__ = ()
    _answer: TracedAnswer

    def trace_by(self, trace: Trace) -> TracedExchange:
        """Itself, with its trace. To be called before anything else."""
        self._answer.trace = trace
        return self

    def client_left(self) -> None:
        """The client is gone."""
        self._note_wait()
        super().client_left()

    def accepts(self, head: ReplyHead) -> bool:
        """Whether a unit's reply goes on to the client."""
        self._answer.trace.replied(head.status)
        return super().accepts(head)

    def failed(self, failure: Failure) -> None:
        """The attempt is over without a whole reply."""
        self._answer.trace.failure = failure.kind.value
        super().failed(failure)

    def on_result(self, found: Lease | Failure) -> None:
        """What came of waiting for a unit."""
        self._note_wait(found.opened_at if isinstance(found, Lease) else None)
        super().on_result(found)

    def _attempt(self, lease: Lease, *, fresh: bool = False) -> None:
        if not fresh:
            self._answer.trace.begin_attempt(lease, self._answer.attempts)
        super()._attempt(lease, fresh=fresh)

    def _head(self, lines: bytes, target: bytes, length: int) -> bytes:
        return super()._head(lines + self._answer.trace.lines, target, length)

    def _blame(self, lease: Lease, failure: Failure, shown: int = 0) -> None:
        self._answer.trace.failure = failure.kind.value
        super()._blame(lease, failure, shown)

    def _close(self, lease: Lease, outcome: Outcome) -> None:
        self._answer.trace.end_attempt(lease, outcome, self._gate.now())
        super()._close(lease, outcome)

    def _note_wait(self, until: float | None = None) -> None:
        since = self._search.queued_at
        if since is not None:
            self._answer.trace.waited(since, until or self._gate.now())
