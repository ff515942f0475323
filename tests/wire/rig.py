"""An attempt on a unit and a client without sockets: bytes in on one side, bytes out on the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Self, cast

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.http.errors import Failure
from cellgate.proxy.http.reply import ReplyHead
from cellgate.proxy.http.request import Request
from cellgate.proxy.http.server import ClientConnection
from cellgate.proxy.http.turns import ReadScheduler
from cellgate.proxy.http.unit import Pool, UnitConnection
from cellgate.proxy.observe.access_log import Finished
from cellgate.proxy.request.attempt import Attempt
from cellgate.proxy.request.life import RequestLife
from cellgate.proxy.request.ports import Dispatcher
from cellgate.proxy.request.response import Response
from cellgate.proxy.request.services import Services
from cellgate.router.cost import Expected
from cellgate.router.judge import open_case
from cellgate.router.nouns import Ask, Cell, Unit
from cellgate.router.unit_state import Lease, UnitState
from tests.wire.replies import Reply, replies


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False
        self.reading = True

    def write(self, data: bytes) -> None:
        assert not self.closed, "written to after the close"
        self.written += data

    def writelines(self, pieces: Iterable[bytes]) -> None:
        self.write(b"".join(pieces))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def get_extra_info(self, name: str) -> Any:
        """There is no socket, and no peer."""

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Rig:
    """One request on one connection, from the moment it is sent.

    Plays the gate, the pool, the client and the exchange. `ends` says how the attempt ended, `kept` which
    connections were given back for another request, `bugs` which exceptions were reported, `due` what is to
    be done in the next turn of the loop. Those of one `read_scheduler` share the turns of one loop.
    """

    def __init__(
        self, *, http10: bool = False, to_head: bool = False, read_scheduler: ReadScheduler | None = None
    ) -> None:
        self.shown = b""
        self.ends: list[str] = []
        self.failures: list[Failure] = []
        self.kept: list[UnitConnection] = []
        self.bugs: list[Exception] = []
        self.due: list[Callable[[], object]] = []
        self.read_scheduler = read_scheduler or ReadScheduler(
            lambda callback: self.due.append(callback), LIMITS.reply_bytes_per_turn
        )
        self.wire = Wire()
        self.conn = UnitConnection(cast(Pool, self))
        self.conn.connection_made(cast(asyncio.Transport, self.wire))
        self.method = "HEAD" if to_head else "POST"
        self._http10 = http10
        self._to_head = to_head
        self._send_request()

    def _send_request(self) -> None:
        state = UnitState(Unit("u", "c", "http://u"), Cell("c"), open_case(0.0))
        self.lease = lease = Lease(state, Ask(), 0.0, False)
        lease.job = state.costs.add(lease, lease.ask, Expected(), 0, 0.0)
        request = Request(0.0, [], [], [])
        request.http10, request.method, request.given_id = self._http10, self.method.encode(), b"1"
        self.response = Response(cast(Services, self), cast(ClientConnection, self), request, "chat")
        self.attempt = Attempt(cast(RequestLife, self), cast(Dispatcher, self), self.response, self.lease)
        self.attempt.send(b"HEAD OF THE REQUEST", b"", cast(Pool, self), to_head=self._to_head, fresh=False)

    def again(self) -> None:
        """The next request on the same connection, which must have been given back."""
        assert self.kept == [self.conn]
        self.kept.clear()
        self.shown = b""
        self.ends.clear()
        self._send_request()

    def feed(self, reads: Iterable[bytes], *, close: bool = False) -> Self:
        """Let the unit's bytes arrive, one read after the other, and `close`, unless the gate has closed."""
        for data in reads:
            while self.due and not self.wire.reading:
                self.turn()
            if data and not self.wire.closed:
                self.conn.data_received(data)
        if close or self.wire.closed:
            self.conn.connection_lost(None)
        return self

    def reply(self) -> Reply:
        """The reply as the client reads it, up to the end that it was told of."""
        (reply,) = replies(self.shown, [self.method])
        return reply

    def body(self) -> bytes:
        """What was shown of the body, whether it has ended or not, and whether its head was shown here."""
        head = (
            b""
            if self.shown.startswith(b"HTTP/")
            else b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        (reply,) = replies(head + self.shown, [self.method])
        return reply.body

    # The gate

    is_leaving = shows_all = False

    def now(self) -> float:
        return 0.0

    def new_id(self) -> bytes:
        return b"1"

    @property
    def shows_internals(self) -> bool:
        """As a client's connection: it is trusted."""
        return True

    def report_lines(self, request: Request, *, to_trusted: bool) -> bytes:
        return b""

    def finished(self, record: Finished) -> None:
        """Nobody counts."""

    # The pool

    def take(self, taker: Attempt, *, fresh: bool) -> None:
        taker.on_connected(self.conn)

    def closed(self, conn: UnitConnection, *, broken: bool, unused: bool) -> None:
        """Nothing to forget."""

    def forget(self, conn: UnitConnection) -> None:
        """Nothing to forget."""

    def give_back(self, conn: UnitConnection) -> None:
        self.kept.append(conn)

    def report(self, error: Exception) -> None:
        self.bugs.append(error)

    def cancel(self, taker: Any) -> None:
        """Nothing is being opened."""

    def turn(self) -> None:
        """The next turn of the loop."""
        due, self.due = self.due, []
        for callback in due:
            callback()

    # The client

    def send(self, data: bytes) -> None:
        self.shown += data

    write = send

    def hint(self, heads: bytes) -> None:
        self.shown += heads

    def finish(self, request: Request, *, keep_alive: bool) -> None:
        """There is no next request."""

    peer = ""

    # The exchange

    def accepts(self, head: ReplyHead, _: list[bytes]) -> bool:
        self.response.status = head.status
        return True

    def committed(self, first: bytes, at: float) -> None:
        self.ends.append("committed")

    def may_hold(self, size: int) -> bool:
        return False

    def doubts(self, what: str, body: bytes) -> bool:
        return False

    def crashed(self, error: Exception) -> None:
        self.bugs.append(error)

    def done(self) -> None:
        self.ends.append("done")

    def failed(self, failure: Failure) -> None:
        self.ends.append("failed")
        self.failures.append(failure)
