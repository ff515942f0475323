"""Sockets of clients that do not read, and how they leave."""

import socket
import struct

RECEIVE_BYTES = 4096
"""The smallest receive buffer: little is taken for a client that does not read."""
_PATIENCE_S = 20.0
_NO_LINGER = struct.pack("ii", 1, 0)


def dial(port: int, data: bytes = b"", *, receive_bytes: int | None = RECEIVE_BYTES) -> socket.socket:
    """A connection that has sent `data`; from then on it does not block. `receive_bytes` None: the system's
    own buffer. Raises OSError.
    """
    raw = socket.socket()
    try:
        if receive_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        raw.settimeout(_PATIENCE_S)
        raw.connect(("127.0.0.1", port))
        raw.sendall(data)
    except OSError:
        raw.close()
        raise
    raw.setblocking(False)
    return raw


def reset(raw: socket.socket) -> None:
    """Leave with a reset."""
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    raw.close()
