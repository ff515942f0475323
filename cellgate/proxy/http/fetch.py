"""`fetch`: one bounded request to a server, for probes.

A unit that accepts no more connections would look healthy as long as one old connection to it lives. So a
request uses a new connection when it is asked to, after a failure, and when the last new one was too long
ago; otherwise a kept connection is used.

In this order: `UnitFetch`, `PageLook`, `Following`, `UnitNet`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cellgate.probes.base import Fetch, FetchError, Net, P, PageWait, Reply, Trouble
from cellgate.probes.runner import Timers
from cellgate.proxy.http.call import Call
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.heads import RANK_FIELD
from cellgate.proxy.http.held import HeldConnection
from cellgate.proxy.http.names import Lookups
from cellgate.proxy.http.reply import BYTES_MAX, ReplyHead, UsualReply
from cellgate.proxy.http.turns import ReadScheduler
from cellgate.proxy.http.unit import (
    LATE_S,
    GateStalledError,
    MakeTls,
    Pool,
    UnitConnection,
    UnitPools,
    connect_failure,
)
from cellgate.router.unit_state import UnitState

if TYPE_CHECKING:
    from cellgate.probes.agent_stream import AgentStream

FETCH_FRESH_S = 30.0
FRESH_POST_S = 10.0
"""The same for a request with a body (a canary): so much later at most, a new connection is tried."""
FRESH_HELD_S, FRESH_HELD_POST_S = 300.0, 40.0
"""The same while a connection is held."""
PAGES_MAX = 16
"""Usual replies are kept of so many pages of a server."""

_FETCH_TROUBLES = {
    FailureKind.REFUSED: Trouble.REFUSED,
    FailureKind.UNREACHABLE: Trouble.UNREACHABLE,
    FailureKind.CONNECT_TIMEOUT: Trouble.TIMEOUT,
    FailureKind.NO_RESOURCES: Trouble.OWN,
    FailureKind.UNKNOWN_NAME: Trouble.NAME,
    FailureKind.EVICTED: Trouble.OWN,
    FailureKind.INTERNAL: Trouble.OWN,
}


def fetch_error(failure: Failure) -> FetchError:
    """The same, as probes know it."""
    return FetchError(_FETCH_TROUBLES.get(failure.kind, Trouble.BROKEN), failure.message)


class UnitFetch:
    """The `Fetch` of one server (see probes/base.py). `received` is called for each reply, whatever its
    status; a refused connection counts as one. `deadlines` is where the timeouts of many such fetches are,
    `fresh_at` when the last new connection was asked for that has brought a reply.
    """

    def __init__(
        self,
        pool: Pool,
        loop: asyncio.AbstractEventLoop,
        received: Callable[[], None],
        deadlines: Timers,
        api_key: str = "",
    ) -> None:
        self.pool = pool
        self.deadlines = deadlines
        self.now = loop.time
        self._loop = loop
        self._received = received
        self.fresh_at = self.answered_at = -math.inf
        self._fields = _fields(pool.authority.decode(), api_key)
        self._pages: dict[str, KnownPage] = {}
        self.held: HeldConnection | None = None

    @property
    def is_held(self) -> bool:
        """Whether a connection is held open; see `cellgate.probes.base.Fetch`."""
        held = self.held
        return held is not None and held.is_open

    def hold(self, lost: Callable[[], None]) -> None:
        if self.held is None:
            self.held = HeldConnection(self.pool, self._loop)
        self.held.want(lost)

    def close(self) -> None:
        if self.held is not None:
            self.held.close()

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
        if method != "GET" or request_id or rank is not None:
            page = KnownPage(self._head(method, target, len(body), request_id, rank, content_type))
        else:
            page = self._page(target)
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
    ) -> PageWait:
        """A GET without a task; see `cellgate.probes.base.Fetch`."""
        if (page := self._pages.get(target)) is None:
            page = self._page(target)
        elif page.usual is not None:
            if (look := page.look) is None:
                page.look = look = PageLook(self, page)
            if look.ask(timeout_s, max_bytes, done):
                return look
        return _Waiting(self, page, b"", timeout_s, max_bytes, False, done)

    def take_kept(self, now: float) -> UnitConnection | None:
        """A kept connection that may carry the next request: the one that is held, or another. None: there is
        none, or it is time for a new one.
        """
        held, fresh_s = self.held, FETCH_FRESH_S
        if held is not None and held.is_open:
            fresh_s = FRESH_HELD_S
            if now - self.fresh_at < fresh_s and (conn := held.take(now)) is not None:
                if held.opened_at > self.fresh_at:
                    self.fresh_at = held.opened_at
                return conn
        return self.pool.take_idle(now) if now - self.fresh_at < fresh_s else None

    def note_reply(self) -> None:
        self.answered_at = self.now()
        self._received()

    def note_error(self, error: FetchError) -> None:
        self.fresh_at = -math.inf
        if error.trouble is Trouble.REFUSED:
            self._received()

    def _page(self, target: str) -> KnownPage:
        page = self._pages.get(target)
        if page is None:
            page = KnownPage(self._head("GET", target, 0, "", None))
            if len(self._pages) < PAGES_MAX:
                self._pages[target] = page
        return page

    def _head(
        self, method: str, target: str, length: int, request_id: str, rank: int | None, content_type: str = ""
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

    def __init__(self, head: bytes) -> None:
        self.head = head
        self.usual: UsualReply | None = None
        self.reply: Reply | None = None
        self.look: PageLook | None = None

    def answered(self, call: Call, status: int, body: bytes) -> Reply:
        """The reply to `call`: the same object as before when it is the usual one."""
        usual, reply = call.usual, self.reply
        if reply is None or usual is None or usual is not self.usual:
            assert call.reply_head is not None
            self.usual = usual
            self.reply = reply = Reply(status, _Headers(call.reply_head), body)
        return reply


class PageLook:
    """The request of a known page on a kept connection, which is mostly answered as always: one object for
    all of them. `tell` is called as soon as the connection is free again. Of whatever else comes a request of
    its own is made.
    """

    __slots__ = ("_conn", "_due_at", "_fetch", "_max_bytes", "_page", "_tell", "_waiting")

    def __init__(self, fetch: UnitFetch, page: KnownPage) -> None:
        self._fetch, self._page = fetch, page
        self._conn: UnitConnection | None = None
        self._due_at, self._max_bytes = 0.0, 0
        self._tell: Callable[[Reply | FetchError], None] | None = None
        """Who waits for the reply; None: it is not on its way."""
        self._waiting: _Waiting | None = None

    def ask(self, timeout_s: float, max_bytes: int, tell: Callable[[Reply | FetchError], None]) -> bool:
        """Ask; False, with nothing done, if it is on its way already, no connection is kept, or the usual
        reply may be too large.
        """
        fetch, page = self._fetch, self._page
        usual, now = page.usual, fetch.now()
        if self._tell is not None or usual is None or max_bytes < BYTES_MAX:
            return False
        if (conn := fetch.take_kept(now)) is None:
            return False
        self._conn, self._max_bytes, self._tell, self._waiting = conn, max_bytes, tell, None
        self._due_at = due_at = now + timeout_s
        fetch.deadlines.expect(self, due_at)
        conn.send_again(page.head, usual, self)
        return True

    def on_usual(self) -> None:
        fetch, reply = self._fetch, self._page.reply
        fetch.deadlines.forget(self)
        fetch.note_reply()
        if (tell := self._tell) is not None and reply is not None:
            self._tell = None
            tell(reply)

    def on_read(self, data: bytes, pieces: list[bytes], conn: UnitConnection) -> None:
        """The reply, or a part of one, that is not as always."""
        if (waiting := self._become()) is not None:
            waiting.reads_on(data, pieces, conn)

    def on_failed(self, failure: Failure) -> None:
        if (waiting := self._become()) is not None:
            waiting.failed(failure)

    def expire(self) -> None:
        waiting, conn = self._become(), self._conn
        if waiting is not None and conn is not None:
            waiting.reads_on(b"", [], conn)
            waiting.expire()

    def abandon(self) -> None:
        if self._waiting is not None:
            self._waiting.abandon()
        elif self._tell is not None:
            self._end()
            if self._conn is not None:
                self._conn.drop()

    def _end(self) -> None:
        self._tell = None
        self._fetch.deadlines.forget(self)

    def _become(self) -> _Waiting | None:
        """A request of its own, on the same connection; None: nobody wants it."""
        tell = self._tell
        self._end()
        if tell is None:
            return None
        self._waiting = _Waiting.of(self._fetch, self._page, self._due_at, self._max_bytes, tell)
        return self._waiting


class _Waiting:
    """A request on its way: `tell` is called with what becomes of it, in a later turn of the loop."""

    __slots__ = ("_call", "_due_at", "_fetch", "_fresh_at", "_is_over", "_page", "_tell")

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
        now, held = fetch.now(), fetch.held
        fresh_s, conn = FRESH_POST_S if body else FETCH_FRESH_S, None
        if held is not None and held.is_open:
            fresh_s = FRESH_HELD_POST_S if body else FRESH_HELD_S
        is_fresh = fresh or now - fetch.fresh_at >= fresh_s
        self._fetch = fetch
        self._page = page
        self._tell: Callable[[Reply | FetchError], None] | None = tell
        self._is_over = False
        self._fresh_at = now if is_fresh else 0.0
        if held is not None and not is_fresh and (conn := held.take(now)) is not None:
            self._fresh_at = max(fetch.fresh_at, held.opened_at)
        self._wait(now + timeout_s, body, max_bytes)
        self._call.begin(fresh=is_fresh, held=conn)

    @classmethod
    def of(
        cls,
        fetch: UnitFetch,
        page: KnownPage,
        due_at: float,
        max_bytes: int,
        tell: Callable[[Reply | FetchError], None],
    ) -> _Waiting:
        """One for a page that was asked for already: it goes on, or has failed."""
        waiting = cls.__new__(cls)
        waiting._fetch, waiting._page, waiting._tell = fetch, page, tell
        waiting._is_over, waiting._fresh_at = False, 0.0
        waiting._wait(due_at, b"", max_bytes)
        return waiting

    def _wait(self, due_at: float, body: bytes, max_bytes: int) -> None:
        self._due_at, page = due_at, self._page
        self._fetch.deadlines.expect(self, due_at)
        self._call = Call(self, self._fetch.pool, page.head, body, max_bytes=max_bytes, usual=page.usual)

    def reads_on(self, data: bytes, pieces: list[bytes], conn: UnitConnection) -> None:
        """Read the reply on this connection, of which something has come."""
        self._call.take_reply_of(conn)
        if data or pieces:
            self._call.on_read(data, pieces, conn)

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
        """Leave nothing behind: deadline, request for a connection, and one that waits for a reply."""
        self._tell = None
        if not self._is_over:
            call = self._call
            self._close()
            call.abandon()

    def expire(self) -> None:
        phase = self._call.phase
        self._call.abandon()
        if self._fetch.now() > self._due_at + LATE_S:
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
        self._fetch.deadlines.forget(self)
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
        if self._head.length is not None:
            pairs.append((b"content-length", self._head.length))
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}


# Follows a reply without an end, on a connection of its own.


class Following:
    """One request on its way, and its reply. `asked` ends when it is sent, or by FetchError."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: Pool, head: bytes, stream: AgentStream) -> None:
        self.asked: asyncio.Future[None] = loop.create_future()
        self._pool = pool
        self._head = head
        self._stream = stream
        self._conn: UnitConnection | None = None
        self._has_head = False
        pool.take(self, fresh=True)

    def close(self) -> None:
        self.asked.cancel()
        if self._conn is not None:
            self._conn.drop()
        self._pool.close()

    # Callbacks of the pool and the connection.

    def on_connected(self, conn: UnitConnection) -> None:
        self._conn = conn
        conn.send(self._head, b"", self, to_head=False)
        if not self.asked.done():
            self.asked.set_result(None)

    def on_read(self, _data: bytes, pieces: list[bytes], conn: UnitConnection) -> None:
        head = conn.reply.head
        if head is None:
            return
        body = b"".join(pieces)
        if self._has_head:
            self._stream.on_body(body)
        else:
            self._has_head = True
            self._stream.on_head(head.status, is_stream=head.coding == b"chunked", body=body)
        if conn.reply.ended:
            self._stream.on_over("it ended its stream", is_garbled=False)

    def on_failed(self, failure: Failure) -> None:
        self._conn = None
        if not self.asked.done():
            self.asked.set_exception(fetch_error(failure))
        else:
            self._stream.on_over(failure.message, is_garbled=failure.kind is FailureKind.GARBAGE)


class UnitNet:
    """The `Net` of one unit: how its probes reach nodes, exporters and agents (see probes/base.py).

    `received` is called when anything answers, `on_gate_fault` with a reason when the gate could not connect.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        received: Callable[[], None],
        *,
        connect_timeout_s: float,
        tls: MakeTls | None,
        read_scheduler: ReadScheduler | None = None,
        lookups: Lookups | None = None,
        deadlines: Timers | None = None,
        on_gate_fault: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._loop = loop
        self._received = received
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls
        self._read_scheduler = read_scheduler
        self._lookups = lookups or Lookups(loop)
        self._deadlines = deadlines or Timers(loop)
        self._on_gate_fault = on_gate_fault
        self._pools: dict[str, Pool] = {}
        self._fetches: dict[str, UnitFetch] = {}

    def fetch(self, url: str, *, token: str = "") -> UnitFetch:
        """A `Fetch` to the server of `url`; the same each time, because it keeps its connection."""
        fetch = self._fetches.get(url)
        if fetch is None:
            self._pools[url] = pool = self._pool(url, connect_timeout_s=self._connect_timeout_s)
            self._fetches[url] = fetch = UnitFetch(pool, self._loop, self._received, self._deadlines, token)
        return fetch

    async def connect(
        self, address: str, factory: Callable[[], P], *, timeout_s: float
    ) -> tuple[asyncio.Transport, P]:
        """A connection to HOST:PORT. Raises FetchError."""
        # A timeout needs a task, which the run of a probe is not.
        connecting = self._loop.create_task(self._connect(address, factory, timeout_s))
        try:
            return await connecting
        except asyncio.CancelledError:
            connecting.add_done_callback(_abort)
            connecting.cancel()
            raise

    async def _connect(
        self, address: str, factory: Callable[[], P], timeout_s: float
    ) -> tuple[asyncio.Transport, P]:
        host, _, port = address.rpartition(":")
        deadline = self._loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                transport, protocol = await self._loop.create_connection(factory, host.strip("[]"), int(port))
        except Exception as error:
            late = isinstance(error, TimeoutError) and self._loop.time() > deadline + LATE_S
            failure = connect_failure(GateStalledError() if late else error, address, self._lookups)
            assert failure is not None
            if failure.kind is FailureKind.REFUSED:
                self._received()
            elif failure.kind is FailureKind.NO_RESOURCES:
                self._on_gate_fault(failure.message)
            raise fetch_error(failure) from None
        self._received()
        return transport, protocol

    @asynccontextmanager
    async def follow(
        self, address: str, target: str, stream: AgentStream, *, token: str = "", timeout_s: float
    ) -> AsyncIterator[None]:
        """See `cellgate.probes.base.Net`."""
        pool = self._pool(f"http://{address}", connect_timeout_s=timeout_s)
        following = Following(self._loop, pool, request_head(address, token, target), stream)
        try:
            await following.asked
            self._received()
            yield
        except FetchError as error:
            if error.trouble is Trouble.REFUSED:
                self._received()
            raise
        finally:
            following.close()

    def purge(self, now: float) -> None:
        """Close what has been idle for too long."""
        for pool in self._pools.values():
            pool.purge(now)

    def close(self) -> None:
        """Close idle connections; probes in flight are cancelled by their runner."""
        for fetch in self._fetches.values():
            fetch.close()
        for pool in self._pools.values():
            pool.close()

    def _pool(self, url: str, *, connect_timeout_s: float) -> Pool:
        return Pool(
            url,
            self._loop,
            connect_timeout_s=connect_timeout_s,
            tls=self._tls,
            read_scheduler=self._read_scheduler,
            lookups=self._lookups,
            on_gate_fault=self._on_gate_fault,
        )


def _abort(connecting: asyncio.Task[tuple[asyncio.Transport, P]]) -> None:
    """Close a connection that nobody waits for any more."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result()[0].abort()


class ProbeTransport(NamedTuple):
    """How the probes of a unit reach it: its own address, and any other."""

    fetch: Fetch
    net: Net


class Reach(UnitPools):
    """The same, with what probes of units and other servers need; its options are those of UnitPools."""

    def __init__(self, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        super().__init__(loop, **options)
        self._deadlines = Timers(loop)
        self._nets: dict[UnitState | None, UnitNet] = {}
        """By unit; that of None is for servers of no unit."""
        self._fetches: dict[UnitState, UnitFetch] = {}

    def probe_transport(self, state: UnitState) -> ProbeTransport:
        """How the probes of a unit reach it."""

        def received() -> None:
            state.answered_at, state.asked_at = self._loop.time(), math.inf

        self._stop_holding(state)
        fetch = UnitFetch(self.pool(state), self._loop, received, self._deadlines, state.unit.api_key)
        self._fetches[state] = fetch
        return ProbeTransport(fetch, self._net(state, received))

    def _stop_holding(self, state: UnitState) -> None:
        if (fetch := self._fetches.pop(state, None)) is not None:
            fetch.close()

    def net(self) -> Net:
        """Access to servers that belong to no unit."""
        return self._net(None, lambda: None)

    def _net(self, state: UnitState | None, received: Callable[[], None]) -> UnitNet:
        net = self._nets.get(state)
        if net is None:
            net = UnitNet(
                self._loop,
                received,
                connect_timeout_s=self._connect_timeout_s,
                tls=self.tls,
                read_scheduler=self._read_scheduler,
                lookups=self.lookups,
                deadlines=self._deadlines,
                on_gate_fault=self._on_gate_fault,
            )
            self._nets[state] = net
        return net

    def leave(self, state: UnitState) -> None:
        """The unit is no longer configured: keep no connection, but let replies in flight finish."""
        super().leave(state)
        self._stop_holding(state)
        if (net := self._nets.pop(state, None)) is not None:
            net.close()

    def purge(self, now: float) -> None:
        """Close connections that have been idle for too long, forget unused pools."""
        super().purge(now)
        for net in self._nets.values():
            net.purge(now)

    def close(self) -> None:
        """Close all that is idle or being opened."""
        super().close()
        for state in list(self._fetches):
            self._stop_holding(state)
        for net in self._nets.values():
            net.close()
        self._deadlines.close()
