"""A client that comes while the gate has no room for one more: it is told so when it asks, and closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

REFUSAL_STAYS_S = 1.0
"""How long it has to ask, and to read the answer."""


class TurnedAway(asyncio.Protocol):
    """One such client. `answer` is called with its address once it has asked, `gone` when it has left.

    It is not told before it has asked: many clients take what comes earlier for a broken connection.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, answer: Callable[[str], bytes], gone: Callable[[], None]
    ) -> None:
        self._loop, self._answer, self._gone = loop, answer, gone
        self._transport: asyncio.Transport | None = None
        self._ends: asyncio.TimerHandle | None = None
        self._is_reported = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._ends = self._loop.call_later(REFUSAL_STAYS_S, self._transport.abort)

    def data_received(self, _data: bytes) -> None:
        transport = self._transport
        if self._is_reported or transport is None:
            return
        self._is_reported = True
        peer = transport.get_extra_info("peername")
        transport.write(self._answer(str(peer[0]) if peer else ""))
        # Closing while a body comes in would reset the connection under the answer.
        if transport.can_write_eof():
            transport.write_eof()
        else:
            transport.close()

    def connection_lost(self, _exc: Exception | None) -> None:
        self._transport = None
        if self._ends is not None:
            self._ends.cancel()
        self._gone()
