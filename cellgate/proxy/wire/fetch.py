"""`fetch`: one bounded request to a server, for probes.

A unit that accepts no more connections would look healthy as long as one old connection to it lives. So a
request uses a new connection when it is asked to, after a failure, and when the last new one was too long
ago; otherwise a kept connection is used.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from cellgate.probes.agenda import Agenda
from cellgate.probes.base import FetchError, Reply, Trouble
from cellgate.proxy.wire.call import Call
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.proxy.wire.heads import RANK_FIELD
from cellgate.proxy.wire.pool import LATE_S, Pool
from cellgate.proxy.wire.reply_reader import ReplyHead
from cellgate.proxy.wire.usual_reply import UsualReply

FRESH_S = 30.0
FRESH_POST_S = 10.0
"""The same for a request with a body (a canary): so much later at most, a new connection is tried."""
PAGES_MAX = 16
"""Usual replies are kept of so many pages of a server."""

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
    a refused connection counts as one. `deadlines` is where the timeouts of many such fetches are, `fresh_at`
    when the last new connection was asked for that has brought a reply.
    """

    def __init__(
        self,
        pool: Pool,
        loop: asyncio.AbstractEventLoop,
        heard: Callable[[], None],
        deadlines: Agenda,
        api_key: str = "",
    ) -> None:
        self.pool = pool
        self.deadlines = deadlines
        self.now = loop.time
        self._loop = loop
        self._heard = heard
        self.fresh_at = self.answered_at = -math.inf
        self._fields = _fields(pool.authority.decode(), api_key)
        self._pages: dict[str, KnownPage] = {}

    async def __call__(
        self,
        method: str,
        target: str,
        *,
        body: bytes = b"",
        content_type: str = "application/json",
        request_id: str = "",
        rank: int | None = None,
        fresh: bool = False,
        timeout_s: float,
        max_bytes: int = 1 << 20,
    ) -> Reply:
        """The whole reply; see `cellgate.probes.base.Fetch`."""
        done: asyncio.Future[Reply | FetchError] = self._loop.create_future()
        page = self._page(target)
        if method != "GET" or request_id or rank is not None:
            page = KnownPage(self._head(method, target, len(body), request_id, rank, content_type))
        waiting = _Waiting(self, page, body, timeout_s, max_bytes, fresh, partial(_settle, done))
        try:
            outcome = await done
        finally:
            waiting.abandon()
        if isinstance(outcome, FetchError):
            raise outcome
        return outcome

    def get(
        self,
        target: str,
        done: Callable[[Reply | FetchError], None],
        *,
        timeout_s: float,
        max_bytes: int = 1 << 20,
    ) -> _Waiting:
        """A GET without a task; see `cellgate.probes.base.Fetch`."""
        return _Waiting(self, self._page(target), b"", timeout_s, max_bytes, False, done)

    def note_reply(self) -> None:
        """A reply has come."""
        self.answered_at = self.now()
        self._heard()

    def note_error(self, error: FetchError) -> None:
        """There was none."""
        self.fresh_at = -math.inf
        if error.trouble is Trouble.REFUSED:
            self._heard()

    def _page(self, target: str) -> KnownPage:
        page = self._pages.get(target)
        if page is None:
            page = KnownPage(self._head("GET", target, 0, "", None))
            if len(self._pages) < PAGES_MAX:
                self._pages[target] = page
        return page

    def _head(
        self,
        method: str,
        target: str,
        length: int,
        request_id: str,
        rank: int | None,
        content_type: str = "",
    ) -> bytes:
        head = f"{method} {target} HTTP/1.1\r\n{self._fields}\r\n"
        if request_id:
            head += f"x-request-id: {request_id}\r\n"
        if rank is not None:
            head += f"{RANK_FIELD.decode()}: {rank}\r\n"
        if length:
            head += f"content-type: {content_type}\r\ncontent-length: {length}\r\n"
        return (head + "\r\n").encode()


def request_head(authority: str, token: str, target: str) -> bytes:
    """The head of a GET."""
    return f"GET {target} HTTP/1.1\r\n{_fields(authority, token)}\r\n\r\n".encode()


def _fields(authority: str, token: str) -> str:
    lines = [f"host: {authority}", "user-agent: cellgate"]
    if token:
        lines.append(f"authorization: Bearer {token}")
    return "\r\n".join(lines)


class KnownPage:
    """A request that is sent again and again: its head, and the usual reply, if there is one, as it was read
    and as probes get it.
    """

    __slots__ = ("head", "reply", "usual")

    def __init__(self, head: bytes) -> None:
        self.head = head
        self.usual: UsualReply | None = None
        self.reply: Reply | None = None

    def answered(self, call: Call, status: int, body: bytes) -> Reply:
        """The reply to `call`: the same object as before when it is the usual one."""
        usual, reply = call.usual, self.reply
        if reply is None or usual is None or usual is not self.usual:
            assert call.reply_head is not None
            self.usual = usual
            self.reply = reply = Reply(status, _Headers(call.reply_head), body)
        return reply


class _Waiting:
    """A request on its way: `tell` is called with what becomes of it, in a later turn of the loop."""

    __slots__ = ("_call", "_due", "_fetch", "_fresh_at", "_is_over", "_page", "_tell")

    def __init__(
        self,
        fetch: UnitFetch,
        page: KnownPage,
        body: bytes,
        timeout_s: float,
        max_bytes: int,
        fresh: bool,
        tell: Callable[[Reply | FetchError], None],
    ) -> None:
        now = fetch.now()
        is_fresh = fresh or now - fetch.fresh_at >= (FRESH_POST_S if body else FRESH_S)
        self._fetch = fetch
        self._page = page
        self._tell: Callable[[Reply | FetchError], None] | None = tell
        self._is_over = False
        self._fresh_at = now if is_fresh else 0.0
        self._due = fetch.deadlines.at(now + timeout_s, self._expire)
        self._call = Call(self, fetch.pool, page.head, body, max_bytes=max_bytes, usual=page.usual)
        self._call.begin(fresh=is_fresh)

    def answered(self, status: int, body: bytes) -> None:
        fetch, call = self._fetch, self._call
        if self._fresh_at:
            fetch.fresh_at = self._fresh_at
        fetch.note_reply()
        self._settle(self._page.answered(call, status, body))

    def failed(self, failure: Failure) -> None:
        if failure.kind is FailureKind.STALE_CONNECTION:
            # It was closed while it was idle, which proves nothing about the server.
            self._call.begin(fresh=True)
        else:
            self._fail(fetch_error(failure))

    def abandon(self) -> None:
        """Leave nothing behind: no deadline, no request for a connection, no connection waiting for a
        reply.
        """
        self._tell = None
        if not self._is_over:
            call = self._call
            self._close()
            call.abandon()

    def _expire(self) -> None:
        phase = self._call.phase
        self._call.abandon()
        if self._fetch.now() > self._due.when + LATE_S:
            self._fail(FetchError(Trouble.OWN, f"the gate's event loop was blocked ({phase})"))
        else:
            self._fail(FetchError(Trouble.TIMEOUT, f"no answer in time ({phase})"))

    def _fail(self, error: FetchError) -> None:
        self._fetch.note_error(error)
        self._settle(error)

    def _settle(self, outcome: Reply | FetchError) -> None:
        if not self._is_over:
            self._close()
            # Not now: its connection is not given back yet.
            self._fetch.deadlines.soon(self._deliver, outcome)

    def _close(self) -> None:
        self._is_over = True
        self._fetch.deadlines.cancel(self._due)
        # They refer to each other: without this, each look would leave something to the collector.
        del self._call

    def _deliver(self, outcome: Reply | FetchError) -> None:
        if self._tell is not None:
            self._tell(outcome)


def _settle(done: asyncio.Future[Reply | FetchError], outcome: Reply | FetchError) -> None:
    if not done.done():
        done.set_result(outcome)


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
