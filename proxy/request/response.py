"""The client's view of one request: its id, what it was told, and the record of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellgate.proxy.ingress.envoy_health import response_line
from cellgate.proxy.logs.record import Finished
from cellgate.proxy.wire.failure import Failure, Kind, error_body, error_event
from cellgate.proxy.wire.heads import is_request_id, own_response
from cellgate.router.nouns import Outcome

if TYPE_CHECKING:
    from cellgate.proxy.gate import Gate
    from cellgate.proxy.request.relay import Relay
    from cellgate.proxy.wire.downstream import ClientConnection
    from cellgate.proxy.wire.request import Request

_new = tuple.__new__
"""What a named tuple's own constructor calls, in a third of the time; the fields stand in their order."""


class Answer:
    """What one client gets for one request. It ends exactly once, by one of the methods that say so.

    `shown`: the relay that has begun to write, once its unit is out of it or has kept the client waiting.
    """

    __slots__ = (
        "_client",
        "_gate",
        "_request",
        "_warm_at",
        "attempts",
        "closes",
        "continued",
        "events",
        "model",
        "over",
        "request_id",
        "route",
        "sent",
        "shown",
        "status",
        "ttft_s",
        "unit",
        "whole",
    )

    def __init__(self, gate: Gate, client: ClientConnection, request: Request, route: str) -> None:
        self._gate = gate
        self._client = client
        self._request = request
        given = request.given_id
        self._warm_at = request.received_at
        self.shown: Relay | None = None
        self.request_id = given if given and is_request_id(given) else gate.new_id()
        self.route = route
        self.model = ""
        self.unit = ""
        self.status = 0
        self.attempts = 0
        self.continued = 0
        self.sent = 0
        self.events = 0
        self.ttft_s: float | None = None
        self.closes = not request.keep_alive or request.http10
        self.over = False
        self.whole = False
        """All of a reply was written, and only its record is to come."""

    def extra_lines(self, unit: str) -> bytes:
        """The gate's own lines in the head of a unit's answer."""
        return b"x-request-id: %b\r\nx-cellgate-unit: %b\r\n%b" % (
            self.request_id,
            unit.encode(),
            self._report(),
        )

    def closes_client(self) -> bool:
        """Whether the head being written must say that the connection ends with this answer."""
        self.closes = self.closes or self._gate.is_leaving()
        return self.closes

    def relayed(self, relay: Relay) -> None:
        """Count what a relay that is over has shown."""
        self.sent += relay.sent
        self.events += relay.events

    def keep_warm(self, relay: Relay, now: float) -> None:
        """Keep the client's connection warm while `relay` has nothing to show."""
        if now - max(self._warm_at, relay.last_at) > self._gate.settings.timeouts.head_hold_s:
            self._warm_at = now
            if relay.show_patience():
                self.shown = relay

    def own(self, status: int, body: bytes, lines: bytes) -> None:
        """The end: an answer of the gate's own."""
        self._write(status, body, lines)
        self.end(Outcome.OK if status < 400 else Outcome.GATE_ERROR)

    def refuse(self, failure: Failure, line: bytes = b"", *, reason: str = "") -> None:
        """The end: a row of the failure table. `line` is one more header line, `reason` a word more to the
        point than the kind of failure.
        """
        row = failure.kind.row
        if row.retry_after_s is not None:
            line += b"retry-after: %d\r\n" % (failure.retry_after_s or row.retry_after_s)
        if row.retry_after_s is not None or row.is_final:
            line += b"x-cellgate-reason: %b\r\n" % (reason or failure.kind.value).encode()
        if row.is_final:
            # What OpenAI's clients go by: else they ask twice more after any 5xx.
            line += b"x-should-retry: false\r\n"
        self.closes = self.closes or row.closes
        self._write(row.status, error_body(failure), line)
        self.end(row.outcome, failure.kind.value)

    def break_off(self, failure: Failure) -> None:
        """The end of an answer that was begun: an error event where there are events, never a clean end."""
        relay = self.shown
        assert relay is not None
        before = relay.sent
        if not relay.break_off(error_event(failure)):
            # Now and not behind a close: that would say goodbye first, where there is TLS.
            self._client.cut()
        self.sent += relay.sent - before
        self.closes = True
        self.end(failure.kind.row.outcome, failure.kind.value)

    def conclude(self, events: bytes) -> None:
        """The end of a stream whose text is complete, though its unit did not come to the end of it."""
        relay = self.shown
        assert relay is not None
        before = relay.sent
        relay.conclude(events)
        self.whole = True
        self.sent += relay.sent - before
        self.end(Outcome.OK)

    def crash(self, relay: Relay | None) -> None:
        """The end after a defect of the gate's own: 500, unless something was shown, by `relay` or before."""
        known_as = self.request_id.decode("latin-1")
        failure = Failure(
            Kind.INTERNAL, f"the gate failed on this request; its log says more, under {known_as}"
        )
        if self.whole:
            self.closes = True
            self.end(failure.kind.row.outcome, failure.kind.value)
        elif self.shown is None and (relay is None or not relay.sent):
            self.refuse(failure)
        else:
            self.shown = self.shown or relay
            self.break_off(failure)

    def left(self) -> None:
        """The end: the client is gone."""
        if not self.sent:
            self.status = 499
        self.end(Outcome.CLIENT_LEFT, "client_left")

    def end(self, outcome: Outcome, code: str = "") -> None:
        """The end: all is written; the connection goes on to its next request, or closes."""
        self._record(outcome, code)
        self._client.finish(self._request, keep_alive=not self.closes)

    def _report(self) -> bytes:
        """What the ingress is told of the gate with this answer."""
        gate = self._gate
        return gate.orca.line(self._request.fields) + response_line(stopping=gate.is_stopping())

    def _write(self, status: int, body: bytes, line: bytes) -> None:
        self.status = status
        own = b"x-request-id: %b\r\n%b" % (self.request_id, line)
        data = own_response(status, body, own=own, close=self.closes_client())
        if self._request.method == b"HEAD":
            data = data[: len(data) - len(body)]
        self.sent += len(data)
        self._client.send(data)

    def _record(self, outcome: Outcome, code: str) -> None:
        self.over = True
        request = self._request
        record = (
            self.request_id.decode("latin-1"),
            self._client.peer,
            request.method.decode("latin-1"),
            request.path.decode("latin-1"),
            self.route,
            self.model,
            self.status,
            code,
            self.unit,
            outcome,
            self.attempts,
            self.ttft_s,
            self._gate.now() - request.received_at,
            self.events,
            request.body_size,
            self.sent,
            self.continued,
        )
        self._gate.finished(_new(Finished, record))
