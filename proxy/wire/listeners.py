"""Listening sockets: opened by us, so that another process can have them as well, and closed politely."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import ssl
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from proxy.settings import Address

HANDSHAKE_S = 0.25
"""How long a handshake that has begun may take to end."""
_SO_ATTACH_FILTER = 26
# Classic BPF over the TCP header: byte 13 has the flags; a SYN is dropped, all else is let through.
_DROP_SYN = struct.pack("HBBI" * 4, 0x30, 0, 0, 13, 0x45, 0, 1, 0x02, 0x06, 0, 0, 0, 0x06, 0, 0, 0xFFFFFFFF)


async def listen(address: Address, backlog: int) -> list[socket.socket]:
    """A listener on each address that the host's name stands for. Raises OSError."""
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
    """Where clients come in. `connection` makes the protocol of each."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: Callable[[], asyncio.Protocol]) -> None:
        self._loop = loop
        self._connection = connection
        self._tls: ssl.SSLContext | None = None
        self._listeners: Sequence[socket.socket] = ()
        self._servers: list[asyncio.Server] = []

    async def open(
        self,
        address: Address,
        listeners: Sequence[socket.socket],
        tls: ssl.SSLContext | None,
        backlog: int,
    ) -> None:
        """Accept on `listeners`, or, without any, at `address`. Raises OSError when it cannot be had."""
        self._listeners, self._tls = listeners, tls
        create = self._loop.create_server
        for listener in listeners:
            self._servers.append(await create(self._connection, sock=listener, ssl=tls, backlog=backlog))
        if not listeners:
            server = await create(self._connection, address.host, address.port, ssl=tls, backlog=backlog)
            self._servers.append(server)

    @property
    def port(self) -> int:
        """The port listened on; 0: none."""
        port: int = self._servers[0].sockets[0].getsockname()[1] if self._servers else 0
        return port

    def close(self) -> None:
        """Accept no more. Whoever waits is reset, unless another process has the listeners, too."""
        servers, self._servers, self._listeners = self._servers, [], ()
        for server in servers:
            server.close()

    async def close_politely(self) -> None:
        """Accept all who have come, then close: nobody is reset, and who comes later is refused."""
        if self._listeners:
            _let_nobody_in(self._listeners)
            # Who is in the middle of the handshake may end it.
            await asyncio.sleep(HANDSHAKE_S)
        for sock in _waiting(self._listeners):
            sock.setblocking(False)
            with suppress(OSError):
                await self._loop.connect_accepted_socket(self._connection, sock, ssl=self._tls)
        self.close()


def _let_nobody_in(listeners: Sequence[socket.socket]) -> None:
    """Ignore who begins to connect: it tries again after a second, and is refused then."""
    program = ctypes.create_string_buffer(_DROP_SYN, len(_DROP_SYN))
    option = struct.pack("HxxxxxxP", len(_DROP_SYN) // 8, ctypes.addressof(program))
    for listener in listeners:
        # Where the system has no such filters, the microseconds before the close remain.
        with suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)


def _waiting(listeners: Sequence[socket.socket]) -> Iterator[socket.socket]:
    """Accept who waits in the queues."""
    for listener in listeners:
        with suppress(OSError):
            while True:
                yield listener.accept()[0]
