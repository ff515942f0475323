"""The admin port: the health process in front, the application behind it on the event loop.

Both processes hold the listeners, so that no caller is refused while a health process that died is replaced.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from cellgate.proxy.admin.health_process import RETIRE, SharedStatus
from cellgate.proxy.admin.pages import AdminView, admin_server
from cellgate.proxy.observe.log import log_line
from cellgate.proxy.process.listeners import tls_options

BACKLOG = 128
RESTART_S = 1.0
END_S = 2.0
TLS_RECORD = b"\x16"
"""A connection that speaks TLS begins with this: a handshake (RFC 8446, 5.1). No HTTP does."""
_FDS_AT_ONCE = 32
_COMMAND = (sys.executable, "-m", "cellgate.proxy.admin.health_process")


class AdminPort:
    """Listens between `open` and `close`. What /readyz says has to be published on `shared_status`. `tls` is
    for the next caller that wants it.
    """

    def __init__(
        self,
        view: AdminView,
        shared_status: SharedStatus,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        self._tls = tls
        self._server = admin_server(view)
        self._events = view.events
        self._shared_status = shared_status
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self._arriving: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None

    async def open(self, listeners: Sequence[socket.socket]) -> None:
        """Answer on these."""
        self._listeners = list(listeners)
        self._door, self._doorstep = socket.socketpair()
        self._door.setblocking(False)
        self._loop.add_reader(self._door, self._receive)
        self._health_process = await self._start_health_process()
        self._keeper = self._loop.create_task(self._keep_health_process())

    @property
    def address(self) -> tuple[str, int]:
        """Host and port listened on."""
        host, port = self._listeners[0].getsockname()[:2]
        return host, port

    @property
    def health_pid(self) -> int:
        """The health process."""
        return self._health_process.pid

    def tick(self, now: float) -> None:
        """Close connections that send nothing."""
        self._server.tick(now)

    def retire(self) -> None:
        """Accept no more: another process answers on the same listeners. Connected clients are still
        answered.
        """
        self._stop_listening()
        if self._keeper is not None:
            self._keeper.cancel()
        with suppress(OSError):
            self._door.send(RETIRE)

    async def close(self) -> None:
        """Stop listening, and end what is open."""
        self._stop_listening()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
            self._loop.remove_reader(self._door)
            self._door.close()
            self._doorstep.close()
            await self._end_health_process()
        await asyncio.gather(*self._arriving)
        self._events.close()
        await self._server.close()
        self._shared_status.close()

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()

    async def _start_health_process(self) -> asyncio.subprocess.Process:
        fds = [self._shared_status.fd, self._doorstep.fileno(), *(each.fileno() for each in self._listeners)]
        return await asyncio.create_subprocess_exec(
            *_COMMAND, *map(str, fds), pass_fds=fds, stdin=asyncio.subprocess.DEVNULL
        )

    async def _keep_health_process(self) -> None:
        """Replace it whenever it dies."""
        while True:
            code = await self._health_process.wait()
            log_line("error", f"admin port: its process ended with {code}; another is started")
            await self._restart_health_process()

    async def _restart_health_process(self) -> None:
        while True:
            await asyncio.sleep(RESTART_S)
            try:
                self._health_process = await self._start_health_process()
            except OSError as error:
                log_line("error", f"admin port: no process can be started: {error.strerror}; it is retried")
            else:
                return

    async def _end_health_process(self) -> None:
        """It ends by itself because its socket is closed, unless it is stopped."""
        try:
            async with asyncio.timeout(END_S):
                await self._health_process.wait()
        except TimeoutError:
            self._health_process.kill()
            await self._health_process.wait()

    def _receive(self) -> None:
        """The health process passes on connections of which nothing was read."""
        _, fds, _, _ = socket.recv_fds(self._door, _FDS_AT_ONCE, _FDS_AT_ONCE)
        for fd in fds:
            task = self._loop.create_task(self._serve(socket.socket(fileno=fd)))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    async def _serve(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            # What it sends first is still unread, and there already.
            wants_tls = sock.recv(1, socket.MSG_PEEK) == TLS_RECORD
            options = tls_options(self._tls() if wants_tls else None)
            await self._loop.connect_accepted_socket(self._server, sock, **options)
        except OSError:
            # It has left meanwhile.
            sock.close()
