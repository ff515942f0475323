"""The unit's side: one connection to a unit, and what its bytes mean.

Rules:
1. Bytes are parsed (reply.py) before they are used: nothing of a malformed read is passed on, and its
   connection is closed. The common read of a stream, exactly one chunk, is recognised by its size line and
   does not need the parser; nor do several such chunks (`chunks_of_tokens`).
2. A connection is reused only after a reply that ended cleanly and said keep-alive.
3. A large read is parsed in its turn (see turns.py), and nothing more is read before that. It also waits
   while the client is paused.

In this order: `UnitConnection`, `chunks_of_tokens`, `Pool`, `UnitPools`.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar, cast
from urllib.parse import urlsplit

from cellgate.probes.engines import CLOSING
from cellgate.probes.readiness import VIA_GATE, name_there
from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.config.settings import gates_token, is_address
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.heads import TOKEN_FIELD, UNIT_FIELD
from cellgate.proxy.http.names import Lookups
from cellgate.proxy.http.reply import ReplyReader, UsualReply
from cellgate.proxy.http.sse import ABORT
from cellgate.proxy.http.turns import PART_BYTES, PIECE_BYTES, ReadScheduler
from cellgate.proxy.process.tcp_info import took_all
from cellgate.router.nouns import Unit
from cellgate.router.unit_state import UnitState

EVENT_ENDS = (b"\n\n\r\n", b"\r\n\r\n\r\n")
"""How a chunk ends whose last event is complete."""

# How the chunk of a token begins, by the length of the whole chunk: its size line, and the event as an
# OpenAI-style engine writes it. Any other spelling, and any longer chunk, is left to the parser.
_TOKEN_STARTS = {len(b"%x\r\n\r\n" % size) + size: b'%x\r\ndata: {"id":' % size for size in range(1, 8192)}

_POOL_SIZE_LINE = len(b"1fff\r\n")
"""The longest size line of those."""

_TOKEN_END = b"\n\n\r\n"
_TOKEN_LINES = 4
"""Line ends in such a chunk: of its size line, of its event, which is one line of data, and of the chunk."""


class UnitConnection(asyncio.Protocol):
    """One connection to a unit, carrying one request at a time; `reply` is what has come of its reply.

    `raw` is set by the relaying response while the stream is between two chunks and two events; a reply that
    is like the `usual` one, if that is set, is not parsed: its sink is told once the connection is free.
    """

    __slots__ = (
        "_held",
        "_late",
        "_late_at",
        "_pool",
        "_taken",
        "idle_since",
        "raw",
        "reply",
        "reused",
        "sink",
        "transport",
        "usual",
    )

    def __init__(self, pool: ConnectionOwner) -> None:
        self._pool = pool
        self._held = self._taken = False
        # What was read, and from where on it has yet to be parsed.
        self._late = b""
        self._late_at = 0
        self.transport: asyncio.Transport | None = None
        self.sink: ReplySink | None = None
        self.reply = ReplyReader()
        self.raw: TokenSink | None = None
        self.usual: UsualReply | None = None
        self.reused = False
        self.idle_since = 0.0

    # -- use -----------------------------------------------------------------------------------------------

    def send(self, head: bytes, body: bytes, sink: ReplySink, *, to_head: bool) -> None:
        """Send one request; its reply goes to `sink`. `to_head` says that the method is HEAD."""
        self.sink = sink
        self.usual = None
        self.reply.expect(to_head=to_head)
        transport = self.transport
        if transport is None or transport.is_closing():
            self._fail(
                FailureKind.STALE_CONNECTION if self.reused else FailureKind.CLOSED_EARLY,
                "it closed the connection before the request",
            )
        elif len(body) < 16384:
            transport.write(head + body)
        else:
            transport.writelines((head, body))

    def send_again(self, head: bytes, usual: UsualReply, sink: UsualSink) -> None:
        """The same, of a GET to which this reply will probably come."""
        if (transport := self.transport) is None:
            self.send(head, b"", sink, to_head=False)
            return
        self.sink = sink
        self.usual = usual
        if self.reply.begun:
            self.reply.expect(to_head=False)
        transport.write(head)

    def drop(self) -> None:
        """Drop the reply and close the connection at once: the unit must stop working for it."""
        self._pool.forget(self)
        self._late = b""
        self.sink = self.raw = None
        if self.transport is not None:
            self.transport.abort()

    def discard(self) -> None:
        """Drop the reply, and keep the connection if the reply is complete."""
        if not self.reply.ended:
            self.drop()

    def pause(self) -> None:
        """Stop reading: the receiver is paused."""
        self._held = True
        self._update_reading()

    def resume(self) -> None:
        """Read on, once all that was read before is parsed."""
        self._held = False
        if self._late:
            self._pool.read_scheduler.join(self)
        self._update_reading()

    @property
    def usable(self) -> bool:
        """True when another request may be sent."""
        return self.transport is not None and not self.transport.is_closing()

    # -- the transport's callbacks -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's, so this cannot be asserted.
        transport = cast(asyncio.Transport, transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        raw = self.raw
        if raw is not None and data.endswith(raw.usual_ends) and ABORT not in data:
            size = len(data)
            try:
                if (
                    data.startswith(_TOKEN_STARTS.get(size, ()))
                    and data.find(b"\n", _POOL_SIZE_LINE) == size - 4
                ):
                    # The parser stands before this chunk, and would stand as well behind it. It is one event:
                    # another one in the same chunk might be an error.
                    raw.on_token(data)
                    return
                if self._may_be_tokens(size) and (chunks := chunks_of_tokens(data, raw.usual_ends)):
                    raw.on_tokens(data, chunks)
                    return
            except Exception as error:
                self._crash(error)
                return
        if (usual := self.usual) is not None:
            # Only the first read may be the whole of it.
            self.usual = None
            if usual.is_like(data) and self._repeat():
                return
        try:
            if len(data) > LIMITS.small_reply_bytes or self._late:
                self._put_aside(data)
            else:
                self._parse(data)
        except Exception as error:
            self._crash(error)

    def _may_be_tokens(self, size: int) -> bool:
        """Whether a read is looked at for whole chunks: a small one always, others as far as a turn allows.
        Hundreds of streams that flow as fast as they can bring 8 kB each in every turn.
        """
        return size <= LIMITS.small_reply_bytes or (
            size <= PART_BYTES and self._pool.read_scheduler.has_room(size)
        )

    def resume_parsing(self, size: int) -> tuple[int, bool]:
        """Parse so many bytes of what was read, or all that are one piece: what that cost in bytes (see
        turns.py), and whether there is more to be parsed. Never raises.
        """
        if self._held or not self._late:
            return 0, False
        late, at = self._late, self._late_at
        is_sized = self.reply.has_head and self.reply.length is not None
        end = len(late) if is_sized else at + size
        part = late[at:end]
        self._late, self._late_at = (late, end) if end < len(late) else (b"", 0)
        pieces: list[bytes] = []
        try:
            pieces = self._parse(part)
        except Exception as error:
            self._crash(error)
        if not self._late:
            self._update_reading()
        return len(part) + PIECE_BYTES * len(pieces), bool(self._late)

    def _parse(self, data: bytes) -> list[bytes]:
        """Parse a read, and pass it on; the pieces in which the body in it came."""
        sink = self.sink
        if sink is None:
            # There was no request: the connection cannot be trusted with one.
            self.drop()
            return []
        reply = self.reply
        pieces = reply.feed(data)
        if reply.misbehaved:
            self._fail(FailureKind.GARBAGE, reply.misbehaved)
        else:
            sink.on_read(data, pieces, self)
            if reply.ended:
                self._release()
        return pieces

    def eof_received(self) -> bool:
        if self.reused and not self.reply.begun and self.sink is not None and self.transport is not None:
            # Distinguish a stale connection from a unit that died of the request.
            self._taken = took_all(self.transport)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        transport, self.transport = self.transport, None
        if self._late:
            self._parse_late()
        reply = self.reply
        reply.close()
        waited = self.sink is not None and not reply.ended
        ends_by_close = waited and exc is None and reply.is_ended_by_close()
        is_stale = waited and self.reused and not reply.begun
        if is_stale and exc is not None and transport is not None:
            self._taken = took_all(transport)
        unused = is_stale and not self._taken
        try:
            self._pool.closed(self, broken=waited and not unused and not ends_by_close, unused=unused)
        except Exception as error:
            # The receiver of the reply must learn of the failure all the same.
            self._pool.report(error)
        if not waited:
            return
        if ends_by_close:
            sink, self.sink, self.raw = self.sink, None, None
            assert sink is not None
            try:
                sink.on_read(b"", [], self)
            except Exception as error:
                self.sink = sink
                self._crash(error)
            return
        if is_stale:
            self._fail(FailureKind.STALE_CONNECTION, "it closed the kept-alive connection before its reply")
        else:
            where = "in the middle of" if reply.has_head else "before"
            self._fail(FailureKind.CLOSED_EARLY, f"it closed the connection {where} its reply")

    def pause_writing(self) -> None:
        """Requests are held whole in memory either way: nothing to pause."""

    def resume_writing(self) -> None:
        """See `pause_writing`."""

    # -- inside --------------------------------------------------------------------------------------------

    def _put_aside(self, data: bytes) -> None:
        if not self._late:
            self._late_at = 0
        self._late += data
        is_first = self.reply.is_before_body and len(self._late) <= PART_BYTES
        self._pool.read_scheduler.join(self, is_first=is_first)
        if self._late:
            self._update_reading()

    def _parse_late(self) -> None:
        """The connection is gone: what it has brought still counts, even if its client cannot take it."""
        late, self._late = self._late[self._late_at :], b""
        try:
            self._parse(late)
        except Exception as error:
            self._crash(error)

    def _repeat(self) -> bool:
        """The first read is the usual reply; False: nobody has asked."""
        if (sink := self.sink) is None or self.reply.begun:
            return False
        self.sink = None
        try:
            self._pool.give_back(self)
            cast(UsualSink, sink).on_usual()
        except Exception as error:
            self._crash(error)
        return True

    def _update_reading(self) -> None:
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self._held or self._late:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def _crash(self, error: Exception) -> None:
        # An exception that leaves the callback would close the transport without an answer to the client.
        self._pool.report(error)
        self._fail(FailureKind.INTERNAL, f"the gate failed on its reply: {error!r}")

    def _release(self) -> None:
        if self._late:
            # There are bytes after the end of the reply: this connection must not get another request.
            self.drop()
            return
        self.sink = self.raw = None
        if self.reply.keep_alive:
            if self._held:
                # The last read may have filled its client's buffer; the next one has nothing to do with it.
                self.resume()
            self._pool.give_back(self)
        elif self.transport is not None:
            self.transport.close()

    def _fail(self, kind: FailureKind, reason: str) -> None:
        sink, self.sink, self.raw = self.sink, None, None
        self._late = b""
        if self.transport is not None:
            self.transport.abort()
        if sink is not None:
            sink.on_failed(Failure(kind, reason, taken=self._taken))


class ReplySink(Protocol):
    """Receives a reply. Every method is called synchronously from the transport's callbacks."""

    def on_read(self, data: bytes, pieces: list[bytes], conn: UnitConnection) -> None:
        """A parsed read: raw `data`, and the body `pieces` in it; `conn.reply` has the state of the reply."""

    def on_failed(self, failure: Failure) -> None:
        """The reply failed; the connection is closed."""


class UsualSink(ReplySink, Protocol):
    """Receives a reply that is probably like the last one."""

    def on_usual(self) -> None:
        """It is; its connection has been given back."""


class TokenSink(Protocol):
    """Receives the chunks of a stream unchanged."""

    @property
    def usual_ends(self) -> tuple[bytes, ...]:
        """Only those that end in one of these come here; the others are read first."""

    def on_token(self, chunk: bytes) -> None:
        """One whole chunk that holds the event of a token and ends it."""

    def on_tokens(self, data: bytes, chunks: list[bytes]) -> None:
        """A read that is several such chunks."""


def chunks_of_tokens(data: bytes, ends: tuple[bytes, ...]) -> list[bytes]:
    """The chunks of a read that ends in one of `ends`, without ABORT, if each of them by itself is one that
    `data_received` recognises; else none.
    """
    chunks = [event + _TOKEN_END for event in data.split(_TOKEN_END)[:-1]]
    if data.count(b"\n") != _TOKEN_LINES * len(chunks):
        return []
    for chunk in chunks:
        if not (chunk.startswith(_TOKEN_STARTS.get(len(chunk), ())) and chunk.endswith(ends)):
            return []
    return chunks


class ConnectionOwner(Protocol):
    """Where connections come from and go back to: a pool, or who holds one (see held.py)."""

    read_scheduler: ReadScheduler

    def give_back(self, conn: UnitConnection) -> None: ...
    def forget(self, conn: UnitConnection) -> None: ...
    def closed(self, conn: UnitConnection, *, broken: bool, unused: bool) -> None: ...
    def report(self, error: Exception) -> None: ...


# Connections to one unit: kept alive for reuse, a new one is opened when none is idle.
#
# The name of the unit is resolved on every new connection. The youngest idle connection is taken first, and
# none that has been idle longer than the engines keep theirs (vLLM and SGLang close after 5 s).


POOL_IDLE_S = 4.0
EARLY_S = 1.5
"""No engine closes a connection for having been idle for less than this."""
SOON_S = 0.1
ONE_OFFS = 3
"""A unit that has closed so many connections in a row this soon after their first reply keeps none."""
KEPT_EACH = 64
"""Of the connections to such a unit one in so many is kept nevertheless: it may have changed."""
LATE_S = 0.1
"""A timeout that fires this late shows that the gate's event loop was blocked. The unit may have answered in
time, so nothing is proven against it."""
_OWN_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})

P = TypeVar("P", bound=asyncio.Protocol)
MakeTls = Callable[[], ssl.SSLContext]
"""The TLS context for the next connection to an https unit; created on first use, as most gates have none."""


class ConnectionWaiter(Protocol):
    """Wants a connection. Exactly one of the two is called, once, unless the waiter cancels."""

    def on_connected(self, conn: UnitConnection) -> None: ...
    def on_failed(self, failure: Failure) -> None: ...


class GateStalledError(Exception):
    """The gate's event loop was blocked while it should have connected."""


class Pool:
    """The connections of the gate to one unit; `unix_path`: at a Unix socket. Pools of several share a
    `read_scheduler`, or each has its own.

    `on_broken` is called when the unit closes a connection unexpectedly, `on_gate_fault` with a reason when
    the gate itself could not open one.
    """

    def __init__(
        self,
        url: str,
        loop: asyncio.AbstractEventLoop,
        *,
        connect_timeout_s: float,
        tls: MakeTls | None,
        unix_path: str | None = None,
        read_scheduler: ReadScheduler | None = None,
        lookups: Lookups | None = None,
        on_broken: Callable[[], None] = lambda: None,
        on_gate_fault: Callable[[str], None] = lambda _: None,
    ) -> None:
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.authority = parts.netloc.encode()
        self.lines = b"host: %b\r\n" % self.authority
        """What the head of each request to the unit begins with."""
        self._on_broken = on_broken
        self._on_gate_fault = on_gate_fault
        self._unix_path = unix_path
        self.lookups = lookups or Lookups(loop)
        self._is_named = unix_path is None and not is_address(self.host)
        self._tls = tls if parts.scheme == "https" else None
        self._loop = loop
        self.read_scheduler = read_scheduler or ReadScheduler(loop.call_soon, LIMITS.reply_bytes_per_turn)
        self._connect_timeout_s = connect_timeout_s
        self._idle: deque[UnitConnection] = deque()
        self._connecting: dict[asyncio.Task[UnitConnection], ConnectionWaiter | None] = {}
        self.connections: dict[UnitConnection, int] = {}
        # Connections, one after the other, that were closed soon after their first reply; each connection has
        # their number when it was opened. And how many were not kept for that.
        self._one_offs = self._spent = 0
        self.closed_for_good = False
        self.closes_after_stream = False
        """The unit ends a connection with a streamed reply, whatever the head of that says."""
        self.certificate_end: float | None = None
        """When the certificate that was shown last ends, in seconds since 1970."""

    def take(self, waiter: ConnectionWaiter, *, fresh: bool = False) -> None:
        """Give `waiter` a connection: at once when one is idle (and `fresh` is not asked for), else later."""
        if not fresh and (conn := self.take_idle(self._loop.time())) is not None:
            waiter.on_connected(conn)
            return
        task = self._loop.create_task(self._connect())
        self._connecting[task] = waiter
        task.add_done_callback(self._settled)

    def take_idle(self, now: float) -> UnitConnection | None:
        """The youngest connection that is kept for reuse, for one request; None: there is none."""
        while self._idle:
            conn = self._idle.pop()
            transport = conn.transport
            if transport is not None and not transport.is_closing() and now - conn.idle_since < POOL_IDLE_S:
                conn.reused = True
                return conn
            conn.drop()
        return None

    def cancel(self, waiter: ConnectionWaiter) -> None:
        """The waiter no longer wants its connection; what is being opened is kept for the next."""
        for task, waiting in self._connecting.items():
            if waiting is waiter:
                self._connecting[task] = None

    def give_back(self, conn: UnitConnection) -> None:
        """Keep a connection that is fit for another request."""
        is_spent = self.closes_after_stream and conn.reply.is_chunked
        if self._one_offs:
            is_spent = self._is_spent(conn) or is_spent
        transport = conn.transport
        if self.closed_for_good or is_spent or transport is None or transport.is_closing():
            conn.drop()
            return
        conn.idle_since = self._loop.time()
        self._idle.append(conn)

    def closed(self, conn: UnitConnection, *, broken: bool, unused: bool) -> None:
        """Note that a connection is gone.

        `broken`: the unit closed it during an exchange; `unused`: before it took the next one. A connection
        that is closed after a very short idle time was not closed for being idle: the unit's process may be
        gone.
        """
        was_idle, idle_s = conn in self._idle, self._loop.time() - conn.idle_since
        is_next = self.connections.get(conn) == self._one_offs
        self.forget(conn)
        if not was_idle and not unused and not broken:
            return
        is_second = conn.reused and not was_idle and not conn.reply.begun
        if idle_s < SOON_S and (is_second or (was_idle and not conn.reused)):
            # Others that were open before are closed by a process that ends.
            self._one_offs += is_next
            if self._one_offs > ONE_OFFS:
                return
        if broken or idle_s < EARLY_S:
            self._on_broken()

    def _is_spent(self, conn: UnitConnection) -> bool:
        """Whether the unit will close this connection, as it has those before."""
        if conn.reused:
            self._one_offs = 0
        if self._one_offs < ONE_OFFS:
            return False
        self._spent += 1
        return self._spent % KEPT_EACH != 0

    def forget(self, conn: UnitConnection) -> None:
        """Neither keep nor count a connection any more: it is gone, or about to be."""
        self.connections.pop(conn, None)
        if conn in self._idle:
            self._idle.remove(conn)

    def purge(self, now: float | None = None) -> None:
        """Close idle connections: all of them, or only those that are too old at `now`."""
        while self._idle and (now is None or now - self._idle[0].idle_since >= POOL_IDLE_S):
            self._idle.popleft().drop()

    def close(self) -> None:
        """Close what is idle and keep nothing from now on; replies in flight may finish."""
        self.closed_for_good = True
        self.purge()
        for task in list(self._connecting):
            task.cancel()

    def report(self, error: Exception) -> None:
        """Report a defect of the gate to the loop's exception handler."""
        where = f"{self.host}:{self.port}"
        self._loop.call_exception_handler(
            {"message": f"a reply of {where} could not be processed", "exception": error}
        )

    async def open(self, factory: Callable[[], P]) -> P:
        """A connection of another kind to the same place. Raises OSError, GateStalledError."""
        deadline = self._loop.time() + self._connect_timeout_s
        tls = self._tls() if self._tls is not None else None
        try:
            async with asyncio.timeout_at(deadline):
                if self._unix_path is not None:
                    return (await self._loop.create_unix_connection(factory, self._unix_path))[1]
                made = (await self._loop.create_connection(factory, self.host, self.port, ssl=tls))[1]
                if self._is_named:
                    self.lookups.found(self.host)
                return made
        except TimeoutError:
            if self._loop.time() > deadline + LATE_S:
                raise GateStalledError from None
            raise

    async def _connect(self) -> UnitConnection:
        conn = await self.open(lambda: UnitConnection(self))
        if self._tls is not None and conn.transport is not None:
            shown = conn.transport.get_extra_info("peercert") or {}
            self.certificate_end = ssl.cert_time_to_seconds(shown["notAfter"]) if shown else None
        # Counted only now: connection_lost is never called for a connect that was cancelled.
        if conn.usable:
            self.connections[conn] = self._one_offs
        return conn

    def _settled(self, task: asyncio.Task[UnitConnection]) -> None:
        waiter = self._connecting.pop(task)
        try:
            self._tell(task, waiter)
        except Exception as error:
            self.report(error)
            if waiter is not None:
                waiter.on_failed(Failure(FailureKind.INTERNAL, f"the gate failed on a connection: {error!r}"))

    def _tell(self, task: asyncio.Task[UnitConnection], waiter: ConnectionWaiter | None) -> None:
        if task.cancelled():
            failure: Failure | None = Failure(
                FailureKind.EVICTED, "the unit was taken out of the configuration"
            )
        else:
            error = task.exception()
            failure = connect_failure(error, f"{self.host}:{self.port}", self.lookups)
            if failure is not None and failure.kind is FailureKind.INTERNAL and isinstance(error, Exception):
                self.report(error)
        if failure is not None:
            if failure.kind is FailureKind.NO_RESOURCES:
                self._on_gate_fault(failure.message)
            if waiter is not None:
                waiter.on_failed(failure)
        elif waiter is None:
            self.give_back(task.result())
        else:
            # A connection that was closed meanwhile fails when it is used.
            waiter.on_connected(task.result())


def connect_failure(error: BaseException | None, where: str, lookups: Lookups) -> Failure | None:
    """The failure of a connection to `where` (HOST:PORT), by whose fault it is."""
    match error:
        case None:
            return None
        case ConnectionRefusedError():
            return Failure(FailureKind.REFUSED, f"connection refused by {where}")
        case TimeoutError():
            return Failure(FailureKind.CONNECT_TIMEOUT, f"no connection to {where} in time")
        case GateStalledError():
            return Failure(
                FailureKind.NO_RESOURCES, f"the gate's event loop was blocked while it connected to {where}"
            )
        case socket.gaierror():
            return lookups.failure(where.rpartition(":")[0], where, error)
        case ssl.SSLError():
            return Failure(FailureKind.UNREACHABLE, f"TLS with {where} failed: {error}")
        case OSError() if error.errno in _OWN_ERRNOS:
            return Failure(FailureKind.NO_RESOURCES, f"the gate cannot open a connection: {error.strerror}")
        case OSError():
            return Failure(FailureKind.UNREACHABLE, f"{where} cannot be reached: {error.strerror or error}")
        case _:
            return Failure(FailureKind.INTERNAL, f"connecting to {where} failed: {error!r}")


# The connections to all units: created when first needed, closed with the unit.


PURGE_S = 1.0
PURGED_AT_ONCE = 100
"""With more pools, some are looked at on each tick, each of them once in ..."""
PURGE_ROUND_TICKS = 240
"""... so many: none of these connections is used again, however long it stays."""


class UnitPools:
    """Pools by unit. `own_keys`: requests get the unit's own key, because those of clients end at the gate.
    `secret` gives that of the fleet: units of gates are named with what is made of it for that gate.

    `on_broken` is called with a unit that closed a connection unexpectedly, `on_gate_fault` with the reason
    why the gate could not open one.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        connect_timeout_s: float,
        tls: MakeTls | None,
        own_keys: bool,
        secret: Callable[[], bytes],
        on_broken: Callable[[UnitState], None],
        on_gate_fault: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._connect_timeout_s = connect_timeout_s
        self.tls = tls
        self._own_keys = own_keys
        self._secret = secret
        self._on_broken = on_broken
        self._on_gate_fault = on_gate_fault
        self._read_scheduler = ReadScheduler(loop.call_soon, LIMITS.reply_bytes_per_turn)
        self._purge_at = 0.0
        self.lookups = Lookups(loop)
        self._pools: dict[UnitState, Pool] = {}
        self._to_purge: list[UnitState] = []

    def pool(self, state: UnitState) -> Pool:
        """The connections to a unit's own address."""
        pool = self._pools.get(state)
        if pool is None:
            pool = Pool(
                state.unit.url,
                self._loop,
                connect_timeout_s=self._connect_timeout_s,
                tls=self.tls,
                read_scheduler=self._read_scheduler,
                lookups=self.lookups,
                on_broken=lambda: self._on_broken(state),
                on_gate_fault=self._on_gate_fault,
            )
            pool.lines = self._lines(pool, state.unit)
            self._pools[state] = pool
        # Which engine it is may be found out late, and change.
        pool.closes_after_stream = state.engine in CLOSING
        return pool

    def renew(self) -> None:
        """Units were configured again: their keys may be others."""
        for state, pool in self._pools.items():
            pool.lines = self._lines(pool, state.unit)

    def _lines(self, pool: Pool, unit: Unit) -> bytes:
        """What the head of each request to the unit begins with."""
        lines = b"host: %b\r\n" % pool.authority
        if unit.engine == VIA_GATE:
            lines += b"%b: %b\r\n" % (UNIT_FIELD, name_there(unit).encode())
            if secret := self._secret():
                lines += b"%b: %b\r\n" % (TOKEN_FIELD, gates_token(secret, unit.url).encode())
        if self._own_keys and unit.api_key:
            lines += b"authorization: Bearer %b\r\n" % unit.api_key.encode()
        return lines

    def certificate_ends(self) -> dict[str, float]:
        """By unit, when the certificate that it showed ends."""
        return {
            state.unit.name: pool.certificate_end
            for state, pool in self._pools.items()
            if pool.certificate_end is not None and not state.retired
        }

    def distrust(self, state: UnitState) -> None:
        """Close idle connections: their process is gone or cannot be trusted."""
        if state in self._pools:
            self._pools[state].purge()

    def leave(self, state: UnitState) -> None:
        """The unit is no longer configured: keep no connection, but let replies in flight finish."""
        if state in self._pools:
            self._pools[state].close()

    def tick(self, now: float) -> None:
        """Close connections that have been idle for too long, forget unused pools; once a second."""
        if len(self._pools) > PURGED_AT_ONCE:
            self._purge_some(now)
        elif now >= self._purge_at:
            self._purge_at = now + PURGE_S
            self.purge(now)

    def purge(self, now: float) -> None:
        """The same at once."""
        for state in list(self._pools):
            self._purge(state, now)

    def _purge_some(self, now: float) -> None:
        if not self._to_purge:
            self._to_purge = list(self._pools)
        share = len(self._pools) // PURGE_ROUND_TICKS + 1
        for state in self._to_purge[-share:]:
            self._purge(state, now)
        del self._to_purge[-share:]

    def _purge(self, state: UnitState, now: float) -> None:
        if (pool := self._pools.get(state)) is not None:
            pool.purge(now)
            if state.retired and not state.leases:
                del self._pools[state]

    def close(self) -> None:
        """Close all that is idle or being opened."""
        self.lookups.close()
        for pool in self._pools.values():
            pool.close()

    def __len__(self) -> int:
        """How many connections are open to the units' own addresses."""
        return sum(len(pool.connections) for pool in self._pools.values())
