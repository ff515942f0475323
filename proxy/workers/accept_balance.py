"""Whose turn it is to accept: workers share one listener, and the one with the fewest clients takes the next.

Each worker writes what it has, and when that was, into a page of memory that all of them see, and looks there
before it accepts. One whose turn it is not leaves the connection to the other, and looks again soon. One that
has not written for a while is stuck, or gone, and has no turn. Why so: docs/decisions/016-workers.md.
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
"""For so long a worker whose turn it is not looks away from the listener."""
STUCK_MS = 600
"""A worker writes with each tick, four times a second."""
PAUSE_S = 1.0
"""Out of descriptors, or of memory: to look again at once would be to spin."""
_ABSENT = 0xFFFFFFFF
_SLOT = 3
"""Clients, connections ever taken, milliseconds of the clock that all processes of a machine have."""
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Page:
    """What each worker has: clients now, and how many it ever took. To be made before the workers are."""

    def __init__(self, workers: int) -> None:
        # Behind the slots: of the control process and of each worker, when it was last alive; 0: not yet.
        self._beats = workers * _SLOT + 1
        self._shared = mmap.mmap(-1, (self._beats + workers) * 4)
        self._slots = memoryview(self._shared).cast("I")
        self._workers = range(workers)
        for worker in self._workers:
            self.leave(worker)

    def enter(self, worker: int, clients: int, now: float) -> None:
        """It accepts now, and counts as having taken as many as the others: else all would be its own."""
        others = [at for at in self._others(worker) if self._slots[at] != _ABSENT]
        self._slots[_SLOT * worker + 1] = max((self._slots[at + 1] for at in others), default=0)
        self.note(worker, clients, now)

    def leave(self, worker: int) -> None:
        """It accepts no more."""
        self._slots[_SLOT * worker] = _ABSENT

    def note(self, worker: int, clients: int, now: float) -> None:
        """It has so many clients."""
        self._slots[_SLOT * worker] = clients
        self._slots[_SLOT * worker + 2] = _ms(now)

    def beat(self, process: int, now: float) -> None:
        """A process, the control process (-1) or a worker, is alive."""
        self._slots[self._beats + process] = _ms(now) or 1

    def await_beat(self, process: int) -> None:
        """It is started anew."""
        self._slots[self._beats + process] = 0

    def still_s(self, process: int, now: float) -> float | None:
        """For how long a process has not been alive; None: it has not begun."""
        beat = self._slots[self._beats + process]
        passed_ms = (_ms(now) - beat) & 0xFFFFFFFF
        # A clock that was read a moment later may stand a little before ours.
        return (passed_ms / 1000.0 if passed_ms < 1 << 31 else 0.0) if beat else None

    def take(self, worker: int) -> None:
        """It has taken one."""
        self._slots[_SLOT * worker] += 1
        self._slots[_SLOT * worker + 1] = (self._slots[_SLOT * worker + 1] + 1) & 0x7FFFFFFF

    def is_next(self, worker: int, now: float) -> bool:
        """Whether none has less than it, of those that are not stuck."""
        slots, at, now_ms = self._slots, _SLOT * worker, _ms(now)
        own = slots[at], slots[at + 1]
        return all(
            own <= (slots[other], slots[other + 1])
            # A clock that was read a moment later may stand a little before ours.
            or (now_ms - slots[other + 2] + STUCK_MS) & 0xFFFFFFFF > 2 * STUCK_MS
            for other in self._others(worker)
        )

    def _others(self, worker: int) -> list[int]:
        return [_SLOT * each for each in self._workers if each != worker]


def _ms(now: float) -> int:
    return int(now * 1000.0) & 0xFFFFFFFF


class SharedEntrance(Entrance):
    """Accepts in turns with other workers. `clients` says how many there are, `trouble` is told why none can
    be accepted.
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
        """Let the others know how many clients there are now, and the supervisor that there is somebody."""
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
        """Somebody is there."""
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
