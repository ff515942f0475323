"""Listening sockets: opened here, so that another process can inherit them, and closed without resets.

In this order: `Entrance`, `Overflow`, `Descriptors`, `gate_name`.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import random
import re
import resource
import socket
import ssl
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.config.settings import Address, Settings
from cellgate.proxy.process.tcp_info import accept_queue

BACKLOG = 4096
"""The length of the accept queue; a client that finds it full retries after 1 s, then 2 s. Usually the
kernel's own limit is as high (net.core.somaxconn).
"""
HANDSHAKE_S = 0.25
"""How long a handshake in progress may take."""
PAUSE_S = 0.1
"""The pause in accepting when there is no room for more clients."""
WAITS_S = 0.5
"""Who waits for room gets some within this time, or is turned away."""
AT_ONCE = 64
"""The most clients that are accepted in one turn of the loop."""
_SO_ATTACH_FILTER = 26
# Classic BPF over the TCP header: byte 13 has the flags; a SYN is dropped, anything else passes.
_DROP_SYN = struct.pack("HBBI" * 4, 0x30, 0, 0, 13, 0x45, 0, 1, 0x02, 0x06, 0, 0, 0, 0x06, 0, 0, 0xFFFFFFFF)


async def listen(address: Address, backlog: int) -> list[socket.socket]:
    """A listener on each address of the host name. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    listeners: list[socket.socket] = []
    try:
        for family, kind, protocol, _, place in dict.fromkeys(found):
            listener = socket.socket(family, kind, protocol)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(place)
            listener.listen(backlog)
            listener.setblocking(False)
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def tls_options(tls: ssl.SSLContext | None) -> dict[str, Any]:
    """How the loop accepts clients: with TLS, if configured, and a timeout of the handshake."""
    return {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": LIMITS.tls_handshake_s}


class Entrance:
    """Accepts clients. `connection` creates the protocol of each.

    `has_room` returns for how many more clients there is room at a time; while there is none, clients wait in
    the accept queue, and those that `overflow` finds to have waited there for too long are turned away.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: Callable[[], asyncio.Protocol]) -> None:
        self._loop = loop
        self._connection = connection
        self.has_room: Callable[[float], int] = lambda _now: AT_ONCE
        self.overflow = Overflow()
        self._tls: ssl.SSLContext | None = None
        self._listeners: Sequence[socket.socket] = ()
        self._backlog = 0
        self._servers: list[asyncio.Server] = []
        self._port = 0
        self._pause: asyncio.TimerHandle | None = None
        self._resuming: asyncio.Task[None] | None = None
        self._is_looking = False
        self._arriving: set[asyncio.Task[Any]] = set()
        self.shut_at = math.inf
        """Since when no client is accepted for lack of room; infinity: clients are accepted."""

    async def open(
        self, address: Address, listeners: Sequence[socket.socket], tls: ssl.SSLContext | None, backlog: int
    ) -> None:
        """Accept on `listeners`, or, without any, at `address`. Raises OSError when it cannot be had."""
        self._listeners, self._tls, self._backlog = listeners, tls, backlog
        await self._accept()
        if not listeners:
            create = self._loop.create_server
            options = tls_options(tls)
            server = await create(self._connection, address.host, address.port, backlog=backlog, **options)
            self._servers.append(server)
        self._port = self._servers[0].sockets[0].getsockname()[1]

    @property
    def port(self) -> int:
        """The port listened on; 0: none."""
        return self._port

    def close(self) -> None:
        """Accept no more. Waiting clients are reset, unless another process has the listeners, too."""
        self._port = 0
        for pending in (self._pause, self._resuming):
            if pending is not None:
                pending.cancel()
        listeners, self._listeners = self._listeners, ()
        self._close_servers()
        for listener in listeners:
            listener.close()

    async def _accept(self) -> None:
        create = self._loop.create_server
        for listener in self._listeners:
            # A server closes its socket; waiting clients are reset only when the last copy is closed.
            sock = listener.dup()
            options = tls_options(self._tls)
            self._servers.append(await create(self._enter, sock=sock, backlog=self._backlog, **options))

    def _enter(self) -> asyncio.Protocol:
        """One more client is accepted; accept others that wait."""
        room = self._room() if self._pause is None else 0
        # Later, because this is called while the server accepts.
        if room > 1 and not self._is_looking:
            self._is_looking = True
            self._loop.call_soon(self._accept_others)
        elif not room:
            self._loop.call_soon(self._close_servers)
        return self._connection()

    def _room(self) -> int:
        """For how many more there is room; when there is none, it is checked again later."""
        room = self.has_room(now := self._loop.time())
        if not room:
            self.shut_at = now
            self._pause = self._loop.call_later(PAUSE_S, self._look_for_room)
        return room

    def _accept_others(self) -> None:
        """Accept several clients in one turn of the loop. The server accepts one in each turn, so with many
        clients or long turns each would wait for as many turns as there are clients before it.
        """
        self._is_looking = False
        for listener in self._listeners if self._pause is None else ():
            # No client waits, or none can be accepted: the server handles that.
            with suppress(OSError):
                for _ in range(AT_ONCE):
                    sock, _ = listener.accept()
                    self._welcome(sock)
                    if (room := self._room()) <= 1:
                        if not room:
                            self._close_servers()
                        return

    def _welcome(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        task = self._loop.create_task(self._connect(sock, self._connection))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _connect(self, sock: socket.socket, make: Callable[[], asyncio.Protocol]) -> bool:
        # It may have left meanwhile, or the TLS handshake failed.
        with suppress(OSError):
            await self._loop.connect_accepted_socket(make, sock, **tls_options(self._tls))
            return True
        return False

    def _look_for_room(self) -> None:
        now = self._loop.time()
        if self.has_room(now):
            self._resuming = self._loop.create_task(self._resume())
        else:
            self._pause = self._loop.call_later(PAUSE_S, self._look_for_room)
            if self.overflow.is_due(now, any(accept_queue(each) for each in self._listeners)):
                self._refuse_new()

    def _refuse_new(self) -> None:
        """Answer those that wait that there is no room, as many at a time as there are places for them."""
        overflow = self.overflow
        for listener in self._listeners:
            with suppress(OSError):
                while overflow.places > 0:
                    sock, _ = listener.accept()
                    sock.setblocking(False)
                    overflow.places -= 1
                    task = self._loop.create_task(self._connect_briefly(sock))
                    self._arriving.add(task)
                    task.add_done_callback(self._arriving.discard)

    async def _connect_briefly(self, sock: socket.socket) -> None:
        gone = [self._gone]

        def leave() -> None:
            # Once, whatever ends it: a handshake that fails, or the connection.
            if gone:
                gone.pop()()

        client = self.overflow.connection(leave)
        if not await self._connect(sock, lambda: client):
            leave()

    def _gone(self) -> None:
        """One of them has left: the next one that waits may have its place."""
        self.overflow.places += 1
        if self._listeners and self.overflow.is_still_due(self._loop.time()):
            self._refuse_new()

    async def _resume(self) -> None:
        try:
            await self._accept()
            self._pause = None
            self.shut_at = math.inf
        except OSError:
            self._close_servers()
            self._pause = self._loop.call_later(PAUSE_S, self._look_for_room)

    def _close_servers(self) -> None:
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()

    async def close_politely(self) -> None:
        """Accept all waiting clients, then close: none is reset, and later ones are refused."""
        if self._listeners:
            _let_nobody_in(self._listeners)
            # Handshakes in progress may end.
            await asyncio.sleep(HANDSHAKE_S)
        for sock in _waiting(self._listeners):
            sock.setblocking(False)
            await self._connect(sock, self._connection)
        await asyncio.gather(*self._arriving)
        self.close()


def _let_nobody_in(listeners: Sequence[socket.socket]) -> None:
    """Drop new SYNs: the client retries after a second, and is refused then."""
    program = ctypes.create_string_buffer(_DROP_SYN, len(_DROP_SYN))
    option = struct.pack("HxxxxxxP", len(_DROP_SYN) // 8, ctypes.addressof(program))
    for listener in listeners:
        # Without such filters a client may be reset in the microseconds before the close.
        with suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)


def _waiting(listeners: Sequence[socket.socket]) -> Iterator[socket.socket]:
    """Accept the clients in the queues."""
    for listener in listeners:
        with suppress(OSError):
            while True:
                yield listener.accept()[0]


class Overflow:
    """When clients in the accept queue are turned away, and how many at a time: there are `places`.

    Each needs a descriptor for a moment. A wave that is over soon only waits.
    """

    def __init__(self) -> None:
        self.places = 0
        self.connection: Callable[[Callable[[], None]], asyncio.Protocol] = lambda _gone: asyncio.Protocol()
        """The protocol of one, which calls this once it has left."""
        self._since = self._seen_at = -math.inf

    def is_due(self, now: float, waits: bool) -> bool:
        """Called at each look without room. `waits`: somebody is in the queue."""
        if not waits or now - self._seen_at > 2.0 * PAUSE_S:
            self._since = now
        self._seen_at = now
        return now - self._since >= WAITS_S

    def is_still_due(self, now: float) -> bool:
        """Whether it was due at the last look, and that was just now."""
        return now - self._seen_at <= 2.0 * PAUSE_S and self._seen_at - self._since >= WAITS_S


# File descriptors: the limit of this process, whether it is enough, and admission while they run short.
#
# While they run short, idle connections are closed for new clients. When there are none, a client is better
# refused than accepted and not served, or dropped by the system. So accepting pauses while enough descriptors
# are left for the work in flight: streams continue, probes run, the admin port answers. Some of those that
# are kept are for telling who waits that there is no room.


OWN = 64
"""Used by a process without clients: listeners, probes of a few units, the admin port."""
FOR_A_WORKER = 2
"""For each worker a socket to the supervisor, or to the control process; and another one during a
replacement."""
FOR_A_REQUEST = 2
"""A connection to the client, and one to the unit."""
KEPT_PART = 16
"""One in this many is reserved for work in flight; but at least `KEPT_LEAST`."""
KEPT_LEAST = 8
TURNED_PART = 4
"""Of those kept, one in this many is for clients that are turned away."""
LISTENER_FRESH_S = 0.5
"""After this time a new client has its connection to a unit, or needs none yet."""
EPISODE_S = 60.0
"""A shortage this soon after another one has the same reason, and is not logged again."""

_ANY_NUMBER = 1 << 30
_HOW = "LimitNOFILE= under systemd, or --ulimit nofile= with docker"


def allowed() -> int | None:
    """The limit of this process; None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def in_use() -> int:
    """How many are in use."""
    return len(os.listdir("/proc/self/fd"))


def check(workers: int) -> None:
    """Raises ConfigError, in one line, when `workers` need more descriptors than are allowed."""
    most = allowed()
    needed = OWN + (FOR_A_WORKER * workers if workers > 1 else 0)
    if most is not None and needed > most:
        room = max(1, (most - OWN) // FOR_A_WORKER)
        fit = f" (enough for {room})" if workers > 1 else ""
        need = f"workers: {workers} requires {needed} file descriptors, and the limit is {most}{fit}"
        raise ConfigError([f"{need}; {how()}"])


def shortage(settings: Settings) -> str:
    """A warning at start when units take more requests than there are descriptors for; else empty."""
    most, wanted = allowed(), sum(unit.max_in_flight for unit in settings.fleet.units)
    room = ((most or 0) - OWN) // FOR_A_REQUEST * settings.workers
    if most is None or room >= wanted:
        return ""
    each = " each" if settings.workers > 1 else ""
    return (
        f"{most} file descriptors{each} are enough for about {max(room, 0)} requests at a time, but the "
        f"units take {wanted} (max_in_flight); further clients get 503; {how()}"
    )


def how() -> str:
    """How an operator raises the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "no limit" if hard == resource.RLIM_INFINITY else str(hard)
    return f"raise it with `ulimit -n` (up to {most} without privileges), {_HOW}"


class Descriptors:
    """Decides how many clients are accepted. `tell` is called for a shortage. `make_room` closes at most so
    many idle connections, and returns how many it closed. `unopened` is how many clients may be about to have
    another one opened, to a unit.

    Counting takes a while (0.1 ms for a thousand), so it is repeated only after half of the remaining ones
    may have been used.
    """

    def __init__(
        self,
        most: int | None,
        tell: Callable[[str], None],
        make_room: Callable[[int], int],
        count: Callable[[], int] = in_use,
        unopened: Callable[[], int] = lambda: 0,
    ) -> None:
        self._most = most
        self._unopened = unopened
        self._kept = max(KEPT_LEAST, most // KEPT_PART) if most is not None else 0
        self._tell = tell
        self._make_room = make_room
        self._count = count
        self._credit = 0
        self._fresh = 0
        self._fresh_since = 0.0
        self._short_at = -EPISODE_S

    @property
    def for_turned_away(self) -> int:
        """How many clients may be turned away at a time."""
        return self._kept // TURNED_PART

    def has_room(self, now: float) -> int:
        """How many more clients may be accepted at once; called for each new client."""
        if self._most is None:
            return _ANY_NUMBER
        if now - self._fresh_since > LISTENER_FRESH_S:
            self._fresh, self._fresh_since = 0, now
        self._fresh += 1
        self._credit -= 1
        if self._credit >= 0:
            return 1 + self._credit
        used = self._count()
        # Each recent client may be about to open another one; where the gate lags, so may all whose requests
        # have not begun.
        to_come = max(min(self._fresh, used), self._unopened())
        left = self._most - self._kept - used - to_come
        self._credit = left // (2 * FOR_A_REQUEST)
        if left >= 0:
            return 1 + self._credit
        # These are free with the next turn of the loop; until then the reserve is used.
        freed = self._make_room(max(FOR_A_REQUEST, self._kept // 2))
        self._credit = freed // FOR_A_REQUEST
        if now - self._short_at >= EPISODE_S:
            self._tell(
                f"{used} of {self._most} file descriptors are in use, and clients that are here may need "
                f"{to_come} more: connections without a request are closed for new ones, and while there are "
                "none to close clients get 503"
            )
        self._short_at = now
        # Accept one, and read from it first, or it would be the next idle one to be closed.
        return min(freed, 1)


# The name of this gate among others, and the address under which they reach it.


_WILDCARDS = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}
"""Wildcard hosts, each with a remote host of the same family: the route to it shows the address of this
machine that others can reach."""


def gate_name() -> str:
    """A new name for each process, so that a restarted gate does not take old reports for its own."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:80].lstrip(".-") or "gate"
    return f"{host}-{os.getpid()}-{random.getrandbits(32):08x}"


def own_url(settings: Settings, port: int) -> str:
    """The configured URL, or that of the listen address; empty when it cannot be determined."""
    if settings.advertise:
        return settings.advertise
    host = settings.listen.host
    host = _outward(host) if host in _WILDCARDS else host
    scheme = "https" if settings.tls.cert else "http"
    return f"{scheme}://{Address(host, port)}" if host else ""


def _outward(host: str) -> str:
    """This machine's address on its way out. Nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect((_WILDCARDS[host], 9))
        return str(way.getsockname()[0])
    return ""
