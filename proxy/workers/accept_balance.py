"""Balances accepts: workers share one listener, and the one with the fewest clients accepts the next.

Each worker writes its number of clients and the time into a page of shared memory, and reads the page before
it accepts. A worker that has more clients than another leaves the connection to that one for a moment. One
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

YIELD_S = 0.002
"""How long a worker ignores the listener when it is another one's turn."""
STUCK_MS = 600
"""A worker that has not written for this long counts as blocked; it writes with each tick."""
PAUSE_S = 1.0
"""The pause when descriptors or memory are used up, because an immediate retry would spin."""
_ABSENT = 0xFFFFFFFF
_SLOT = 3
"""Clients, connections ever taken, milliseconds of the clock that all processes of a machine have."""
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Page:
    """The clients of each worker, and how many it ever accepted. Must be created before the workers."""

    def __init__(self, workers: int) -> None:
        # After the slots: when the control process and each worker was last alive; 0: not yet.
        self._beats = workers * _SLOT + 1
        self._shared = mmap.mmap(-1, (self._beats + workers) * 4)
        self._slots = memoryview(self._shared).cast("I")
        self._workers = range(workers)
        for worker in self._workers:
            self.leave(worker)

    def enter(self, worker: int, clients: int, now: float) -> None:
        """A worker begins to accept. It starts with the count of the others, or it would get all
        connections.
        """
        others = [at for at in self._others(worker) if self._slots[at] != _ABSENT]
        self._slots[_SLOT * worker + 1] = max((self._slots[at + 1] for at in others), default=0)
        self.note(worker, clients, now)

    def leave(self, worker: int) -> None:
        """A worker accepts no more."""
        self._slots[_SLOT * worker] = _ABSENT

    def note(self, worker: int, clients: int, now: float) -> None:
        """Record the number of clients of a worker."""
        self._slots[_SLOT * worker] = clients
        self._slots[_SLOT * worker + 2] = _ms(now)

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
        self._slots[_SLOT * worker + 1] = (self._slots[_SLOT * worker + 1] + 1) & 0x7FFFFFFF

    def is_next(self, worker: int, now: float) -> bool:
        """Whether no other worker that is not blocked has fewer clients."""
        slots, at, now_ms = self._slots, _SLOT * worker, _ms(now)
        own = slots[at], slots[at + 1]
        return all(
            own <= (slots[other], slots[other + 1])
            # Another process may have read the clock a moment later.
            or (now_ms - slots[other + 2] + STUCK_MS) & 0xFFFFFFFF > 2 * STUCK_MS
            for other in self._others(worker)
        )

    def _others(self, worker: int) -> list[int]:
        return [_SLOT * each for each in self._workers if each != worker]


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
        self._page.enter(self._worker, self._clients(), self._loop.time())
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
        """A connection waits on the listener."""
        page, own, now = self._page, self._worker, self._loop.time()
        page.note(own, self._clients() + len(self._arriving), now)
        for _ in range(AT_ONCE):
            if not page.is_next(own, now):
                self._look_away(listener, YIELD_S)
                return
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
