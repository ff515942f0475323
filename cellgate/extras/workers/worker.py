"""Balances accepts: workers share one listener, and each takes of the waiting connections as many as make the
numbers of clients equal.

Each worker writes its number of clients and the time into a page of shared memory, and reads the page before
it accepts. A worker that has more clients than another leaves the connections to that one for a moment. One
that has not written for a while counts as blocked and is skipped. Reasons: docs/decisions/016-workers.md.

1. Everything about a lease is reported to the control process, in order. For single tokens nothing is sent:
   progress is reported once a tick.
2. Without a control process streams continue. Reports wait for the next one, and so do pick requests, for
a second.

In this order: `Worker`, `SupervisorChannel`, `WholeLines`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import os
import random
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from cellgate.extras.workers.protocol import Message, Pulse, ToControl, ToWorker, settings_in
from cellgate.extras.workers.remote import (
    BoardReplica,
    ControlClient,
    RemoteAccounts,
    RemoteDispatcher,
    RemoteReports,
    ReplicaUnit,
    StatusReporter,
)
from cellgate.proxy.admission.keys import KeyFollower
from cellgate.proxy.admission.usage import make_key_check
from cellgate.proxy.config.settings import Address, Settings, secret_of
from cellgate.proxy.control.stall_watch import LAG_S
from cellgate.proxy.gateway import Gateway
from cellgate.proxy.http.unit import UnitPools
from cellgate.proxy.ingress.reports import LoadLines
from cellgate.proxy.observe.access_log import AccessLog, stdout_sink
from cellgate.proxy.observe.defects import DEFECTS
from cellgate.proxy.observe.log import LogSink, log_line
from cellgate.proxy.process.listeners import AT_ONCE, PAUSE_S, Entrance
from cellgate.proxy.process.memory import CLIENT_BLOCKS, Garbage, calm_the_collector
from cellgate.proxy.process.signals import Signals, Ticker
from cellgate.proxy.process.tcp_info import accept_queue
from cellgate.proxy.process.tls import LiveTls
from cellgate.proxy.request.large_bodies import LargeBodies, ReadBody
from cellgate.proxy.request.services import Services
from cellgate.proxy.telemetry import trace, watch_generations

WORKER_YIELD_S = 0.002
"""How long a worker ignores the listener when it is another one's turn."""
STUCK_MS = 600
"""A worker that has not written for this long counts as blocked; it writes with each tick."""
TROUBLE_PAUSE_S = 1.0
"""The pause when descriptors or memory are used up, because an immediate retry would spin."""
_WORKER_ABSENT = 0xFFFFFFFF
_FULL = 1 << 31
"""Added to the clients of a worker that has no room for more."""
_SLOT = 2
"""Clients, and milliseconds of the clock that all processes of a machine have."""
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Worker:
    """Worker `number` of one gate; `page` is the shared page with the number of clients of each."""

    def __init__(
        self,
        settings: Settings,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        *,
        access_log: AccessLog,
        read: ReadBody,
        tls: LiveTls | None = None,
        page: Page,
        number: int,
    ) -> None:
        self.control = ControlClient(loop, self._greet, self._hear)
        self.opened = asyncio.Event()
        """Whether clients may be accepted."""
        self._now = loop.time
        self._ticker = ticker = Ticker(loop)
        self._replica = replica = BoardReplica(settings.rules)
        self._dispatcher = RemoteDispatcher(replica.board, self.control, loop.time)
        self._reports = RemoteReports(self.control, replica, loop.time)
        self._unit_pools = self._make_unit_pools(settings, loop, tls)
        self._load_lines = LoadLines()
        services = Services(
            settings,
            loop,
            rng,
            board=replica.board,
            dispatcher=self._dispatcher,
            reports=self._reports,
            pool=self._unit_pools.pool,
            load_lines=self._load_lines,
            access_log=access_log,
            read=read,
        )
        self.gateway = Gateway(services, loop, ticker, self._unit_pools)
        self._entrance = self.gateway.entrance = SharedEntrance(
            loop, self.gateway.connection, page, number, self._clients, self.gateway.gate_fault
        )
        self._status = StatusReporter(replica, self.gateway, self._dispatcher)
        self._tls, self._accepts = tls, False
        self._keys, self._handlers = self._ask_for_keys(settings), self._what_follows()
        garbage = Garbage(
            loop.time(), lambda: not replica.board.in_flight, lambda: CLIENT_BLOCKS * self._clients()
        )
        ticker.looks += [self._entrance.tick, self._mark_steps, self._tell_status, garbage.tick]

    def _clients(self) -> int:
        return len(self.gateway.clients)

    def _ask_for_keys(self, settings: Settings) -> KeyFollower | None:
        if settings.keys is None:
            return None
        self._key_check = key_check = make_key_check(settings, RemoteAccounts(self.control))
        self.gateway.ask_for_keys(key_check)
        self._ticker.looks.append(key_check.tick)
        # The control process reports mistakes for all.
        return KeyFollower(settings.keys.file, key_check.take, lambda _problems: None)

    def _what_follows(self) -> dict[int, Callable[..., None]]:
        """The handlers of messages of the control process."""
        return {
            ToWorker.FLEET: self._take_fleet,
            ToWorker.UNITS: self._take_units,
            ToWorker.PULSE: self._take_pulse,
            ToWorker.OPEN: self.opened.set,
            ToWorker.GRANTED: self._dispatcher.granted,
            ToWorker.REFUSED: self._dispatcher.refused,
            ToWorker.EVICTED: self._dispatcher.evict,
            ToWorker.SETTINGS: self._take_settings,
        }

    # -- life ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Read the keys of clients, and tick; the units come from the control process."""
        if self._tls is not None:
            self._ticker.looks.append(self._tls.tick)
        if self._keys is not None:
            self._keys.read()
            self._keys.start()
            self._key_check.start()
        self._ticker.start()

    async def accept(self, listeners: Sequence[socket.socket] = ()) -> None:
        """Accept clients, once that is allowed. Raises OSError."""
        await self.opened.wait()
        await self.gateway.listen(None if self._tls is None else self._tls.clients(), listeners)
        self._accepts = True
        self.control.say((ToControl.ACCEPTING,))

    def announce_stop(self) -> None:
        """Responses say from now on that the gate stops."""
        self.gateway.announce_stop()

    async def stop(self, *, delay_s: float, drain_s: float) -> None:
        await self.gateway.stop(delay_s=delay_s, drain_s=drain_s)
        await self._close()

    async def leave_to_successor(self, *, drain_s: float) -> None:
        """Another gate's workers accept: let responses end."""
        await self.gateway.leave_to_successor(drain_s=drain_s)
        await self._close()

    async def _close(self) -> None:
        self._ticker.stop()
        if self._keys is not None:
            await self._keys.close()
            await self._key_check.close()
        self._unit_pools.close()
        await self.gateway.close()
        self.control.mention((ToControl.STATUS, *self._status.take(self._now(), 0.0, is_last=True)))
        self.control.close()
        # One turn to send pending messages.
        await asyncio.sleep(0)

    # -- the control process -------------------------------------------------------------------------------

    def _greet(self) -> list[Message]:
        """The first message to a control process: the replica and the open leases."""
        greeting: list[Message] = [(ToControl.HELLO, self._replica.known(), self._dispatcher.greeting())]
        return [*greeting, (ToControl.ACCEPTING,)] if self._accepts else greeting

    def _make_unit_pools(
        self, settings: Settings, loop: asyncio.AbstractEventLoop, tls: LiveTls | None
    ) -> UnitPools:
        return UnitPools(
            loop,
            connect_timeout_s=settings.timeouts.connect_s,
            tls=None if tls is None else tls.units,
            own_keys=settings.keys is not None,
            secret=lambda: secret_of(self.gateway.services.settings),
            on_broken=self._reports.restart_suspected,
            on_gate_fault=lambda reason: self.gateway.gate_fault(reason),
        )

    def _hear(self, message: Message) -> None:
        self._handlers[message[0]](*message[1:])

    def _take_fleet(self, version: int, *fleet: Any) -> None:
        for state in self._replica.take_fleet(version, fleet, self._now()):
            self._unit_pools.leave(state)
            self._status.forget(state)
        self._unit_pools.renew()

    def _take_units(self, units: list[ReplicaUnit]) -> None:
        for state in self._replica.take_units(units):
            self._unit_pools.distrust(state)

    def _take_settings(self, values: bytes) -> None:
        settings = settings_in(self.gateway.services.settings, values)
        self.gateway.take_settings(settings)
        self._unit_pools.renew()
        if self._tls is not None:
            self._tls.take(settings.tls)

    def _take_pulse(self, *values: Any) -> None:
        pulse = Pulse(*values)
        self._replica.take_lives(pulse.lives)
        self._status.received(pulse.lives)
        self._load_lines.usual, self._load_lines.others = pulse.load_line, pulse.load_lines
        self._replica.board.panic_at = pulse.panic_at

    # -- with each tick ------------------------------------------------------------------------------------

    def _mark_steps(self, now: float) -> None:
        for state in self._replica.board:
            if state.leases:
                state.step_times.mark(now)

    def _tell_status(self, now: float) -> None:
        lag_s = self._ticker.lag_s
        if self.control.has_control():
            self.control.say((ToControl.STATUS, *self._status.take(now, lag_s)))
        elif lag_s <= LAG_S:
            # After a blocked loop the messages of the control process have not been read yet.
            self.control.tick(now)


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
        self._slots[_SLOT * worker] = _WORKER_ABSENT

    def note(self, worker: int, clients: int, now: float) -> None:
        """Record the number of clients of a worker."""
        self._slots[_SLOT * worker] = clients
        self._slots[_SLOT * worker + 1] = _ms(now)

    def fill(self, worker: int) -> None:
        """A worker has no room for clients, until it notes their number again."""
        self._slots[_SLOT * worker] |= _FULL

    def are_others_full(self, worker: int, now: float) -> bool:
        """Whether no other worker has room either."""
        return min(self._others(worker, now), default=_FULL) >= _FULL

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
            and slots[_SLOT * other] != _WORKER_ABSENT
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
        self._is_full = False
        """Whether there was no room when somebody last came."""

    async def open(
        self, _address: Address, listeners: Sequence[socket.socket], tls: ssl.SSLContext | None, _backlog: int
    ) -> None:
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
            if self._is_full:
                self._page.fill(self._worker)

    def close(self) -> None:
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
            self._look_away(listener, WORKER_YIELD_S)
        for _ in range(min(share, AT_ONCE)):
            self._is_full = not self.has_room(now)
            if self._is_full:
                page.fill(own)
                if self.overflow.is_due(now, True) and page.are_others_full(own, now):
                    self._refuse_new()
                self._look_away(listener, PAUSE_S)
                return
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in _SHORT:
                    self._trouble(f"no client can be accepted: {error.strerror}")
                self._look_away(listener, TROUBLE_PAUSE_S)
                return
            page.take(own)
            self._welcome(sock)

    def _look_away(self, listener: socket.socket, pause_s: float) -> None:
        self._loop.remove_reader(listener)
        self._away[listener] = self._loop.call_later(pause_s, self._look_again, listener)

    def _look_again(self, listener: socket.socket) -> None:
        del self._away[listener]
        self._loop.add_reader(listener, self._knock, listener)


# The channel between the supervisor and each of its processes: signals, sockets, and signs of life.
#
# Every message is one packet, `{"do": WHAT, ...}` as JSON, with at most one socket. A closed channel means
# that the other process has ended: without its supervisor a process ends at once.


PACKET_BYTES = 4096
ORPHANED = 3
"""The exit code of a process without its supervisor."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, what: dict[str, Any], passed: socket.socket | None = None) -> None:
    """Send one message. Raises OSError when the other end is gone, or does not read."""
    data = orjson.dumps(what)
    if passed is None:
        sock.send(data)
    else:
        socket.send_fds(sock, [data], [passed.fileno()])


def receive(sock: socket.socket) -> tuple[dict[str, Any], socket.socket | None] | None:
    """The next message and what came with it; None: the other end is gone."""
    try:
        data, fds, _, _ = socket.recv_fds(sock, PACKET_BYTES, 1)
    except ConnectionResetError:
        return None
    if not data:
        return None
    return orjson.loads(data), socket.socket(fileno=fds[0]) if fds else None


class SupervisorChannel:
    """A process's end. `on_socket` is told of a socket to the other side, and of the worker's number."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._signals: dict[int, Callable[[], None]] = {}
        self.on_socket: Callable[[int, socket.socket], None] = lambda _number, sock: sock.close()
        sock.setblocking(False)

    def open(self) -> None:
        """Begin to listen. Needs a running loop."""
        asyncio.get_running_loop().add_reader(self._sock, self._read)

    def on_signal(self, number: int, handler: Callable[[], None]) -> None:
        """Call `handler` when the supervisor passes this signal on."""
        self._signals[number] = handler

    def ready(self) -> None:
        """Report to the supervisor that the gate serves."""
        send(self._sock, {"do": "ready"})

    def reloaded(self) -> None:
        """Report that the configuration was read again: the next control process has to do so as well."""
        send(self._sock, {"do": "reloaded"})

    def notify(self, *words: str) -> None:
        """Report to the service manager through the supervisor."""
        send(self._sock, {"do": "notify", "words": words})

    def _read(self) -> None:
        try:
            received = receive(self._sock)
        except BlockingIOError:
            return
        if received is None:
            log_line("error", "the gate's supervisor has ended, so this process ends as well")
            logging.shutdown()
            os._exit(ORPHANED)
        what, sock = received
        if what["do"] == "signal":
            self._signals.get(what["number"], lambda: None)()
        elif sock is not None:
            self.on_socket(what["worker"], sock)


LINES_BYTES = 4096
"""What a pipe takes as one piece (PIPE_BUF), so that lines of several workers do not mix."""


class WholeLines:
    """A sink that many processes write to: it gets whole lines, as many at once as stay in one piece."""

    def __init__(self, sink: LogSink) -> None:
        self._sink = sink

    def write(self, data: memoryview, /) -> int | None:
        """Write the first lines of `data`; how many bytes were taken."""
        head = bytes(data[:LINES_BYTES])
        end = head.rfind(b"\n") + 1 if len(data) > LINES_BYTES else len(head)
        return self._sink.write(data[: end or LINES_BYTES])


async def run_worker(
    settings: Settings,
    tls: LiveTls,
    listeners: Sequence[socket.socket],
    channel: socket.socket,
    page: Page,
    number: int,
) -> int:
    """Run worker `number` until it is told to end; `channel` leads to the supervisor."""
    loop, large = asyncio.get_running_loop(), LargeBodies()
    loop.set_exception_handler(DEFECTS.handle)
    log = AccessLog(settings.access_log, WholeLines(stdout_sink()), time.time)
    worker = Worker(
        settings, loop, random.Random(), access_log=log, read=large.read, tls=tls, page=page, number=number
    )
    end_tracing = trace(settings.tracing, worker.gateway)
    watch_generations(settings.otlp_metrics, worker.gateway)
    supervisor = SupervisorChannel(channel)
    supervisor.on_socket = _meeting(worker)
    life = Signals(
        worker,
        settings.timeouts,
        lambda: None,
        _handed_over,
        on_signal=supervisor.on_signal,
        # The control process reports it for all.
        tell=lambda _level, _line: None,
    )
    supervisor.open()
    worker.begin()
    accepting = loop.create_task(worker.accept(listeners))
    calm_the_collector()
    try:
        await life.run()
    finally:
        accepting.cancel()
        await large.close()
        end_tracing()
    return 0


def _meeting(worker: Worker) -> Callable[[int, socket.socket], None]:
    """What is done with a socket that leads to a control process."""
    tasks = set[asyncio.Task[None]]()

    def meet(_: int, sock: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(worker.control.meet().connect(sock))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return meet


async def _handed_over() -> bool:
    """The supervisor passes SIGUSR2 on to workers once there is a successor."""
    return True
