"""`fetch`: one bounded request to a server, for probes.

A unit that accepts no more connections would look healthy as long as one old connection to it lives. So a
request with a body (a canary) uses a new connection, and so does any other after a failure and at least every
FRESH_S; otherwise a kept connection is used.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping

from cellgate.probes.base import FetchError, Reply, Trouble
from cellgate.proxy.wire.call import Call
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.proxy.wire.heads import RANK_FIELD
from cellgate.proxy.wire.pool import LATE_S, Pool
from cellgate.proxy.wire.reply_reader import ReplyHead

FRESH_S = 30.0

_TROUBLES = {
    FailureKind.REFUSED: Trouble.REFUSED,
    FailureKind.UNREACHABLE: Trouble.UNREACHABLE,
    FailureKind.CONNECT_TIMEOUT: Trouble.TIMEOUT,
    FailureKind.NO_RESOURCES: Trouble.OWN,
    FailureKind.EVICTED: Trouble.OWN,
    FailureKind.INTERNAL: Trouble.OWN,
}


def fetch_error(failure: Failure) -> FetchError:
    """The same, as probes know it."""
    return FetchError(_TROUBLES.get(failure.kind, Trouble.BROKEN), failure.message)


class UnitFetch:
    """The `Fetch` of one server (see probes/base.py). `heard` is called for each reply, whatever its status;
    a refused connection counts as one.
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
        rank: int | None = None,
        timeout_s: float,
        max_bytes: int = 1 << 20,
    ) -> Reply:
        """The whole reply; see `cellgate.probes.base.Fetch`."""
        now = self._loop.time()
        head = self._head(method, target, len(body), request_id, rank)
        waiting = _Waiting(self._pool, head, body, max_bytes, now + timeout_s, self._loop)
        is_fresh = bool(body) or now - self._fresh_at >= FRESH_S
        try:
            waiting.call.begin(fresh=is_fresh)
            reply = await waiting.done
        except FetchError as error:
            self._fresh_at = -math.inf
            if error.trouble is Trouble.REFUSED:
                self._heard()
            raise
        finally:
            waiting.abandon()
        if is_fresh:
            self._fresh_at = now
        self._heard()
        return reply

    def _head(self, method: str, target: str, length: int, request_id: str, rank: int | None) -> bytes:
        head = f"{method} {target} HTTP/1.1\r\n{self._fields}\r\n"
        if request_id:
            head += f"x-request-id: {request_id}\r\n"
        if rank is not None:
            head += f"{RANK_FIELD.decode()}: {rank}\r\n"
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


class _Waiting:
    """A caller that is waited for, until `deadline`: `done` is the reply, or a FetchError."""

    __slots__ = ("_deadline", "_loop", "_timer", "call", "done")

    def __init__(
        self,
        pool: Pool,
        head: bytes,
        body: bytes,
        max_bytes: int,
        deadline: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.done: asyncio.Future[Reply] = loop.create_future()
        self.call = Call(self, pool, head, body, max_bytes=max_bytes)
        self._loop = loop
        self._deadline = deadline
        self._timer = loop.call_at(deadline, self._expire)

    def answered(self, status: int, body: bytes) -> None:
        head = self.call.reply_head
        assert head is not None
        self._settle(Reply(status, _Headers(head), body))

    def failed(self, failure: Failure) -> None:
        if failure.kind is FailureKind.STALE_CONNECTION:
            # It was closed while it was idle, which proves nothing about the server.
            self.call.begin(fresh=True)
        else:
            self._settle(fetch_error(failure))

    def abandon(self) -> None:
        """Leave nothing behind: no timer, no request for a connection, no connection waiting for a reply."""
        self._timer.cancel()
        self.call.abandon()
        self.done.cancel()

    def _expire(self) -> None:
        phase = self.call.phase
        if self._loop.time() > self._deadline + LATE_S:
            self._settle(FetchError(Trouble.OWN, f"the gate's event loop was blocked ({phase})"))
        else:
            self._settle(FetchError(Trouble.TIMEOUT, f"no answer in time ({phase})"))

    def _settle(self, outcome: Reply | FetchError) -> None:
        if self.done.done():
            return
        if isinstance(outcome, FetchError):
            self.done.set_exception(outcome)
        else:
            self.done.set_result(outcome)


class _Headers(Mapping[str, str]):
    """The headers of a reply, parsed on demand: few probes use them."""

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
