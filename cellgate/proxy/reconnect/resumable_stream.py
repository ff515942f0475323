"""A stream that its client may leave and come back to: the client of its exchange, whoever is connected.

Between an exchange and the connection of its client. What the exchange writes gets ids and is kept; while no
client is connected, the exchange goes on. Rules:
1. Only streams of events are kept. Any other answer passes unchanged, and its client leaves as any client.
2. The newest connection has the stream: one before it is cut.
3. A stream that nobody could come back to ends as any stream whose client has left.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Protocol

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.reconnect.kept_events import KeptEvents
from cellgate.proxy.wire.client import ClientExchange, ResponseClient
from cellgate.proxy.wire.framing import CHUNKED, LAST_CHUNK, unframed
from cellgate.proxy.wire.heads import KEY_FIELDS

if TYPE_CHECKING:
    from cellgate.proxy.wire.failure import Failure
    from cellgate.proxy.wire.request import Request

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
