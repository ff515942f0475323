"""The streams of a process whose clients may come back, and clients that do."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import NamedTuple, Protocol, cast

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.heads import KEY_FIELDS, RESUME_FIELD
from cellgate.proxy.http.reply import CHUNKED, LAST_CHUNK, unframed
from cellgate.proxy.http.request import Request
from cellgate.proxy.http.sse import carries_data, split
from cellgate.proxy.http.turns import ClientExchange, ResponseClient
from cellgate.proxy.observe.access_log import Finished
from cellgate.proxy.request.ports import ResponseHost
from cellgate.proxy.request.response import Response
from cellgate.proxy.request.routes import find_route
from cellgate.router.nouns import Outcome

# The events of one stream with an id each, kept so that its client can be sent them again. Pure.
#
# An id is `PLACE.TOKEN.NUMBER`: the worker that has the stream, 128 random bits, and the number of the
# event.
# It is the last line of an event (https://html.spec.whatwg.org/multipage/server-sent-events.html, 9.2.6),
# so
# that it replaces one that a unit gave.


_ID = re.compile(rb"(\d{1,4})\.([\w-]{22})\.(\d{1,12})")


class EventId(NamedTuple):
    """What a `Last-Event-ID` says."""

    place: int
    token: bytes
    number: int


def read_id(value: bytes) -> EventId | None:
    """The parts of an id; None: it is none of a gate."""
    match = _ID.fullmatch(value)
    return EventId(int(match[1]), match[2], int(match[3])) if match else None


class KeptEvents:
    """The newest events of one stream, in at most `most_bytes`; `stem` is what their ids begin with.

    `last` is the number of the newest event, `size` the bytes of all that are kept.
    """

    __slots__ = ("_events", "_most_bytes", "_stem", "_tail", "last", "size")

    def __init__(self, stem: bytes, most_bytes: int) -> None:
        self._stem = stem
        self._most_bytes = most_bytes
        self._events: deque[bytes] = deque()
        self._tail = b""
        self.last = self.size = 0

    @property
    def is_too_large(self) -> bool:
        """Whether an event that is not complete yet could not be kept."""
        return len(self._tail) > self._most_bytes

    def add(self, body: bytes) -> bytes:
        """Take a part of the stream; returns its complete events with their ids. Comments get none."""
        events, self._tail = split(self._tail + body)
        return b"".join([self._numbered(event) if carries_data(event) else event for event in events])

    def flush(self) -> bytes:
        """The begin of an event that is not complete yet, which is no longer kept."""
        rest, self._tail = self._tail, b""
        return rest

    def has_after(self, number: int) -> bool:
        """Whether all events behind this one are kept."""
        return 0 <= self.last - number <= len(self._events)

    def after(self, number: int) -> bytes | None:
        """The events behind this one, with their ids; None: they are not kept any more, or never were."""
        if not self.has_after(number):
            return None
        return b"".join(list(self._events)[len(self._events) - (self.last - number) :])

    def _numbered(self, event: bytes) -> bytes:
        self.last += 1
        event = b"%b\nid: %b%d\n\n" % (event.rstrip(b"\r\n").lstrip(b"\r\n"), self._stem, self.last)
        self._events.append(event)
        self.size += len(event)
        while self.size > self._most_bytes:
            self.size -= len(self._events.popleft())
        return event


# A stream that its client may leave and come back to: the client of its exchange, whoever is connected.
#
# Between an exchange and the connection of its client. What the exchange writes gets ids and is kept; while
# no
# client is connected, the exchange goes on. Rules:
# 1. Only streams of events are kept. Any other answer passes unchanged, and its client leaves as any
# client.
# 2. The newest connection has the stream: one before it is cut.
# 3. A stream that nobody could come back to ends as any stream whose client has left.


STREAM_BYTES = 4096
"""What a stream takes beside its events and the body of its request."""
_HEAD_END = b"\r\n\r\n"
_IS_EVENTS = (b"\r\ncontent-type: text/event-stream", b"\r\ntransfer-encoding: chunked\r\n")


class StreamOwner(Protocol):
    """Where streams are kept."""

    @property
    def keeps(self) -> bool:
        """Whether clients can come back."""

    def now(self) -> float: ...
    def grown(self, size: int) -> bool:
        """A stream keeps so many more bytes, or fewer; whether there is room for them."""

    def freed(self, stream: ResumableStream, size: int) -> None:
        """The stream keeps so many bytes less, unless it was forgotten."""

    def left(self, stream: ResumableStream) -> None:
        """Nobody is connected to it any more."""

    def joined(self, stream: ResumableStream) -> None:
        """A client is back."""

    def lose(self, stream: ResumableStream) -> None:
        """Its client is away and cannot come back: it is to end."""

    def forget(self, stream: ResumableStream) -> None:
        """Nobody can come back to it any more."""


class ResumableStream:
    """One stream; `token` is what a client must know to come back, `credentials` what it must show again.

    `inner` is the exchange that answers the request, until it is over. `left_at` is since when nobody is
    connected, or since when it is over, which a client may not have read yet: infinity while somebody reads
    it.
    """

    __slots__ = (
        "_connection",
        "_head",
        "_is_kept",
        "_is_paused",
        "_owner",
        "_request_bytes",
        "_seen",
        "_sent_at_leaving",
        "_stem",
        "credentials",
        "inner",
        "is_over",
        "is_whole",
        "kept",
        "left_at",
        "path",
        "peer",
        "secure",
        "shows_internals",
        "size",
        "token",
    )

    def __init__(
        self, owner: StreamOwner, client: ResponseClient, request: Request, stem: bytes, token: bytes
    ) -> None:
        self._owner = owner
        self._stem = stem
        self._connection: Connected | None = None
        self._is_kept = self._is_paused = False
        self._seen = 0
        self._sent_at_leaving = 0
        self.token = token
        self.credentials = credentials_of(request)
        self.path = request.path
        self.peer, self.secure, self.shows_internals = client.peer, client.secure, client.shows_internals
        self.kept = KeptEvents(stem, LIMITS.kept_stream_bytes)
        self._head = b""
        self.is_over = self.is_whole = False
        self.left_at = inf
        self.inner: ClientExchange | None = None
        self._request_bytes = request.body_size
        self.size = STREAM_BYTES + request.body_size

    # -- connections ---------------------------------------------------------------------------------------

    def begin(self, connection: Connected, make: Callable[[ResumableStream], ClientExchange]) -> None:
        """The request has come on this connection; `make` makes the exchange that answers it."""
        self._connection = connection
        inner = self.inner = make(self)
        inner.start()

    def go_on(self, connection: Connected, number: int, missing: bytes) -> None:
        """A client is back, on this connection: send what is `missing` behind the event of this number, then
        what comes.
        """
        before, self._connection = self._connection, connection
        self.left_at = inf
        self._owner.joined(self)
        if before is not None:
            before.client.cut()
            self._set_paused(paused=False)
        framed = CHUNKED.frame(missing) if missing else b""
        connection.client.send(self._head_behind(number) + framed + (LAST_CHUNK if self.is_whole else b""))
        if self.is_over:
            self._end(connection, keep_alive=self.is_whole)

    def missing(self, request: Request, number: int) -> bytes | None:
        """The events behind the one of this number, for a client that is back with `request`; None: it gets
        none.
        """
        is_same = request.path == self.path and hmac.compare_digest(credentials_of(request), self.credentials)
        return self.kept.after(number) if is_same else None

    def leave(self, connection: Connected) -> None:
        """The client of this connection has left."""
        if connection is not self._connection:
            return
        self._connection = None
        if not self._is_kept or self.is_over or not self._owner.keeps:
            self.stop()
            return
        self.left_at, self._sent_at_leaving = self._owner.now(), self.kept.last
        self._owner.left(self)
        self._set_paused(paused=False)

    def pause(self, connection: Connected, *, paused: bool) -> None:
        """The client of this connection reads slower than the unit writes, or reads again."""
        if connection is self._connection:
            self._set_paused(paused=paused)

    def tick(self, connection: Connected | None, now: float) -> None:
        """Time has passed for a connection; None: for those that are away."""
        if connection is self._connection and self.inner is not None:
            self.inner.tick(now)

    def crashed(self, error: Exception) -> None:
        """A callback of a connection has failed."""
        if self.inner is not None:
            self.inner.crashed(error)

    def let_go(self) -> bytes:
        """It is kept no more, and a client that is connected reads on: first the event that has begun, which
        is returned.
        """
        self._owner.forget(self)
        self._is_kept = False
        return self.kept.flush()

    def stop(self) -> None:
        """Nobody comes back to it."""
        self._owner.forget(self)
        self.is_over = True
        inner, self.inner = self.inner, None
        if inner is not None:
            inner.client_left()

    def _set_paused(self, *, paused: bool) -> None:
        if paused is not self._is_paused and self.inner is not None:
            self._is_paused = paused
            self.inner.client_paused(paused)

    # -- what the exchange sees: see Client ----------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Write to the client, or keep it for when it is back."""
        self.send(data)

    def send(self, data: bytes) -> None:
        """The same: here nothing is written to a connection that has gone."""
        if not self._seen:
            data = self._begin(data)
        elif self._is_kept:
            data = self._keep(data)
        self._seen += len(data)
        if self._connection is not None:
            self._connection.client.send(data)

    def hint(self, heads: bytes) -> None:
        """They are no part of what is kept."""

    def finish(self, _request: Request, *, keep_alive: bool) -> None:
        """The answer is complete: what it was made with is not needed any more."""
        self.is_over, self.inner = True, None
        self._owner.freed(self, self._request_bytes)
        connection = self._connection
        if connection is not None:
            self._end(connection, keep_alive=keep_alive)
        if not self._is_kept:
            self._owner.forget(self)

    def give_up(self, _exchange: ClientExchange, request: Request) -> None:
        """The exchange has failed."""
        if not self.is_over:
            self.finish(request, keep_alive=False)

    def cut(self) -> None:
        """End it: its client reads nothing, and would occupy its unit for ever."""
        if self._connection is not None:
            self.let_go()
            self._connection.client.cut()

    # -- inside --------------------------------------------------------------------------------------------

    def _begin(self, data: bytes) -> bytes:
        """The first bytes of the answer, with its whole head: see whether it can be kept."""
        end = data.find(_HEAD_END) + len(_HEAD_END)
        head = data[:end].lower()
        if not self._owner.keeps or not all(mark in head for mark in _IS_EVENTS):
            return data
        self._is_kept = True
        self._head = data[: end - 2]
        return self._head_behind(0) + (self._keep(data[end:]) if len(data) > end else b"")

    def _head_behind(self, number: int) -> bytes:
        """The head for a client that gets what is behind the event of this number, which is the one to ask
        for when it loses this connection before its first event.
        """
        return b"%bx-cellgate-resume: %b%d\r\n\r\n" % (self._head, self._stem, number)

    def _keep(self, data: bytes) -> bytes:
        """Number the events of a part of the body, and keep them."""
        body, self.is_whole = unframed(data)
        before = self.kept.size
        events = self.kept.add(body)
        grown = self.kept.size - before
        self.size += grown
        if not self._owner.grown(grown) or self.kept.is_too_large:
            events += self.let_go()
        if self.left_at < inf and not self._may_come_back():
            reached("kept_stream_bytes")
            self._owner.lose(self)
        framed = CHUNKED.frame(events) if events else b""
        return framed + (LAST_CHUNK if self.is_whole else b"")

    def _may_come_back(self) -> bool:
        """Whether all is kept that was not sent to a client that is away."""
        return self._is_kept and self.kept.has_after(self._sent_at_leaving)

    def _end(self, connection: Connected, *, keep_alive: bool) -> None:
        self._connection = None
        self.left_at = self._owner.now()
        self._owner.left(self)
        connection.client.finish(connection.request, keep_alive=keep_alive)


class Connected:
    """A connection of a stream's client, as an exchange of that connection."""

    __slots__ = ("_begin", "client", "request", "stream")

    def __init__(
        self,
        stream: ResumableStream,
        client: ResponseClient,
        request: Request,
        begin: Callable[[Connected], object],
    ) -> None:
        self.stream = stream
        self.client = client
        self.request = request
        self._begin = begin

    def start(self) -> None:
        self._begin(self)

    def crashed(self, error: Exception) -> None:
        self.stream.crashed(error)
        self.client.give_up(self, self.request)

    def client_left(self) -> None:
        self.stream.leave(self)

    def client_paused(self, paused: bool) -> None:
        self.stream.pause(self, paused=paused)

    def stop(self, _failure: Failure) -> None:
        """This connection ends; its client may come back for the rest."""
        self.stream.leave(self)
        self.client.give_up(self, self.request)

    def tick(self, now: float) -> None:
        self.stream.tick(self, now)


_CREDENTIALS = tuple(b"%b: " % field for field in sorted(KEY_FIELDS))


def credentials_of(request: Request) -> bytes:
    """What the client of a request shows of itself."""
    return b"".join(line for line in request.lines if line.startswith(_CREDENTIALS))


# The answer to a client that is back for a stream which is not here any more.


def gone(resume_s: float) -> Failure:
    """The stream that was asked for is not here. Why is not said: whoever guesses learns nothing."""
    if not resume_s:
        return Failure(FailureKind.STREAM_GONE, "this gate keeps no streams for clients that come back")
    reason = (
        "this gate does not have the rest of that stream: its client was away for more than "
        f"{resume_s:g} s, or too far behind; or another gate has it, or had; or the path or the credentials "
        "are not those of its request. Send the request again without Last-Event-ID"
    )
    return Failure(FailureKind.STREAM_GONE, reason)


class Refused:
    """An exchange that gives an error."""

    def __init__(
        self, host: ResponseHost, client: ResponseClient, request: Request, failure: Failure
    ) -> None:
        self._host = host
        self._client = client
        self._request = request
        self._failure = failure

    def start(self) -> None:
        route = find_route(self._request.path).name
        Response(self._host, self._client, self._request, route).refuse(self._failure)

    def crashed(self, _error: Exception) -> None:
        self._client.give_up(self, self._request)

    def client_left(self) -> None:
        """It is over already."""

    def client_paused(self, _paused: bool) -> None:
        """It is over already."""

    def stop(self, _failure: Failure) -> None:
        """It is over already."""

    def tick(self, _now: float) -> None:
        """It is over already."""


# A client that is back at another worker than the one that has its stream: its bytes are passed through.


LOOPBACK = "127.0.0.1"
"""Where workers take clients of each other."""


class OtherWorker(asyncio.Protocol):
    """An exchange whose answer comes from the worker at `port`; `refused` answers when that one is gone."""

    def __init__(
        self, client: ResponseClient, request: Request, last_id: bytes, port: int, refused: Refused
    ) -> None:
        self._client = client
        self._request = request
        self._last_id = last_id
        self._port = port
        self._refused = refused
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._is_over = False

    # -- the exchange --------------------------------------------------------------------------------------

    def start(self) -> None:
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def crashed(self, _error: Exception) -> None:
        self._end()
        self._client.give_up(self, self._request)

    def client_left(self) -> None:
        self._end()

    def client_paused(self, paused: bool) -> None:
        if self._transport is not None:
            (self._transport.pause_reading if paused else self._transport.resume_reading)()

    def stop(self, _failure: Failure) -> None:
        """This connection ends; its client may come back for the rest."""
        self._end()
        self._client.give_up(self, self._request)

    def tick(self, _now: float) -> None:
        """The other worker has the clocks."""

    # -- the other worker ----------------------------------------------------------------------------------

    async def _connect(self) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: self, LOOPBACK, self._port)
        except OSError:
            self._is_over = True
            self._refused.start()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._is_over:
            self._transport.abort()
        else:
            self._transport.write(self._question())

    def data_received(self, data: bytes) -> None:
        if not self._is_over:
            self._client.send(data)

    def connection_lost(self, _exc: Exception | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._client.finish(self._request, keep_alive=False)

    def _question(self) -> bytes:
        request = self._request
        lines = b"%b: on\r\nlast-event-id: %b\r\n%b" % (RESUME_FIELD, self._last_id, credentials_of(request))
        return b"%b %b HTTP/1.1\r\nhost: %b\r\nconnection: close\r\ncontent-length: 0\r\n%b\r\n" % (
            request.method,
            request.target,
            LOOPBACK.encode(),
            lines,
        )

    def _end(self) -> None:
        self._is_over = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()


_TOKEN_BYTES = 16
_LAST_EVENT_ID = b"last-event-id: "


class ReconnectsHost(ResponseHost, Protocol):
    """What this needs of its gateway."""

    def exchange(self, client: ResponseClient, request: Request) -> ClientExchange:
        """The exchange that answers a request."""


class Reconnects:
    """The streams that are kept, for `resume_s` after their client has left.

    `place` is the number of this worker, and `ports` are where on this machine each worker takes clients of
    the others.
    """

    def __init__(self, host: ReconnectsHost, resume_s: float) -> None:
        self._host = host
        self._resume_s = resume_s
        self._streams: dict[bytes, ResumableStream] = {}
        self._away: dict[bytes, ResumableStream] = {}
        """Those that nobody is connected to, from the one that was left first."""
        self._lost: list[ResumableStream] = []
        self.bytes = 0
        """What all of them take."""
        self.place = 0
        self.ports: Sequence[int] = ()
        self.new_token: Callable[[], bytes] = lambda: secrets.token_urlsafe(_TOKEN_BYTES).encode()

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def keeps(self) -> bool:
        """Whether clients can come back."""
        return self._resume_s > 0.0 and not self._host.is_leaving

    def now(self) -> float:
        """The loop's time."""
        return self._host.now()

    def exchange(self, client: ResponseClient, request: Request) -> ClientExchange:
        """What answers a request whose client may come back, or is back."""
        # What it asks for is read here, once.
        request.may_come_back = False
        last_id = _last_event_id(request)
        if last_id:
            return self._back(client, request, last_id)
        if not self.keeps or request.http10 or not self._has_room():
            return self._host.exchange(client, request)
        token = self.new_token()
        stem = b"%d.%b." % (self.place, token)
        stream = self._streams[token] = ResumableStream(self, client, request, stem, token)
        self.grown(stream.size)
        make = partial(self._host.exchange, request=request)
        return Connected(stream, client, request, partial(stream.begin, make=make))

    def _back(self, client: ResponseClient, request: Request, last_id: bytes) -> ClientExchange:
        """A client that has read up to an event."""
        known = read_id(last_id)
        refused = Refused(self._host, client, request, gone(self._resume_s))
        if known is None:
            return refused
        if known.place != self.place and known.place < len(self.ports):
            return OtherWorker(client, request, last_id, self.ports[known.place], refused)
        stream = self._streams.get(known.token)
        missing = stream.missing(request, known.number) if stream is not None else None
        if stream is None or missing is None:
            return refused
        self._host.finished(_record(request, client))
        return Connected(stream, client, request, partial(stream.go_on, number=known.number, missing=missing))

    # -- for streams ---------------------------------------------------------------------------------------

    def grown(self, size: int) -> bool:
        """A stream takes so many more bytes, or fewer; whether there is room for them, after those whose
        clients have been away for longest have made some.
        """
        self.bytes += size
        while self.bytes > LIMITS.kept_streams_bytes:
            reached("kept_streams_bytes")
            if not self._away:
                return False
            self._lose_first()
        return True

    def freed(self, stream: ResumableStream, size: int) -> None:
        """The stream keeps so many bytes less, unless it was forgotten."""
        if stream.token in self._streams:
            stream.size -= size
            self.bytes -= size

    def left(self, stream: ResumableStream) -> None:
        """Nobody is connected to it any more."""
        if stream.token in self._streams:
            self._away[stream.token] = stream

    def joined(self, stream: ResumableStream) -> None:
        """A client is back."""
        self._away.pop(stream.token, None)

    def lose(self, stream: ResumableStream) -> None:
        """Its client is away, and cannot come back. It ends with the next tick, because this may be called
        from within its own exchange.
        """
        stream.let_go()
        self._lost.append(stream)

    def forget(self, stream: ResumableStream) -> None:
        """Nobody can come back to it any more."""
        self._away.pop(stream.token, None)
        if self._streams.pop(stream.token, None) is not None:
            self.bytes -= stream.size

    def _has_room(self) -> bool:
        """Whether one more stream may be kept, after the one that was left first has made room."""
        if len(self._streams) < LIMITS.kept_streams:
            return True
        reached("kept_streams")
        if not self._away:
            return False
        self._lose_first()
        return True

    def _lose_first(self) -> None:
        self.lose(next(iter(self._away.values())))

    # -- with each tick ------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """End what was kept for long enough; the others have their clocks."""
        lost, self._lost = self._lost, []
        for stream in lost:
            stream.stop()
        for stream in list(self._away.values()):
            if now - stream.left_at > self._resume_s:
                stream.stop()
            else:
                stream.tick(None, now)

    def close(self) -> None:
        """The gate ends."""
        for stream in [*self._lost, *self._streams.values()]:
            stream.stop()


def _last_event_id(request: Request) -> bytes:
    lines = (line for line in request.lines if line.startswith(_LAST_EVENT_ID))
    return next(lines, _LAST_EVENT_ID)[len(_LAST_EVENT_ID) :].strip()


def _record(request: Request, client: ResponseClient) -> Finished:
    """A client is back. The record of its stream comes when that ends."""
    return Finished(
        request_id=request.given_id.decode("latin-1"),
        peer=client.peer,
        method=request.method.decode("latin-1"),
        path=request.path.decode("latin-1"),
        route="resume",
        model="",
        status=200,
        code="",
        unit="",
        outcome=Outcome.OK,
        attempts=0,
        continued=0,
        ttft_s=None,
        duration_s=0.0,
        events=0,
        bytes_in=request.body_size,
        bytes_out=0,
    )
