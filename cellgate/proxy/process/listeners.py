"""Listening sockets: opened here, so that another process can inherit them, and closed without resets."""

from __future__ import annotations

import asyncio
import ctypes
import math
import socket
import ssl
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.config.settings import Address

BACKLOG = 4096
"""The length of the accept queue; a client that finds it full retries after 1 s, then 2 s. Usually the
kernel's own limit is as high (net.core.somaxconn).
"""
HANDSHAKE_S = 0.25
"""How long a handshake in progress may take."""
PAUSE_S = 0.1
"""The pause in accepting when there is no room for more clients."""
AT_ONCE = 64
"""The most clients that are accepted in one turn of the loop."""
_SO_ATTACH_FILTER = 26
# Classic BPF over the TCP header: byte 13 has the flags; a SYN is dropped, anything else passes.
_DROP_SYN = struct.pack("HBBI" * 4, 0x30, 0, 0, 13, 0x45, 0, 1, 0x02, 0x06, 0, 0, 0, 0x06, 0, 0, 0xFFFFFFFF)


def tls_options(tls: ssl.SSLContext | None) -> dict[str, Any]:
    """How the loop accepts clients: with TLS, if configured, and a timeout of the handshake."""
    return {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": LIMITS.tls_handshake_s}


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


class Entrance:
    """Accepts clients. `connection` creates the protocol of each.

    `has_room` returns for how many more clients there is room at a time; while there is none, clients wait in
    the accept queue.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: Callable[[], asyncio.Protocol]) -> None:
        self._loop = loop
        self._connection = connection
        self.has_room: Callable[[float], int] = lambda _now: AT_ONCE
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
        self,
        address: Address,
        listeners: Sequence[socket.socket],
        tls: ssl.SSLContext | None,
        backlog: int,
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
        task = self._loop.create_task(self._connect(sock))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _connect(self, sock: socket.socket) -> None:
        # It may have left meanwhile, or the TLS handshake failed.
        with suppress(OSError):
            await self._loop.connect_accepted_socket(self._connection, sock, **tls_options(self._tls))

    def _look_for_room(self) -> None:
        if self.has_room(self._loop.time()):
            self._resuming = self._loop.create_task(self._resume())
        else:
            self._pause = self._loop.call_later(PAUSE_S, self._look_for_room)

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
            await self._connect(sock)
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
