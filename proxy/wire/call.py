"""A small request to a unit whose whole reply is wanted, for an exchange: callbacks, no task, no timer."""

from __future__ import annotations

from typing import Protocol

from cellgate.proxy.wire.failure import Failure, Kind
from cellgate.proxy.wire.pool import Pool
from cellgate.proxy.wire.upstream import UnitConnection

REPLY_BYTES = 64 << 20


class Caller(Protocol):
    """Who is told what came of a call: one of the two, once, unless the call is abandoned."""

    def answered(self, status: int, body: bytes) -> None: ...
    def failed(self, failure: Failure) -> None: ...


class Call:
    """One request on its way. Also the taker of its connection."""

    __slots__ = ("_body", "_caller", "_conn", "_head", "_pool", "_reply", "over")

    def __init__(self, caller: Caller, pool: Pool, head: bytes, body: bytes) -> None:
        self._caller = caller
        self._pool = pool
        self._head = head
        self._body = body
        self._reply = bytearray()
        self._conn: UnitConnection | None = None
        self.over = False

    def begin(self, *, fresh: bool = False) -> None:
        """Send it as soon as there is a connection: a new one, if `fresh`."""
        self._pool.take(self, fresh=fresh)

    def abandon(self) -> None:
        """Nobody waits for the reply any more."""
        if self.over:
            return
        self.over = True
        if self._conn is not None:
            self._conn.drop()
        else:
            self._pool.cancel(self)

    def on_connected(self, conn: UnitConnection) -> None:
        """The pool's answer."""
        self._conn = conn
        conn.send(self._head, self._body, self, to_head=False)

    def on_read(self, _data: bytes, pieces: list[bytes], conn: UnitConnection) -> None:
        """A part of the reply."""
        self._reply += b"".join(pieces)
        if len(self._reply) > REPLY_BYTES:
            conn.drop()
            self.on_failed(Failure(Kind.GARBAGE, f"its reply is larger than {REPLY_BYTES} bytes"))
        elif conn.reply.ended and conn.reply.head is not None:
            self.over = True
            self._caller.answered(conn.reply.head.status, bytes(self._reply))

    def on_failed(self, failure: Failure) -> None:
        """There will be no (more of the) reply."""
        self.over = True
        self._caller.failed(failure)
