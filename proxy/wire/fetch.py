"""`fetch`: one bounded request to a unit, for probes.

Each on a new connection, which is then kept for users: a unit that no longer lets anyone in would pass for
well as long as one old connection to it lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from probes.base import FetchError, Reply, Trouble
from proxy.failure import Failure, Kind
from proxy.wire.pool import LATE_S, Pool
from proxy.wire.upstream import ReplyHead, UnitConnection

TROUBLES = {
    Kind.REFUSED: Trouble.REFUSED,
    Kind.UNREACHABLE: Trouble.UNREACHABLE,
    Kind.CONNECT_TIMEOUT: Trouble.TIMEOUT,
    Kind.NO_RESOURCES: Trouble.OWN,
    Kind.EVICTED: Trouble.OWN,
    Kind.INTERNAL: Trouble.OWN,
}


class UnitFetch:
    """The `Fetch` of one server (see probes/base.py). `heard` is called with each reply, whatever it says;
    that somebody refuses is one too.
    """

    def __init__(
        self, pool: Pool, loop: asyncio.AbstractEventLoop, heard: Callable[[], None], api_key: str = ""
    ) -> None:
        self._pool = pool
        self._loop = loop
        self._heard = heard
        self._api_key = api_key

    async def __call__(
        self,
        method: str,
        target: str,
        *,
        body: bytes = b"",
        request_id: str = "",
        timeout_s: float,
        max_bytes: int = 1 << 20,
    ) -> Reply:
        """The whole reply; see `probes.base.Fetch`."""
        head = self._head(method, target, len(body), request_id)
        call = _Call(head, body, max_bytes, self._loop)
        deadline = self._loop.time() + timeout_s
        self._pool.take(call, fresh=True)
        try:
            async with asyncio.timeout_at(deadline):
                reply = await call.done
        except FetchError as error:
            if error.trouble is Trouble.REFUSED:
                self._heard()
            raise
        except TimeoutError:
            if self._loop.time() > deadline + LATE_S:
                raise FetchError(Trouble.OWN, f"the gate itself stood still ({call.phase})") from None
            raise FetchError(Trouble.TIMEOUT, f"no answer in time ({call.phase})") from None
        finally:
            call.abandon(self._pool)
        self._heard()
        return reply

    def _head(self, method: str, target: str, length: int, request_id: str) -> bytes:
        lines = [
            f"{method} {target} HTTP/1.1",
            f"host: {self._pool.authority.decode()}",
            "user-agent: cellgate",
        ]
        if self._api_key:
            lines.append(f"authorization: Bearer {self._api_key}")
        if request_id:
            lines.append(f"x-request-id: {request_id}")
        if length:
            lines.append(f"content-type: application/json\r\ncontent-length: {length}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


class _Call:
    """One request on its way: takes the connection, then the reply."""

    def __init__(self, head: bytes, body: bytes, max_bytes: int, loop: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[Reply] = loop.create_future()
        self.phase = "connecting"
        self._head = head
        self._body = body
        self._max_bytes = max_bytes
        self._size = 0
        self._parts: list[bytes] = []
        self._conn: UnitConnection | None = None

    def on_connected(self, conn: UnitConnection) -> None:
        self.phase = "waiting for its reply"
        self._conn = conn
        conn.send(self._head, self._body, self, to_head=False)

    def on_read(self, _data: bytes, pieces: list[bytes], conn: UnitConnection) -> None:
        self._parts += pieces
        self._size += sum(map(len, pieces))
        head = conn.head
        if head is not None:
            self.phase = "reading its reply"
        if self._size > self._max_bytes:
            self._settle(FetchError(Trouble.BROKEN, f"its reply is larger than {self._max_bytes} bytes"))
            conn.drop()
        elif conn.ended and head is not None:
            self._settle(Reply(head.status, _headers(head), b"".join(self._parts)))
            self._conn = None

    def on_failed(self, failure: Failure) -> None:
        self._conn = None
        self._settle(FetchError(TROUBLES.get(failure.kind, Trouble.BROKEN), failure.message))

    def abandon(self, pool: Pool) -> None:
        """Leave nothing behind: neither a wish for a connection nor one that waits for a reply."""
        pool.cancel(self)
        if self._conn is not None:
            self._conn.drop()
        self.done.cancel()

    def _settle(self, outcome: Reply | FetchError) -> None:
        if self.done.done():
            return
        if isinstance(outcome, FetchError):
            self.done.set_exception(outcome)
        else:
            self.done.set_result(outcome)


def _headers(head: ReplyHead) -> dict[str, str]:
    pairs = [*head.fields, *(line.rstrip(b"\r\n").split(b": ", 1) for line in head.lines)]
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}
