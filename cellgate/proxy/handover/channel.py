"""The messages between a gate and its successor, over a pair of Unix sockets.

1. The successor says HELLO once it has read its configuration.
2. The gate sends the listeners, and as JSON their names and the state of its units.
3. The successor accepts clients, and sends READY.
4. The gate accepts no more, and sends what has changed since: drained units.

Documents are preceded by their length, 4 bytes in network order. A side that closes early has failed.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence
from typing import Any

import orjson

VARIABLE = "CELLGATE_HANDOVER"
"""Has the descriptor of the successor's socket."""
HELLO, READY = b"h", b"r"
FDS_MAX = 64
ANSWER_S = 10.0
"""How long a living gate may take to answer."""
_LENGTH = struct.Struct("!I")


def frame_document(document: Any) -> bytes:
    """A document as it is sent."""
    body = orjson.dumps(document)
    return _LENGTH.pack(len(body)) + body


async def send(sock: socket.socket, document: Any, listeners: Sequence[socket.socket] = ()) -> None:
    """Send a document, and listeners along with it. Raises OSError."""
    data = frame_document(document)
    # Descriptors go with the first bytes; these few always find room.
    socket.send_fds(sock, [data[: _LENGTH.size]], [listener.fileno() for listener in listeners])
    await asyncio.get_running_loop().sock_sendall(sock, data[_LENGTH.size :])


def receive(sock: socket.socket) -> tuple[Any, list[socket.socket]]:
    """Wait for a document and what comes along with it. Raises OSError, and ValueError when it is none."""
    head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, FDS_MAX)
    listeners = [socket.socket(fileno=fd) for fd in fds]
    for listener in listeners:
        listener.set_inheritable(False)
        listener.setblocking(False)
    if len(head) < _LENGTH.size:
        raise ConnectionError("the previous gate has closed the connection")
    left, pieces = _LENGTH.unpack(head)[0], []
    while left:
        piece = sock.recv(min(left, 1 << 20))
        if not piece:
            raise ConnectionError("the previous gate has closed the connection")
        pieces.append(piece)
        left -= len(piece)
    return orjson.loads(b"".join(pieces)), listeners
