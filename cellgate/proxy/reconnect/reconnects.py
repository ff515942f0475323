"""The streams of a process whose clients may come back, and clients that do."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.logs.record import Finished
from cellgate.proxy.reconnect.kept_events import read_id
from cellgate.proxy.reconnect.other_worker import OtherWorker
from cellgate.proxy.reconnect.refused import Refused, gone
from cellgate.proxy.reconnect.resumable_stream import Connected, ResumableStream
from cellgate.proxy.request.response_host import ResponseHost
from cellgate.proxy.wire.client import ClientExchange, ResponseClient
from cellgate.proxy.wire.request import Request
from cellgate.router.nouns import Outcome

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
