"""One end of the socket between a worker and the control process: messages are collected and sent together.

1. Urgent messages (`send`) are sent at the end of this turn of the loop; others (`later`) with the next
   urgent one, or after a few milliseconds.
2. Messages arrive in the order in which they were given.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from cellgate.proxy.logs.log import log_line
from cellgate.proxy.workers.protocol import Frames, Message, framed

LAZY_S = 0.005
"""The longest delay of a message that is not urgent, such as a released lease."""


class Link(asyncio.Protocol):
    """Calls `heard` with each message, and `lost` once when the other end is gone."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        heard: Callable[[Message], None],
        lost: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._heard = heard
        self._lost = lost
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._out: list[Message] = []
        self._early: list[bytes] = []
        """Frames for when there is a connection."""
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None
        self.closed = False

    def send(self, message: Message) -> None:
        """Send a message at the end of this turn of the loop."""
        self._out.append(message)
        if self._soon is None:
            self._soon = self._loop.call_soon(self._flush)

    def later(self, message: Message) -> None:
        """Send a message within `LATER_S`."""
        self._out.append(message)
        if self._later is None and self._soon is None:
            self._later = self._loop.call_later(LAZY_S, self._flush)

    async def connect(self, sock: socket.socket) -> None:
        """Connect to the other end through `sock`."""
        await self._loop.create_unix_connection(lambda: self, sock=sock)

    def write(self, frame: bytes) -> None:
        """Send an encoded frame after all pending messages."""
        if self._transport is None:
            self._early += (framed(self._out), frame)
            self._out = []
            return
        self._flush()
        if not self._transport.is_closing():
            self._transport.write(frame)

    def close(self) -> None:
        """Send pending messages, and close."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        if self._later is not None:
            self._later.cancel()
        if self._soon is not None:
            self._soon.cancel()
        self._soon = self._later = None
        if self._transport is not None and self._out:
            out, self._out = self._out, []
            if not self._transport.is_closing():
                self._transport.write(framed(out))

    # -- the transport's callbacks -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.writelines(self._early)
        self._early.clear()
        self._flush()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._heard(message)
        except Exception as error:
            # After an invalid frame the rest cannot be decoded: treat the other end as lost.
            self._loop.call_exception_handler(
                {"message": "workers: a message could not be handled", "exception": error}
            )
            log_line(
                "error", f"workers: a message could not be handled ({error!r}); the connection is closed"
            )
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, _exc: Exception | None) -> None:
        self.closed = True
        self._transport = None
        for handle in (self._soon, self._later):
            if handle is not None:
                handle.cancel()
        self._lost()
