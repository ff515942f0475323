"""The channel between the supervisor and each of its processes: signals, sockets, and signs of life.

Every message is one packet, `{"do": WHAT, ...}` as JSON, with at most one socket. A closed channel means that
the other process has ended: without its supervisor a process ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

import orjson

from cellgate.proxy.logs.log import log_line

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
