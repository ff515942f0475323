"""One request to a server whose whole reply is wanted: callbacks, no task, no timer."""

from __future__ import annotations

from typing import Protocol

from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.reply import ReplyHead, UsualReply, usual_reply
from cellgate.proxy.http.unit import Pool, UnitConnection

REPLY_BYTES = 64 << 20


class Caller(Protocol):
    """Gets the result of a call: one of the two is called, once, unless the call is abandoned."""

    def answered(self, status: int, body: bytes) -> None: ...
    def failed(self, failure: Failure) -> None: ...


class Call:
    """One request in flight. Also the waiter for its connection, and the sink of its reply.

    `over`: the caller has the result, or the call is abandoned; `reply_head` is set once it has arrived;
    `usual` is what the server usually replies, or has just replied, if that may be usual.
    """

    def __init__(
        self,
        caller: Caller,
        pool: Pool,
        head: bytes,
        body: bytes,
        *,
        max_bytes: int = REPLY_BYTES,
        usual: UsualReply | None = None,
    ) -> None:
        self._caller = caller
        self._pool = pool
        self._head = head
        self._body = body
        self._max_bytes = max_bytes
        self.usual = usual
        self._pieces: list[bytes]
        self._size: int

    def begin(self, *, fresh: bool = False, held: UnitConnection | None = None) -> None:
        """Send it on the held connection, or a new one (`fresh`). A failed call may begin again."""
        self.over = self._has_read = False
        self._conn: UnitConnection | None = None
        self.reply_head: ReplyHead | None = None
        if held is not None:
            self.on_connected(held)
        else:
            self._pool.take(self, fresh=fresh)

    def take_reply_of(self, conn: UnitConnection) -> None:
        """It was sent on this connection by another: take its reply."""
        self.over = self._has_read = False
        self._conn, self.reply_head, conn.sink = conn, None, self

    def abandon(self) -> None:
        if self.over:
            return
        self.over = True
        if self._conn is not None:
            self._conn.drop()
        else:
            self._pool.cancel(self)

    @property
    def phase(self) -> str:
        if self._conn is None:
            return "connecting"
        return "waiting for its reply" if self.reply_head is None else "reading its reply"

    def on_connected(self, conn: UnitConnection) -> None:
        self._conn = conn
        if (usual := self.usual) is not None and len(usual.body) <= self._max_bytes:
            conn.send_again(self._head, usual, self)
        else:
            conn.send(self._head, self._body, self, to_head=False)

    def on_usual(self) -> None:
        assert self.usual is not None
        self.over = True
        self.reply_head = self.usual.head
        self._caller.answered(self.usual.head.status, self.usual.body)

    def on_read(self, data: bytes, pieces: list[bytes], conn: UnitConnection) -> None:
        is_first, self._has_read = not self._has_read, True
        if is_first:
            self._pieces, self._size = [], 0
        self._pieces += pieces
        self._size += sum(map(len, pieces))
        self.reply_head = head = conn.reply.head
        if self._size > self._max_bytes:
            conn.drop()
            self.on_failed(Failure(FailureKind.GARBAGE, f"its reply is larger than {self._max_bytes} bytes"))
        elif conn.reply.ended and head is not None:
            self.over = True
            body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            # The answer to a body is hardly the same twice.
            keep_alive = conn.reply.keep_alive and is_first and not self._body
            self.usual = usual_reply(data, head, body, keep_alive=True) if keep_alive else None
            self._caller.answered(head.status, body)

    def on_failed(self, failure: Failure) -> None:
        self.over = True
        self._caller.failed(failure)
