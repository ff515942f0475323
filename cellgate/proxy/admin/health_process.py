"""Parses plain requests for /livez and /readyz. Pure.

Plain is what probes send: GET or HEAD in one piece, HTTP/1.0 or 1.1, no body, no negotiation. Everything else
needs a full HTTP server.

In this order: `HealthRequest`, `SharedStatus`, `HealthProcess`.
"""

from __future__ import annotations

import mmap
import os
import re
import selectors
import signal
import socket
import struct
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

# RFC 9112: request line, then `token ":" value` lines, none of them folded.
_HEAD = re.compile(
    rb"(GET|HEAD) /(livez|readyz)(?:\?[!-~]*)? HTTP/1\.([01])\r\n"
    rb"((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*\r\n)*)\r\n"
)
_CONNECTION = re.compile(rb"^connection:(.*?)\r$", re.IGNORECASE | re.MULTILINE)
_NOT_PLAIN = re.compile(
    rb"^(?:content-length|transfer-encoding|expect|upgrade):", re.IGNORECASE | re.MULTILINE
)


class HealthRequest(NamedTuple):
    """One request. `name` is livez or readyz, `size` the bytes it took."""

    name: str
    head_only: bool
    keep_alive: bool
    size: int


def parse_health_request(data: bytes) -> HealthRequest | None:
    """The plain request at the beginning of `data`; None: it is something else."""
    match = _HEAD.match(data)
    if match is None:
        return None
    method, name, minor, fields = match.groups()
    if _NOT_PLAIN.search(fields):
        return None
    return HealthRequest(name.decode(), method == b"HEAD", _keeps_alive(minor, fields), match.end())


def _keeps_alive(minor: bytes, fields: bytes) -> bool:
    routing_headers = {
        wish.strip().lower() for line in _CONNECTION.findall(fields) for wish in line.split(b",")
    }
    return b"close" not in routing_headers and (minor == b"1" or b"keep-alive" in routing_headers)


# The status that the gate published last, in memory shared with its health process.
#
# The event loop writes it without a system call; the health process reads it even while the loop is blocked.
# A record has a checksum, and an incomplete one is ignored, so neither side ever waits for the other.


SIZE = 1024 * 1024
_CHECK = struct.Struct("<I")
_RECORD = struct.Struct("<d?II")
_BODY_AT = _CHECK.size + _RECORD.size
_STARTING = b'{"ready": false, "reason": "the gate is starting"}\n'
_TOO_LONG = b'{"ready": %s, "reason": "too many units to list here; GET /units has them"}\n'


class PublishedStatus(NamedTuple):
    """`at`: when, of `time.monotonic`, which is one clock for all processes. `body` and header `lines`: what
    /readyz shows.
    """

    at: float
    ready: bool
    body: bytes
    lines: bytes = b""


class SharedStatus:
    """One record. `fd` is for the other process; without one it is created, with the state `starting`."""

    def __init__(self, fd: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # In memory and not on a disk: writing must never wait.
        self.fd = os.memfd_create("shared-status") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, SIZE)
        self._memory = mmap.mmap(self.fd, SIZE)
        self._last = PublishedStatus(clock(), False, _STARTING)
        if fd is None:
            self.publish(False, _STARTING)

    def publish(self, ready: bool, body: bytes, lines: bytes = b"") -> None:
        """Publish a status. Also called by the loop's timer, because an old status shows that the loop is
        blocked. After `close` it changes nothing: of a gate that fails at its start the timer may still run.
        """
        if self._memory.closed:
            return
        if len(lines) + len(body) > SIZE - _BODY_AT:
            body = _TOO_LONG % (b"true" if ready else b"false")
        record = _RECORD.pack(self._clock(), ready, len(lines), len(body)) + lines + body
        self._memory[: _CHECK.size + len(record)] = _CHECK.pack(zlib.crc32(record)) + record

    def read(self) -> PublishedStatus:
        """The last status, or the one before it while the last is just being written."""
        (check,) = _CHECK.unpack_from(self._memory)
        at, ready, lines, size = _RECORD.unpack_from(self._memory, _CHECK.size)
        record = self._memory[_CHECK.size : _BODY_AT + min(lines + size, SIZE)]
        if zlib.crc32(record) == check:
            shown = record[_RECORD.size :]
            self._last = PublishedStatus(at, ready, shown[lines:], shown[:lines])
        return self._last

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
        os.close(self.fd)


# Answers /livez and /readyz from a process of its own: at once, however busy the gate is.
#
# 1. It peeks at what a connection sends. Anything but a plain request for one of the two stays unread, and
#    the connection is passed to the gate for good.
# 2. It answers what the gate published last, or that the gate has published nothing for too long.
# 3. Connections are limited in number and idle time. It ends with the gate's process. When told to retire,
# it accepts no more, answers each connected client once more, and then ends.
# 4. It imports little and avoids OpenSSL, so it starts in 50 ms and takes 11 MB.


STALLED_S = 2.0
"""A gate that has published nothing for this long is blocked: not ready. It publishes every 0.25 s."""
DEAD_S = 10.0
"""After this long a restart is better: not alive."""

NICE = -10
HELD_MAX = 256
"""The most connections. A new one replaces the one that has been idle for longest."""
HEALTH_IDLE_S = 75.0
SWEEP_S = 1.0
RETIRE = b"r"
"""The gate sends this when another gate answers on the same listeners."""
_PEEK_BYTES = 8 * 1024
_DATE = "%a, %d %b %Y %H:%M:%S GMT"
"""RFC 9110, 5.6.7; `email.utils` has it as well, and takes 2 MB."""
_PHRASES = {200: "OK", 503: "Service Unavailable"}


class _Connection:
    """One connection, the unsent rest of its answer, and until when it may be idle."""

    __slots__ = ("due", "keep_alive", "sock", "unsent")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.due = 0.0
        self.unsent = b""
        self.keep_alive = True


class HealthProcess:
    """Answers on `listeners`; `gate` is a Unix socket that takes connections, and ends with the gate."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        gate: socket.socket,
        shared_status: SharedStatus,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listeners = listeners
        self._gate = gate
        self._shared_status = shared_status
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        # In the order of their last sign of life.
        self._connections: dict[_Connection, None] = {}
        self._swept_at = clock()
        self._retired = False

    def run(self) -> None:
        """Answer until the gate has ended."""
        self._listen()
        self._gate.setblocking(False)
        self._selector.register(self._gate, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(SWEEP_S):
                if key.data is not None:
                    key.data()
                elif self._status() == RETIRE:
                    self._retire()
                else:
                    self._close()
                    return
            self._sweep()

    def _status(self) -> bytes:
        """A message of the gate; empty: the gate has ended."""
        try:
            return self._gate.recv(len(RETIRE))
        except OSError:
            return b""

    def _retire(self) -> None:
        self._retired = True
        for listener in self._listeners:
            if listener in self._selector.get_map():
                self._selector.unregister(listener)
            listener.close()
        self._listeners = ()

    def _listen(self) -> None:
        for listener in self._listeners:
            if listener not in self._selector.get_map():
                self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # Out of descriptors or memory. The listener stays readable, so an immediate retry would spin.
            self._selector.unregister(listener)
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self._connections) >= HELD_MAX:
            self._drop(next(iter(self._connections)))
        connection = _Connection(sock)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._serve, connection))
        self._note(connection)
        # Most have sent their request by now.
        self._serve(connection)

    def _serve(self, connection: _Connection) -> None:
        """A client has sent something, or has room for the rest of an answer."""
        if connection not in self._connections:
            return
        try:
            if connection.unsent:
                self._send(connection)
            else:
                self._look(connection)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)

    def _look(self, connection: _Connection) -> None:
        data = connection.sock.recv(_PEEK_BYTES, socket.MSG_PEEK)
        asked = parse_health_request(data)
        if asked is not None:
            connection.sock.recv(asked.size)
            connection.unsent = self._answer(asked)
            connection.keep_alive = asked.keep_alive and not self._retired
            self._send(connection)
            return
        if data:
            # If even this cannot be sent, too many connections wait for the gate already.
            with suppress(OSError):
                socket.send_fds(self._gate, [b"."], [connection.sock.fileno()])
        self._drop(connection)

    def _send(self, connection: _Connection) -> None:
        with suppress(BlockingIOError):
            connection.unsent = connection.unsent[connection.sock.send(connection.unsent) :]
        if not connection.unsent and not connection.keep_alive:
            self._drop(connection)
            return
        event = selectors.EVENT_WRITE if connection.unsent else selectors.EVENT_READ
        key = self._selector.get_key(connection.sock)
        if key.events != event:
            self._selector.modify(connection.sock, event, key.data)
        self._note(connection)

    def _note(self, connection: _Connection) -> None:
        connection.due = self._clock() + HEALTH_IDLE_S
        self._connections.pop(connection, None)
        self._connections[connection] = None

    def _drop(self, connection: _Connection) -> None:
        del self._connections[connection]
        self._selector.unregister(connection.sock)
        connection.sock.close()

    def _sweep(self) -> None:
        """Once in a while: drop idle connections, and listen again where that was given up."""
        now = self._clock()
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        for connection in [connection for connection in self._connections if connection.due <= now]:
            self._drop(connection)
        self._listen()

    def _close(self) -> None:
        for connection in list(self._connections):
            self._drop(connection)
        for sock in (*self._listeners, self._gate):
            sock.close()
        self._selector.close()
        self._shared_status.close()

    def _answer(self, asked: HealthRequest) -> bytes:
        status, content_type, body, lines = self._livez() if asked.name == "livez" else self._readyz()
        head = (
            f"HTTP/1.1 {status} {_PHRASES[status]}\r\n"
            f"Date: {time.strftime(_DATE, time.gmtime())}\r\n"
            f"Content-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\n"
            f"Connection: {'keep-alive' if asked.keep_alive and not self._retired else 'close'}\r\n"
        )
        return head.encode() + lines + b"\r\n" + (b"" if asked.head_only else body)

    def _livez(self) -> tuple[int, str, bytes, bytes]:
        still_s = self._clock() - self._shared_status.read().at
        if still_s <= DEAD_S:
            return 200, "text/plain; charset=utf-8", b"ok\n", b""
        return 503, "text/plain; charset=utf-8", f"{_stalled(still_s)}; restart the gate\n".encode(), b""

    def _readyz(self) -> tuple[int, str, bytes, bytes]:
        status = self._shared_status.read()
        still_s = self._clock() - status.at
        if still_s <= STALLED_S:
            return (200 if status.ready else 503), "application/json", status.body, status.lines
        reason = f'{{"ready": false, "reason": "{_stalled(still_s)}"}}\n'
        return 503, "application/json", reason.encode(), b""


def _stalled(seconds: float) -> str:
    return f"the gate's event loop has been blocked for {seconds:.1f} s"


def main(fds: Sequence[int]) -> None:
    """`fds`: of the shared status, the gate, and the listeners."""
    # A stop signal may go to all processes of the gate; this one is needed until the gate has ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        # If allowed: it needs little CPU, but must not wait while the gate is busy.
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    shared_status, gate, *listeners = fds
    HealthProcess(
        [socket.socket(fileno=fd) for fd in listeners],
        socket.socket(fileno=gate),
        SharedStatus(shared_status),
    ).run()


if __name__ == "__main__":
    main([int(fd) for fd in sys.argv[1:]])
