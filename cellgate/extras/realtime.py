"""One WebSocket of a client: a unit is found for it as for any request, then bytes are passed on.

1. Until the unit has answered 101 it is a request that waits: another unit may get it, and it can be refused.
2. Then it has its lease for as long as it lasts. Nothing is expected of it, so it is no evidence of a stall.
3. It ends when either side does. A gate that stops, or a unit that goes down, ends it with a close frame.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, cast
from urllib.parse import parse_qsl, urlencode

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.unit import connect_failure
from cellgate.proxy.observe.defects import Guarded, guarded
from cellgate.proxy.process.tcp_info import bound_held, bound_unsent
from cellgate.proxy.request.exchange import Selection
from cellgate.proxy.request.response import Response
from cellgate.proxy.request.routes import IN_BODY
from cellgate.proxy.request.unit_head import head_for_unit
from cellgate.router.nouns import Ask, Outcome
from cellgate.router.unit_state import Lease

if TYPE_CHECKING:
    from cellgate.proxy.http.request import Request
    from cellgate.proxy.http.server import ClientConnection
    from cellgate.proxy.request.services import Admission, Services


ROUTE = "realtime"
SESSION_HEAD_BYTES = 64 << 10
REASON_BYTES = 123
"""The longest reason that a close frame has room for (RFC 6455, 5.5)."""
SWITCH_S = 10.0
"""How long a unit may take to answer 101."""
PARTING_S = 1.0
"""Sessions are closed this long before a stopping gate cuts what is left."""
_UPGRADE = b"connection: upgrade\r\nupgrade: websocket\r\n"
_SESSION_REFUSED = Failure(
    FailureKind.METHOD_NOT_SUPPORTED,
    "protocol upgrades are not supported; see `realtime` in the configuration",
)
_TOO_EARLY = Failure(FailureKind.BAD_REQUEST, "the client sent messages before the WebSocket was open")
_TWO_MODELS = Failure(FailureKind.BAD_REQUEST, "the query names more than one model; name one", param="model")
_SESSION_TOO_MANY = Failure(
    FailureKind.NO_RESOURCES, f"this process has {LIMITS.realtime_sessions} sessions; retry elsewhere"
)


class RealtimeSession:
    """The exchange of such a request (ClientExchange, proxy/http/server.py). `others` are all of its kind."""

    def __init__(
        self, gate: Services, client: ClientConnection, request: Request, others: set[RealtimeSession]
    ) -> None:
        self._gate = gate
        self._client = client
        self.request = request
        self._others = others
        self.response = Response(gate, client, request, ROUTE)
        self.selection = Selection(gate, 0)
        self._admission: Admission | None = None
        self._target = request.target
        self._lease: Lease | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._unit: Side | None = None
        self._page: Side | None = None
        """The client's side, once it has switched."""
        self._head = b""
        self._frames = FrameEnds()
        self._is_over = False
        self._active_at = self._sent_at = request.received_at
        self._leaving_at: float | None = None

    # -- for its client ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Find a unit."""
        if not self._gate.settings.realtime:
            self._refuse(_SESSION_REFUSED)
            return
        if self.request.body:
            self._refuse(_TOO_EARLY)
            return
        if len(self._others) >= LIMITS.realtime_sessions:
            reached("realtime_sessions")
            self._refuse(_SESSION_TOO_MANY)
            return
        self._others.add(self)
        gate, request = self._gate, self.request
        if gate.identify is not None and not self._enter(gate.identify(self)):
            return
        models = _models(request.target)
        if len(models) > 1:
            self._refuse(_TWO_MODELS)
            return
        # One that is too long is no model, as in a body.
        model = models[0] if models and 0 < len(models[0]) <= LIMITS.name_chars else None
        ask = gate.routing_headers.apply(Ask(model=model), request.routing, request.received_at)
        if self._admission is not None and isinstance(ask, Ask):
            ask = self._admission.admit(ask, 0, IN_BODY)
        elif isinstance(ask, Ask):
            ask = ask._replace(payer=gate.payer(self._client.peer, request.forwarded_for))
        if isinstance(ask, Failure):
            self._refuse(ask)
            return
        self.selection.ask = self._served(ask)
        if self._admission is not None:
            self.selection.charge = self._admission.charge(self.selection.ask)
        self.response.model = self.selection.ask.model or ""
        self._find()

    def _enter(self, found: Admission | Failure) -> bool:
        """Whether the client shows a key that counts."""
        if isinstance(found, Failure):
            self._refuse(found)
            return False
        self._admission, self.response.observers = found, (found, *self.response.observers)
        return True

    def client_left(self) -> None:
        """The client has closed."""
        self._end(Outcome.OK if self._page is not None else Outcome.CLIENT_LEFT)

    def client_paused(self, paused: bool) -> None:
        """Before it has switched nothing is sent, and later the sides know it of each other."""

    def is_awaited(self) -> bool:
        """It holds its slot for as long as it is open."""
        return False

    def stop(self, failure: Failure) -> None:
        """The gate ends it, for a reason that the client is told."""
        if self._page is None:
            self._refuse(failure)
        else:
            self._part(POLICY, failure.message.encode()[:REASON_BYTES])

    def crashed(self, error: Exception) -> None:
        """A callback has failed."""
        self._gate.defect(f"session {self.response.request_id.decode('latin-1')} failed", error)
        self._end(Outcome.GATE_ERROR)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self._unit is not None and self._page is None and now - self._sent_at > SWITCH_S:
            self._failed(Failure(FailureKind.ANSWER_TIMEOUT, "it did not answer 101 in time"))
        elif self._page is not None and now - self._active_at > LIMITS.realtime_idle_s:
            reached("realtime_idle_s")
            self._part(GOING_AWAY, b"idle")
        elif self._gate.is_leaving:
            self._leaving_at = self._leaving_at or now
            if now - self._leaving_at > self._gate.settings.timeouts.drain_s - PARTING_S:
                self._part(GOING_AWAY, b"the gate stops")

    # -- which unit ----------------------------------------------------------------------------------------

    def on_result(self, found: Lease | Failure) -> None:
        """What came of waiting."""
        self._take(self.selection.take(found))

    def _served(self, ask: Ask) -> Ask:
        """The ask with the model that serves the name of its client."""
        choice = self._gate.models
        if choice is None or ask.model is None:
            return ask
        served = choice.served(ask.model, ask.session or self.response.request_id.decode("latin-1"))
        if served != ask.model:
            self._target = _with_model(self._target, served)
            self.response.lines += b"x-cellgate-model: %b\r\n" % served.encode("ascii", "replace")
        return ask._replace(model=served)

    def _find(self, *, draws: bool = False) -> None:
        found = self.selection.acquire(self, draws, False)
        if found is not None:
            self._take(found)

    def _take(self, found: Lease | Failure) -> None:
        if isinstance(found, Failure):
            self._refuse(found)
            return
        self.selection.given = None
        self._lease, found.on_evict = found, self._evicted
        self._sent_at = self._gate.now()
        for observer in self.response.observers:
            observer.attempted(found, self.response.attempts)
        self.response.attempts += 1
        self._connecting = asyncio.get_running_loop().create_task(self._connect(found))
        self._connecting.add_done_callback(self._connected)

    async def _connect(self, lease: Lease) -> None:
        self._unit = unit = Side(self._from_unit, self._unit_ended, self)
        await self._gate.pool(lease.unit_state).open(lambda: unit)

    def _connected(self, task: asyncio.Task[None]) -> None:
        if task is not self._connecting or task.cancelled() or self._is_over:
            return
        assert self._lease is not None
        assert self._unit is not None
        pool = self._gate.pool(self._lease.unit_state)
        failure = connect_failure(task.exception(), f"{pool.host}:{pool.port}", pool.lookups)
        if failure is not None:
            self._failed(failure)
            return
        self._head = b""
        lines = pool.lines + _UPGRADE
        self._unit.write(head_for_unit(self.request, self._client, self.response, lines, self._target, 0))

    def _failed(self, failure: Failure) -> None:
        """The unit does not take it: the next one, or the end."""
        lease, self._lease = self._lease, None
        assert lease is not None
        self._drop_unit()
        self._gate.dispatcher.released(lease, failure.kind.row.outcome)
        self._gate.dispatcher.blame(lease, failure, 0, 0)
        step = self.selection.next_step(lease, failure, once=False)
        self.selection.failed(lease.unit, failure, step)
        if step.again:
            self._find(draws=step.draws)
        else:
            self._refuse(failure)

    def _evicted(self) -> None:
        if self._page is None:
            self._failed(Failure(FailureKind.EVICTED, "its unit went down before it answered"))
        else:
            self._part(TRY_AGAIN, b"the unit went down")

    # -- bytes ---------------------------------------------------------------------------------------------

    def _from_unit(self, data: bytes) -> bytes:
        if self._page is None:
            return self._switch(data)
        self._active_at = self._gate.now()
        self._frames.feed(data)
        self.response.sent += len(data)
        return data

    def _from_client(self, data: bytes) -> bytes:
        self._active_at = self._gate.now()
        return data

    def _switch(self, data: bytes) -> bytes:
        """The head of the unit's reply: with 101 the client switches, and gets what follows."""
        assert self._lease is not None
        self._head += data
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if not end:
            if len(head) > SESSION_HEAD_BYTES:
                self._failed(Failure(FailureKind.GARBAGE, "the head of its reply is too large"))
            return b""
        first, _, lines = head.partition(b"\r\n")
        status = first.split(b" ")[1] if first.startswith(b"HTTP/1.1 ") else b""
        if status != b"101":
            self._failed(_refusal(status.decode("latin-1"), self._lease.unit))
            return b""
        lease, response = self._lease, self.response
        lease.commit(response.now())
        # Nothing is expected of it from now on.
        lease.paused = lease.was_paused = True
        self._gate.dispatcher.committed(lease)
        response.status, response.unit, response.begun = 101, lease.unit, True
        own = b"x-request-id: %b\r\n%b" % (response.request_id, response.lines)
        if response.shows_internals:
            own += b"x-cellgate-unit: %b\r\n" % lease.unit.encode()
        self._client.send(b"HTTP/1.1 101 Switching Protocols\r\n%b\r\n%b\r\n" % (lines, own))
        self._page = page = Side(self._from_client, self._client_ended, self)
        assert self._unit is not None
        page.other, self._unit.other = self._unit, page
        self._client.switch(page)
        return self._from_unit(rest) if rest else b""

    def _unit_ended(self, side: Side) -> None:
        if side is not self._unit or self._is_over:
            return
        if self._page is None:
            self._failed(Failure(FailureKind.CLOSED_EARLY, "it closed the connection before it answered"))
        else:
            self._end(Outcome.OK)

    def _client_ended(self, _side: Side) -> None:
        self._client.connection_lost(None)

    # -- its end -------------------------------------------------------------------------------------------

    def _part(self, code: int, reason: bytes) -> None:
        """The gate ends it, with a close frame where one may stand."""
        if self._page is not None and self._frames.is_between:
            self._page.write(close_frame(code, reason))
        self._end(Outcome.OK)

    def _refuse(self, failure: Failure) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._release(failure.kind.row.outcome)
        self.response.refuse(failure)

    def _release(self, outcome: Outcome) -> None:
        """Give back what it holds."""
        self._others.discard(self)
        self.selection.cancel()
        self._drop_unit()
        lease, self._lease = self._lease, None
        if lease is not None:
            self._gate.dispatcher.released(lease, outcome)

    def _drop_unit(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        unit, self._unit = self._unit, None
        if unit is not None and unit.transport is not None:
            unit.transport.close()

    def _end(self, outcome: Outcome) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._release(outcome)
        self.response.closes = True
        if outcome is Outcome.CLIENT_LEFT:
            self.response.left()
        else:
            self.response.end(outcome)


def _models(target: bytes) -> list[str]:
    """The models that the query names; an engine may take any of them, also one that is empty."""
    pairs = parse_qsl(target.partition(b"?")[2].decode("latin-1"), keep_blank_values=True)
    return [value for name, value in pairs if name == "model"]


def _with_model(target: bytes, model: str) -> bytes:
    path, _, query = target.partition(b"?")
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    made = urlencode([(name, model if name == "model" else value) for name, value in pairs])
    return b"%b?%b" % (path, made.encode())


def _refusal(status: str, unit: str) -> Failure:
    """What a unit means that does not switch."""
    message = f"unit {unit} answered {status or 'no HTTP'} to the WebSocket"
    if status == "404":
        return Failure(FailureKind.NOT_SERVED, message)
    if status in ("429", "503"):
        return Failure(FailureKind.BUSY, message)
    is_clients = status.startswith("4")
    return Failure(FailureKind.BAD_REQUEST if is_clients else FailureKind.UNIT_ERROR, message)


# Bytes of a WebSocket, passed on as they come, with each side's backpressure mirrored to the other.
#
# The gate reads no messages. It only knows where the frames of the unit end (RFC 6455, 5.2), so that it can
# say itself that it closes.


GOING_AWAY, POLICY, TRY_AGAIN = 1001, 1008, 1013
"""Status codes of a close (RFC 6455, 7.4.1; IANA's registry): the gate stops, or wants it to end; the unit
went down."""
_FRAME_HEAD = 2
_SESSION_LENGTH_BYTES = {126: 2, 127: 8}
_MASKED, _LENGTH = 0x80, 0x7F


def close_frame(code: int, reason: bytes) -> bytes:
    """A close, as a server sends it."""
    return b"\x88%c%b%b" % (2 + len(reason), struct.pack("!H", code), reason)


class FrameEnds:
    """Where the frames of one direction end."""

    def __init__(self) -> None:
        self._head = b""
        self._left = 0

    @property
    def is_between(self) -> bool:
        """Whether the next byte begins a frame."""
        return not self._left and not self._head

    def feed(self, data: bytes) -> None:
        """Bytes that were passed on."""
        at = 0
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
                continue
            missing = self._head_size() - len(self._head)
            self._head += data[at : at + missing]
            at += missing
            if len(self._head) >= self._head_size():
                self._left, self._head = self._payload_size(), b""

    def _head_size(self) -> int:
        if len(self._head) < _FRAME_HEAD:
            return _FRAME_HEAD
        mask = 4 if self._head[1] & _MASKED else 0
        return _FRAME_HEAD + _SESSION_LENGTH_BYTES.get(self._head[1] & _LENGTH, 0) + mask

    def _payload_size(self) -> int:
        short = self._head[1] & _LENGTH
        size = _SESSION_LENGTH_BYTES.get(short, 0)
        return int.from_bytes(self._head[2 : 2 + size], "big") if size else short


class Side(asyncio.Protocol):
    """One side of a tunnel: `other` gets its bytes. `on_end` is called once when it is gone, `on_data` is
    given its bytes first and says what of them is passed on.
    """

    def __init__(
        self, on_data: Callable[[bytes], bytes], on_end: Callable[[Side], None], owner: Guarded
    ) -> None:
        self._on_data = on_data
        self._on_end = on_end
        self._owner = owner
        self.other: Side | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        bound_unsent(self.transport)
        bound_held(self.transport)

    def data_received(self, data: bytes) -> None:
        guarded(self._owner, self._take, data)

    def _take(self, data: bytes) -> None:
        passed = self._on_data(data)
        if passed and self.other is not None:
            self.other.write(passed)

    def write(self, data: bytes) -> None:
        """Send, if it is still there."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, _exc: Exception | None) -> None:
        self.transport = None
        guarded(self._owner, self._on_end, self)

    def close(self) -> None:
        """Send what is left, and close."""
        if self.transport is not None:
            self.transport.close()
