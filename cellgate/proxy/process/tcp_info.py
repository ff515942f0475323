"""What the kernel knows of a TCP connection, and bounds of what it may keep. For other sockets it does
nothing.
"""

from __future__ import annotations

import asyncio
import socket
import struct

UNSENT_BYTES = 64 * 1024
"""The kernel takes no more than this of what it cannot send yet. By itself it takes up to 4 MB a connection:
more than any stream of tokens, so that a client that never reads would never hold back its unit.
"""
HELD_BYTES = 16 * 1024
"""Bytes in the loop's buffer, beyond those in the kernel, from which on the unit of a slow client is
paused.
"""
_NO_LINGER = struct.pack("ii", 1, 0)
_TCP_GONE = (7, 8)
"""States of a TCP connection (tcp_states.h): reset, and closed by the other side."""
_BYTES = 256
_ACKED, _SENT = struct.Struct("Q"), struct.Struct("QQ")
_ACKED_AT, _SENT_AT = 120, 200
"""Where `struct tcp_info` of Linux (uapi/linux/tcp.h) has tcpi_bytes_acked, which counts the SYN as well,
and tcpi_bytes_sent with tcpi_bytes_retrans behind it."""
_QUEUED = struct.Struct("I")
_QUEUED_AT = 24
"""Where it has tcpi_unacked, which of a listener is how many connections wait to be accepted."""


def bound_unsent(transport: asyncio.WriteTransport) -> None:
    """Have the kernel take no more than `UNSENT_BYTES` that it cannot send yet."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def bound_held(transport: asyncio.WriteTransport) -> None:
    """Have the loop hold no more than `HELD_BYTES` before it says so."""
    if transport.get_extra_info("socket") is not None:
        transport.set_write_buffer_limits(high=HELD_BYTES)


def has_left(transport: asyncio.BaseTransport) -> bool:
    """Whether the other side of a connection that is not read has closed it: the loop does not look there."""
    sock = transport.get_extra_info("socket")
    return sock is not None and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _TCP_GONE


def accept_queue(listener: socket.socket) -> int:
    """How many connections wait on a listener; 1 if that is unknown."""
    size = _QUEUED_AT + _QUEUED.size
    try:
        info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
        (queued,) = _QUEUED.unpack_from(info, _QUEUED_AT)
    except (OSError, AttributeError, struct.error):
        return 1
    return int(queued)


def reset(transport: asyncio.WriteTransport) -> None:
    """Reset a connection: a client that reads until the close would take a normal one for a clean end."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()


def acknowledged(transport: asyncio.BaseTransport) -> int | None:
    """How many bytes the other side has acknowledged; None if that is unknown."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES)
        (acked,) = _ACKED.unpack_from(info, _ACKED_AT)
    except (OSError, AttributeError, struct.error):
        return None
    return int(acked)


def has_unacked(transport: asyncio.BaseTransport) -> bool:
    """Whether the other side has yet to acknowledge bytes that were sent. False if that is unknown."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return False
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _QUEUED_AT + _QUEUED.size)
        (unacked,) = _QUEUED.unpack_from(info, _QUEUED_AT)
    except (OSError, AttributeError, struct.error):
        return False
    return bool(unacked)


def took_all(transport: asyncio.BaseTransport) -> bool:
    """Whether a unit received all of a request before it closed the connection. True if that is unknown.

    A server that had closed a kept connection before a request came never acknowledges that request: the
    connection was stale. One that has acknowledged it may have died of it. (A server may also close what it
    takes for idle while a request waits to be read, which cannot be seen: so the request may be sent once
    more, and only then has the unit died of it.)
    """
    sock = transport.get_extra_info("socket")
    if sock is None:
        return True
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES)
        (acked,), (sent, again) = _ACKED.unpack_from(info, _ACKED_AT), _SENT.unpack_from(info, _SENT_AT)
    except (OSError, AttributeError, struct.error):
        # No TCP, or another system than Linux.
        return True
    return bool(acked > sent - again)
