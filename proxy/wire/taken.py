"""Whether a unit took a request before it ended the connection: what its kernel has acknowledged.

A server that had closed a kept connection before a request came never acknowledges that request: the
connection was stale. One that has acknowledged it may have died of it. (A server may also close what it takes
for idle while a request waits to be read; that cannot be told, and is rare: engines close after 5 s, and
no connection is used here that has been idle for 4.)
"""

from __future__ import annotations

import asyncio
import socket
import struct

_BYTES = 256
_ACKED, _SENT = struct.Struct("Q"), struct.Struct("QQ")
_ACKED_AT, _SENT_AT = 120, 200
"""Where `struct tcp_info` of Linux (uapi/linux/tcp.h) has tcpi_bytes_acked, which counts the SYN as well,
and tcpi_bytes_sent with tcpi_bytes_retrans behind it."""


def took_all(transport: asyncio.BaseTransport) -> bool:
    """Whether all that was sent was acknowledged. True where that cannot be told."""
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
