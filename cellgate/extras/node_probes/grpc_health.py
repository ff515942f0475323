"""gRPC: the node's health service (grpc.health.v1, method Check) says SERVING.

Plaintext HTTP/2. Wire formats: gRPC over HTTP/2 (messages behind their length, `grpc-status` in trailers)
and protobuf, of which two fields are needed: the request's `service` (1, string), the reply's `status` (1,
enum).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast
from urllib.parse import unquote

from cellgate.probes.base import FetchError, ProbeContext, Trouble
from cellgate.probes.nodes import NodeReport, NodeState, NodeTalk

if TYPE_CHECKING:
    from h2 import events


_HEADERS = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/grpc.health.v1.Health/Check"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
    ("user-agent", "cellgate"),
)
_SERVICE_TAG = b"\x0a"
"""Field 1, a string."""
_STATUS_TAG = b"\x08"
"""Field 1, a number."""
_REPLY_MAX = 64 << 10
"""Bytes that a server may send in all, before the connection is closed."""

_HEALTH = {
    0: NodeReport(
        NodeState.NOTHING, "the health service answers UNKNOWN: no status was set for this service"
    ),
    1: NodeReport(NodeState.GOOD, "SERVING"),
    2: NodeReport(NodeState.BAD, "NOT_SERVING"),
    3: NodeReport(
        NodeState.NOTHING, "the health service does not know this service; name one that it has as `service`"
    ),
}
# grpc-status of a call without an answer; other statuses are DOUBT.
_GRPC_FAILED = {
    "5": NodeReport(
        NodeState.NOTHING, "NOT_FOUND: name a service that the health service knows as `service`"
    ),
    "7": NodeReport(
        NodeState.NOTHING, "PERMISSION_DENIED: let the gate call the health service, or use another probe"
    ),
    "8": NodeReport(NodeState.NOTHING, "RESOURCE_EXHAUSTED: the server is busy"),
    "12": NodeReport(NodeState.NOTHING, "UNIMPLEMENTED: the server has no health service; use another probe"),
    "16": NodeReport(
        NodeState.NOTHING, "UNAUTHENTICATED: let the gate call the health service, or use another probe"
    ),
}


class HealthCall(asyncio.Protocol):
    """One call on a separate connection. `ended` is set when nothing more is expected."""

    def __init__(self, authority: str, service: str) -> None:
        self.ended = asyncio.Event()
        self._authority = authority
        self._request = _message(
            _SERVICE_TAG + _varint(len(service.encode())) + service.encode() if service else b""
        )
        from h2.config import H2Configuration
        from h2.connection import H2Connection

        self._http2 = H2Connection(H2Configuration(client_side=True, header_encoding="latin-1"))
        self._transport: asyncio.Transport | None = None
        self._received = 0
        self._headers: dict[str, str] = {}
        self._body = b""
        self._wrong = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the whole call."""
        self._transport = cast("asyncio.Transport", transport)
        self._http2.initiate_connection()
        stream_id = self._http2.get_next_available_stream_id()
        self._http2.send_headers(stream_id, [(":authority", self._authority), *_HEADERS])
        self._http2.send_data(stream_id, self._request, end_stream=True)
        self._transport.write(self._http2.data_to_send())

    def data_received(self, data: bytes) -> None:
        """Take what the server sends, and at most 64 KiB of it."""
        from h2.exceptions import H2Error

        self._received += len(data)
        if self._received > _REPLY_MAX:
            self._end(f"its reply is larger than {_REPLY_MAX} bytes")
        if self.ended.is_set():
            return
        try:
            for event in self._http2.receive_data(data):
                self._take(event)
        except H2Error as error:
            self._end(f"it does not speak HTTP/2: {error}")
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._http2.data_to_send())

    def connection_lost(self, _error: Exception | None) -> None:
        """The connection is closed, by the server or by the gate."""
        if not self.ended.is_set():
            self._end("it closed the connection before it answered")

    def _take(self, event: events.Event) -> None:
        from h2 import events

        match event:
            case events.ResponseReceived() | events.TrailersReceived():
                self._headers |= cast("dict[str, str]", dict(event.headers))
            case events.DataReceived():
                self._body += event.data
            case events.StreamEnded():
                self._end()
            case events.StreamReset() | events.ConnectionTerminated():
                self._end(f"it reset the call (HTTP/2 error {event.error_code})")

    def _end(self, wrong: str = "") -> None:
        # An answer that was complete before the reset stays valid.
        if not self.ended.is_set():
            self._wrong = wrong
            self.ended.set()

    def said(self) -> NodeReport:
        """The result of the call. Raises FetchError without a valid answer."""
        if self._wrong:
            raise FetchError(Trouble.BROKEN, self._wrong)
        status, grpc = self._headers.get(":status", ""), self._headers.get("grpc-status", "")
        if not self._headers.get("content-type", "").startswith("application/grpc"):
            raise FetchError(Trouble.BROKEN, f"HTTP {status} is not a gRPC answer")
        if grpc != "0":
            why = f"grpc-status {grpc or 'missing'} {unquote(self._headers.get('grpc-message', ''))}".rstrip()
            state, hint = _GRPC_FAILED.get(grpc, NodeReport(NodeState.DOUBT, "the call failed"))
            return NodeReport(state, f"{hint} ({why})")
        health = _status(self._body)
        if health not in _HEALTH:
            raise FetchError(Trouble.BROKEN, f"its answer is not a HealthCheckResponse: {self._body[:20]!r}")
        return _HEALTH[health]


# gRPC's and protobuf's framing.


def _message(payload: bytes) -> bytes:
    """A message behind its prefix: not compressed, its length in four bytes."""
    return b"\0" + len(payload).to_bytes(4, "big") + payload


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _status(body: bytes) -> int | None:
    """The `status` in a framed HealthCheckResponse; None when it is something else.

    The message has one field only, so that there are two ways to write it: with the field, or empty for 0.
    """
    if body == _message(b""):
        return 0
    if len(body) == 7 and body[:6] == _message(_STATUS_TAG + b"\0")[:6]:
        return body[6]
    return None


_LATE_S = 0.1
"""A timeout that fires this late shows that the gate's event loop was blocked."""


@dataclass(frozen=True, slots=True)
class GrpcProbe(NodeTalk):
    """Calls Check at `address` (HOST:PORT) for `service`; empty: the server as a whole."""

    kind: ClassVar[str] = "grpc"
    address: str
    service: str = ""

    @property
    def about(self) -> str:
        """The address, and the service if one is asked for."""
        return f"{self.address} {self.service}".rstrip()

    async def ask(self, context: ProbeContext) -> NodeReport:
        """The answer of the health service."""

        deadline = context.now() + self.timeout_s
        transport, call = await context.net.connect(
            self.address, lambda: HealthCall(self.address, self.service), timeout_s=self.timeout_s
        )
        ended = asyncio.ensure_future(call.ended.wait())
        try:
            await asyncio.wait((ended,), timeout=max(0.0, deadline - context.now()))
        finally:
            ended.cancel()
            transport.abort()
        if not call.ended.is_set():
            if context.now() > deadline + _LATE_S:
                raise FetchError(Trouble.OWN, "the gate's event loop was blocked")
            raise FetchError(Trouble.TIMEOUT, "no answer in time")
        return call.said()
