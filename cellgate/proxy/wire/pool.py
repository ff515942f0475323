"""Connections to one unit: kept alive for reuse, a new one is opened when none is idle.

The name of the unit is resolved on every new connection. The youngest idle connection is taken first, and
none that has been idle longer than the engines keep theirs (vLLM and SGLang close after 5 s).
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.proxy.wire.rota import ReadScheduler
from cellgate.proxy.wire.upstream import UnitConnection

IDLE_S = 4.0
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


class Taker(Protocol):
    """Wants a connection. Exactly one of the two is called, once, unless the taker cancels."""

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
        self._tls = tls if parts.scheme == "https" else None
        self._loop = loop
        self.read_scheduler = read_scheduler or ReadScheduler(loop.call_soon, LIMITS.reply_bytes_per_turn)
        self._connect_timeout_s = connect_timeout_s
        self._idle: deque[UnitConnection] = deque()
        self._connecting: dict[asyncio.Task[UnitConnection], Taker | None] = {}
        self.connections: dict[UnitConnection, int] = {}
        # Connections, one after the other, that were closed soon after their first reply; each connection has
        # their number when it was opened. And how many were not kept for that.
        self._one_offs = self._spent = 0
        self.closed_for_good = False
        self.closes_after_stream = False
        """The unit ends a connection with a streamed reply, whatever the head of that says."""

    def take(self, taker: Taker, *, fresh: bool = False) -> None:
        """Give `taker` a connection: at once when one is idle (and `fresh` is not asked for), else later."""
        now = self._loop.time()
        while self._idle and not fresh:
            conn = self._idle.pop()
            if conn.usable and now - conn.idle_since < IDLE_S:
                conn.reused = True
                taker.on_connected(conn)
                return
            conn.drop()
        task = self._loop.create_task(self._connect())
        self._connecting[task] = taker
        task.add_done_callback(self._settled)

    def cancel(self, taker: Taker) -> None:
        """The taker no longer wants its connection; what is being opened is kept for the next."""
        for task, waiting in self._connecting.items():
            if waiting is taker:
                self._connecting[task] = None

    def give_back(self, conn: UnitConnection) -> None:
        """Keep a connection that is fit for another request."""
        is_spent = self.closes_after_stream and conn.reply.is_chunked
        if self._one_offs:
            is_spent = self._is_spent(conn) or is_spent
        if self.closed_for_good or is_spent or not conn.usable:
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
        while self._idle and (now is None or now - self._idle[0].idle_since >= IDLE_S):
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
                return (await self._loop.create_connection(factory, self.host, self.port, ssl=tls))[1]
        except TimeoutError:
            if self._loop.time() > deadline + LATE_S:
                raise GateStalledError from None
            raise

    async def _connect(self) -> UnitConnection:
        conn = await self.open(lambda: UnitConnection(self))
        # Counted only now: connection_lost is never called for a connect that was cancelled.
        if conn.usable:
            self.connections[conn] = self._one_offs
        return conn

    def _settled(self, task: asyncio.Task[UnitConnection]) -> None:
        taker = self._connecting.pop(task)
        try:
            self._tell(task, taker)
        except Exception as error:
            self.report(error)
            if taker is not None:
                taker.on_failed(Failure(FailureKind.INTERNAL, f"the gate failed on a connection: {error!r}"))

    def _tell(self, task: asyncio.Task[UnitConnection], taker: Taker | None) -> None:
        if task.cancelled():
            failure: Failure | None = Failure(
                FailureKind.EVICTED, "the unit was taken out of the configuration"
            )
        else:
            error = task.exception()
            failure = connect_failure(error, f"{self.host}:{self.port}")
            if failure is not None and failure.kind is FailureKind.INTERNAL and isinstance(error, Exception):
                self.report(error)
        if failure is not None:
            if failure.kind is FailureKind.NO_RESOURCES:
                self._on_gate_fault(failure.message)
            if taker is not None:
                taker.on_failed(failure)
        elif taker is None:
            self.give_back(task.result())
        else:
            # A connection that was closed meanwhile fails when it is used.
            taker.on_connected(task.result())


def connect_failure(error: BaseException | None, where: str) -> Failure | None:
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
            return Failure(
                FailureKind.NO_RESOURCES, f"the name in {where} cannot be resolved: {error.strerror}"
            )
        case ssl.SSLError():
            return Failure(FailureKind.UNREACHABLE, f"TLS with {where} failed: {error}")
        case OSError() if error.errno in _OWN_ERRNOS:
            return Failure(FailureKind.NO_RESOURCES, f"the gate cannot open a connection: {error.strerror}")
        case OSError():
            return Failure(FailureKind.UNREACHABLE, f"{where} cannot be reached: {error.strerror or error}")
        case _:
            return Failure(FailureKind.INTERNAL, f"connecting to {where} failed: {error!r}")
