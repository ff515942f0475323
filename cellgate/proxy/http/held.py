"""A connection that is held open to a server which is asked only now and then.

When the server's process ends, so does the connection, and that is known at once: it is better proof than a
question a second. So while one is held the server may be asked rarely.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

from cellgate.proxy.http.unit import Pool, UnitConnection

HELD_S = 120.0
"""It is held for so long after the last time that this was wanted, or a question went through it."""
HOLDS_LEAST_S = 3.0
"""Servers close what is idle after seconds (vLLM: 5, and never before a request). One that closes sooner
after it has accepted ..."""
HOLD_AGAIN_S = 60.0
"""... is asked as often as others for so long: nothing is held there."""


class HeldConnection:
    """To the server of a pool. A server may close what has been idle: then another one is opened, and if that
    cannot be, `lost` is called. It carries the questions that there are meanwhile.
    """

    def __init__(self, pool: Pool, loop: asyncio.AbstractEventLoop) -> None:
        self.read_scheduler = pool.read_scheduler
        self._pool = pool
        self._loop = loop
        self._conn: UnitConnection | None = None
        self.is_open = False
        """Whether there is one: the server is seen to be there."""
        self._is_busy = False
        """It carries a question, or has not been opened yet."""
        self._opening: asyncio.Task[UnitConnection] | None = None
        self.opened_at = -inf
        """When the last one was asked for."""
        self._wanted_until = self._not_before = -inf
        self._lost: Callable[[], None] = lambda: None

    def want(self, lost: Callable[[], None]) -> None:
        """Hold one from now on, for a while after the last question."""
        now = self._loop.time()
        self._lost, self._wanted_until = lost, now + HELD_S
        if self._conn is None and self._opening is None and now >= self._not_before:
            self._open(now)

    def take(self, now: float) -> UnitConnection | None:
        """The connection, for one request; None: there is none to spare."""
        conn = self._conn
        if conn is None or self._is_busy or (transport := conn.transport) is None or transport.is_closing():
            return None
        self._is_busy = conn.reused = True
        self._wanted_until = now + HELD_S
        return conn

    def close(self) -> None:
        self._wanted_until = -inf
        if self._opening is not None:
            self._opening.cancel()
        if self._conn is not None:
            self._conn.drop()

    # -- what its connection says --------------------------------------------------------------------------

    def give_back(self, conn: UnitConnection) -> None:
        """The reply to a question has come."""
        self._is_busy = False
        conn.idle_since = self._loop.time()

    def forget(self, conn: UnitConnection) -> None:
        if conn is self._conn:
            self._conn, self.is_open, self._is_busy = None, False, False

    def closed(self, conn: UnitConnection, **_how: bool) -> None:
        """The server has closed it. In the middle of a question, whoever asked learns of it as well."""
        if conn is not self._conn:
            return
        self.forget(conn)
        now = self._loop.time()
        if now >= self._wanted_until:
            return
        if now - max(self.opened_at, conn.idle_since) < HOLDS_LEAST_S:
            self._not_before = now + HOLD_AGAIN_S
            self._lost()
        else:
            self._open(now)

    def report(self, error: Exception) -> None:
        """A defect of the gate."""
        self._pool.report(error)

    # -- inside --------------------------------------------------------------------------------------------

    def _open(self, now: float) -> None:
        self.opened_at = now
        self._opening = self._loop.create_task(self._pool.open(lambda: UnitConnection(self)))
        self._opening.add_done_callback(self._settled)

    def _settled(self, task: asyncio.Task[UnitConnection]) -> None:
        self._opening = None
        if task.cancelled():
            return
        if task.exception() is None:
            conn = task.result()
            if conn.usable and self._loop.time() < self._wanted_until:
                self._conn, self.is_open = conn, True
                return
            conn.drop()
        if self._loop.time() < self._wanted_until:
            # Why, the next question shows.
            self._not_before = self._loop.time() + HOLDS_LEAST_S
            self._lost()
