"""Follows a reply without an end, on a connection of its own."""

from __future__ import annotations

import asyncio

from cellgate.probes.base import Listener
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.proxy.wire.fetch import fetch_error
from cellgate.proxy.wire.pool import Pool
from cellgate.proxy.wire.upstream import UnitConnection


class Following:
    """One request on its way, and its reply. `asked` ends when it is sent, or by FetchError."""

    __slots__ = ("_conn", "_has_head", "_head", "_listener", "_pool", "asked")

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: Pool, head: bytes, listener: Listener) -> None:
        self.asked: asyncio.Future[None] = loop.create_future()
        self._pool = pool
        self._head = head
        self._listener = listener
        self._conn: UnitConnection | None = None
        self._has_head = False
        pool.take(self, fresh=True)

    def close(self) -> None:
        """Leave nothing behind."""
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
            self._listener.on_body(body)
        else:
            self._has_head = True
            self._listener.on_head(head.status, is_stream=head.coding == b"chunked", body=body)
        if conn.reply.ended:
            self._listener.on_over("it ended its stream", is_garbled=False)

    def on_failed(self, failure: Failure) -> None:
        self._conn = None
        if not self.asked.done():
            self.asked.set_exception(fetch_error(failure))
        else:
            self._listener.on_over(failure.message, is_garbled=failure.kind is FailureKind.GARBAGE)
