"""`fetch`: one bounded request to a server, for probes.

A unit that no longer lets anyone in would pass for well as long as one old connection to it lives. So what
proves most, a request with a body, goes on a new connection, and so does any other after something went wrong
and at least every FRESH_S; between those a kept one does.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping

from cellgate.probes.base import FetchError, Reply, Trouble
from cellgate.proxy.wire.failure import Failure, Kind
from cellgate.proxy.wire.pool import LATE_S, Pool
from cellgate.proxy.wire.reply_reader import ReplyHead
from cellgate.proxy.wire.upstream import UnitConnection

FRESH_S = 30.0

_TROUBLES = {
    Kind.REFUSED: Trouble.REFUSED,
    Kind.UNREACHABLE: Trouble.UNREACHABLE,
    Kind.CONNECT_TIMEOUT: Trouble.TIMEOUT,
    Kind.NO_RESOURCES: Trouble.OWN,
    Kind.EVICTED: Trouble.OWN,
    Kind.INTERNAL: Trouble.OWN,
}


def fetch_error(failure: Failure) -> FetchError:
    """The same as probes know it."""
    return FetchError(_TROUBLES.get(failure.kind, Trouble.BROKEN), failure.message)


class UnitFetch:
    """The `Fetch` of one server (see probes/base.py). `heard` is called with each reply, whatever it says;
    that somebody refuses is one too.
    """

    def __init__(
        self, pool: Pool, loop: asyncio.AbstractEventLoop, heard: Callable[[], None], api_key: str = ""
    ) -> None:
        self._pool = pool
        self._loop = loop
        self._heard = heard
        self._fresh_at = -math.inf
        self._fields = _fields(pool.authority.decode(), api_key)

    async def __call__(
        self,
        method: str,
        target: str,
        *,
        body: bytes = b"",
        request_id: str = "",
        timeout_s: float,
        max_bytes: int = 1 << 20,
    ) -> Reply:
        """The whole reply; see `cellgate.probes.base.Fetch`."""
        now = self._loop.time()
        head = self._head(method, target, len(body), request_id)
        call = _Call(head, body, max_bytes, self._pool, now + timeout_s, self._loop)
        is_fresh = bool(body) or now - self._fresh_at >= FRESH_S
        try:
            self._pool.take(call, fresh=is_fresh)
            reply = await call.done
        except FetchError as error:
            self._fresh_at = -math.inf
            if error.trouble is Trouble.REFUSED:
                self._heard()
            raise
        finally:
            call.abandon()
        if is_fresh:
            self._fresh_at = now
        self._heard()
        return reply

    def _head(self, method: str, target: str, length: int, request_id: str) -> bytes:
        head = f"{method} {target} HTTP/1.1\r\n{self._fields}\r\n"
        if request_id:
            head += f"x-request-id: {request_id}\r\n"
        if length:
            head += f"content-type: application/json\r\ncontent-length: {length}\r\n"
        return (head + "\r\n").encode()


def request_head(authority: str, token: str, target: str) -> bytes:
    """The head of a GET."""
    return f"GET {target} HTTP/1.1\r\n{_fields(authority, token)}\r\n\r\n".encode()


def _fields(authority: str, token: str) -> str:
    lines = [f"host: {authority}", "user-agent: cellgate"]
    if token:
        lines.append(f"authorization: Bearer {token}")
    return "\r\n".join(lines)


class _Call:
    """One request on its way: takes the connection, then the reply. Its own timer ends it at `deadline`."""

    __slots__ = (
        "_body",
        "_conn",
        "_deadline",
        "_head",
        "_loop",
        "_max_bytes",
        "_phase",
        "_pool",
        "_reply",
        "_timer",
        "done",
    )

    def __init__(
        self,
        head: bytes,
        body: bytes,
        max_bytes: int,
        pool: Pool,
        deadline: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.done: asyncio.Future[Reply] = loop.create_future()
        self._phase = "connecting"
        self._head = head
        self._body = body
        self._max_bytes = max_bytes
        self._reply = bytearray()
        self._conn: UnitConnection | None = None
        self._pool = pool
        self._loop = loop
        self._deadline = deadline
        self._timer = loop.call_at(deadline, self._expire)

    def on_connected(self, conn: UnitConnection) -> None:
        self._phase = "waiting for its reply"
        self._conn = conn
        conn.send(self._head, self._body, self, to_head=False)

    def on_read(self, _data: bytes, pieces: list[bytes], conn: UnitConnection) -> None:
        self._reply += b"".join(pieces)
        head = conn.reply.head
        if head is not None:
            self._phase = "reading its reply"
        if len(self._reply) > self._max_bytes:
            self._settle(FetchError(Trouble.BROKEN, f"its reply is larger than {self._max_bytes} bytes"))
            conn.drop()
        elif conn.reply.ended and head is not None:
            self._settle(Reply(head.status, _Headers(head), bytes(self._reply)))
            self._conn = None

    def on_failed(self, failure: Failure) -> None:
        self._conn = None
        if failure.kind is Kind.STALE_CONNECTION:
            # It was closed while nobody used it, which says nothing about the server.
            self._phase = "connecting"
            self._pool.take(self, fresh=True)
            return
        self._settle(fetch_error(failure))

    def abandon(self) -> None:
        """Leave nothing behind: no timer, no wish for a connection and none that waits for a reply."""
        self._timer.cancel()
        if self._conn is not None:
            self._conn.drop()
        elif not self.done.done() or self.done.cancelled():
            self._pool.cancel(self)
        self.done.cancel()

    def _expire(self) -> None:
        if self._loop.time() > self._deadline + LATE_S:
            self._settle(FetchError(Trouble.OWN, f"the gate itself stood still ({self._phase})"))
        else:
            self._settle(FetchError(Trouble.TIMEOUT, f"no answer in time ({self._phase})"))

    def _settle(self, outcome: Reply | FetchError) -> None:
        if self.done.done():
            return
        if isinstance(outcome, FetchError):
            self.done.set_exception(outcome)
        else:
            self.done.set_result(outcome)


class _Headers(Mapping[str, str]):
    """The headers of a reply, read when somebody asks: few probes do."""

    __slots__ = ("_head",)

    def __init__(self, head: ReplyHead) -> None:
        self._head = head

    def __getitem__(self, name: str) -> str:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def _read(self) -> dict[str, str]:
        pairs = [*self._head.fields, *(line.rstrip(b"\r\n").split(b": ", 1) for line in self._head.lines)]
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}
