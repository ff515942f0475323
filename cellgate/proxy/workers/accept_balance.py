"""Balances accepts: workers share one listener, and each takes of the waiting connections as many as make the
numbers of clients equal.

Each worker writes its number of clients and the time into a page of shared memory, and reads the page before
it accepts. A worker that has more clients than another leaves the connections to that one for a moment. One
that has not written for a while counts as blocked and is skipped. Reasons: docs/decisions/016-workers.md.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import socket
import ssl
from collections.abc import Callable, Sequence

from cellgate.proxy.config.settings import Address
from cellgate.proxy.process.listeners import AT_ONCE, Entrance
from cellgate.proxy.wire.tcp import accept_queue

YIELD_S = 0.002
"""How long a worker ignores the listener when it is another one's turn."""
STUCK_MS = 600
"""A worker that has not written for this long counts as blocked; it writes with each tick."""
PAUSE_S = 1.0
"""The pause when descriptors or memory are used up, because an immediate retry would spin."""
_ABSENT = 0xFFFFFFFF
_SLOT = 2
"""Clients, and milliseconds of the clock that all processes of a machine have."""
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Page:
    """The clients of each worker. Must be created before the workers."""

    def __init__(self, workers: int) -> None:
        # After the slots: when the control process and each worker was last alive; 0: not yet.
        self._beats = workers * _SLOT + 1
        self._shared = mmap.mmap(-1, (self._beats + workers) * 4)
        self._slots = memoryview(self._shared).cast("I")
        self._workers = range(workers)
        for worker in self._workers:
            self.leave(worker)

    def leave(self, worker: int) -> None:
        """A worker accepts no more."""
        self._slots[_SLOT * worker] = _ABSENT

    def note(self, worker: int, clients: int, now: float) -> None:
        """Record the number of clients of a worker."""
        self._slots[_SLOT * worker] = clients
        self._slots[_SLOT * worker + 1] = _ms(now)

    def beat(self, process: int, now: float) -> None:
        """A process is alive: the control process (-1) or a worker."""
        self._slots[self._beats + process] = _ms(now) or 1

    def await_beat(self, process: int) -> None:
        """A process is restarted."""
        self._slots[self._beats + process] = 0

    def still_s(self, process: int, now: float) -> float | None:
        """How long ago a process was last alive; None: it has not begun."""
        beat = self._slots[self._beats + process]
        passed_ms = (_ms(now) - beat) & 0xFFFFFFFF
        # Another process may have read the clock a moment later.
        return (passed_ms / 1000.0 if passed_ms < 1 << 31 else 0.0) if beat else None

    def take(self, worker: int) -> None:
        """A worker has accepted a connection."""
        self._slots[_SLOT * worker] += 1

    def share(self, worker: int, waiting: int, now: float) -> int:
        """How many of the `waiting` connections this worker takes, so that all have as many clients. At least
        1 while none that is not blocked has fewer.
        """
        own, others = self._slots[_SLOT * worker], self._others(worker, now)
        least = 1 if own <= min(others, default=own) else 0
        return max(least, _level([own, *others], waiting) - own)

    def _others(self, worker: int, now: float) -> list[int]:
        """The clients of the other workers that accept and are not blocked."""
        slots, now_ms = self._slots, _ms(now)
        return [
            slots[_SLOT * other]
            for other in self._workers
            if other != worker
            and slots[_SLOT * other] != _ABSENT
            # Another process may have read the clock a moment later.
            and (now_ms - slots[_SLOT * other + 1] + STUCK_MS) & 0xFFFFFFFF <= 2 * STUCK_MS
        ]


def _level(counts: list[int], waiting: int) -> int:
    """How many clients each worker has, of those that get any, when all that wait are given to those with the
    fewest. Rounded down.
    """
    counts.sort()
    total, level = waiting, 0
    for number, count in enumerate(counts, 1):
        if number > 1 and count >= level:
            break
        total += count
        level = total // number
    return level


def _ms(now: float) -> int:
    return int(now * 1000.0) & 0xFFFFFFFF


class SharedEntrance(Entrance):
    """Accepts in balance with other workers. `clients` gives the number of clients, `trouble` is called with
    the reason when none can be accepted.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: Callable[[], asyncio.Protocol],
        page: Page,
        worker: int,
        clients: Callable[[], int],
        trouble: Callable[[str], None],
    ) -> None:
        super().__init__(loop, connection)
        self._page = page
        self._worker = worker
        self._clients = clients
        self._trouble = trouble
        self._away: dict[socket.socket, asyncio.TimerHandle] = {}

    async def open(
        self,
        _address: Address,
        listeners: Sequence[socket.socket],
        tls: ssl.SSLContext | None,
        _backlog: int,
    ) -> None:
        """Accept on `listeners`."""
        self._listeners, self._tls = listeners, tls
        self._page.note(self._worker, self._clients(), self._loop.time())
        for listener in listeners:
            self._loop.add_reader(listener, self._knock, listener)

    @property
    def port(self) -> int:
        """The port listened on; 0: none."""
        port: int = self._listeners[0].getsockname()[1] if self._listeners else 0
        return port

    def tick(self, now: float) -> None:
        """Publish the number of clients to the other workers, and a sign of life to the supervisor."""
        self._page.beat(self._worker, now)
        if self._listeners:
            self._page.note(self._worker, self._clients(), now)

    def close(self) -> None:
        """Accept no more."""
        self._page.leave(self._worker)
        listeners, self._listeners = self._listeners, ()
        for listener in listeners:
            if (handle := self._away.pop(listener, None)) is not None:
                handle.cancel()
            else:
                self._loop.remove_reader(listener)
            listener.close()

    def _knock(self, listener: socket.socket) -> None:
        """Connections wait on the listener."""
        page, own, now = self._page, self._worker, self._loop.time()
        page.note(own, self._clients() + len(self._arriving), now)
        share = page.share(own, accept_queue(listener), now)
        if not share:
            self._look_away(listener, YIELD_S)
        for _ in range(min(share, AT_ONCE)):
            if not self.has_room(now):
                self._look_away(listener, PAUSE_S)
                return
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in _SHORT:
                    self._trouble(f"no client can be accepted: {error.strerror}")
                self._look_away(listener, PAUSE_S)
                return
            page.take(own)
            self._welcome(sock)

    def _look_away(self, listener: socket.socket, pause_s: float) -> None:
        self._loop.remove_reader(listener)
        self._away[listener] = self._loop.call_later(pause_s, self._look_again, listener)

    def _look_again(self, listener: socket.socket) -> None:
        del self._away[listener]
        self._loop.add_reader(listener, self._knock, listener)
