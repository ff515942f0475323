"""Where the workers of a gate reach each other: a client may come back at another one than has its stream."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Self

from cellgate.proxy.reconnect.other_worker import LOOPBACK
from cellgate.proxy.reconnect.reconnects import Reconnects


class Neighbours:
    """A listener on this machine for each worker, opened before they are started; none where no stream is
    kept.
    """

    def __init__(self, listeners: tuple[socket.socket, ...] = ()) -> None:
        self._listeners = listeners
        self._own: socket.socket | None = None
        self._server: asyncio.Server | None = None

    @classmethod
    def of(cls, workers: int) -> Self:
        """For so many workers. Raises OSError."""
        listeners = tuple(socket.create_server((LOOPBACK, 0)) for _ in range(workers))
        for listener in listeners:
            listener.setblocking(False)
        return cls(listeners)

    def introduce(self, reconnects: Reconnects, number: int) -> None:
        """This is the process of the worker of this number: tell its streams where the others are."""
        reconnects.place = number
        reconnects.ports = tuple(listener.getsockname()[1] for listener in self._listeners)
        for other, listener in enumerate(self._listeners):
            if other == number:
                self._own = listener
            else:
                listener.close()

    async def accept(self, connection: Callable[[], asyncio.Protocol]) -> None:
        """Accept what other workers pass on. Raises OSError."""
        if self._own is not None:
            self._server = await asyncio.get_running_loop().create_server(connection, sock=self._own)

    def close(self) -> None:
        """They are of no use any more in this process."""
        if self._server is not None:
            self._server.close()
        for listener in self._listeners:
            listener.close()
