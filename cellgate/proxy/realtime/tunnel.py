"""Bytes of a WebSocket, passed on as they come, with each side's backpressure mirrored to the other.

The gate reads no messages. It only knows where the frames of the unit end (RFC 6455, 5.2), so that it can say
itself that it closes.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import cast

from cellgate.proxy.logs.defects import Guarded, guarded
from cellgate.proxy.wire.tcp import bound_held, bound_unsent

GOING_AWAY, POLICY, TRY_AGAIN = 1001, 1008, 1013
"""Status codes of a close (RFC 6455, 7.4.1; IANA's registry): the gate stops, or wants it to end; the unit
went down."""
_FRAME_HEAD = 2
_LENGTH_BYTES = {126: 2, 127: 8}
_MASKED, _LENGTH = 0x80, 0x7F


def close_frame(code: int, reason: bytes) -> bytes:
    """A close, as a server sends it."""
    return b"\x88%c%b%b" % (2 + len(reason), struct.pack("!H", code), reason)


class FrameEnds:
    """Where the frames of one direction end."""

    def __init__(self) -> None:
        self._head = b""
        self._left = 0

    @property
    def is_between(self) -> bool:
        """Whether the next byte begins a frame."""
        return not self._left and not self._head

    def feed(self, data: bytes) -> None:
        """Bytes that were passed on."""
        at = 0
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
                continue
            missing = self._head_size() - len(self._head)
            self._head += data[at : at + missing]
            at += missing
            if len(self._head) >= self._head_size():
                self._left, self._head = self._payload_size(), b""

    def _head_size(self) -> int:
        if len(self._head) < _FRAME_HEAD:
            return _FRAME_HEAD
        mask = 4 if self._head[1] & _MASKED else 0
        return _FRAME_HEAD + _LENGTH_BYTES.get(self._head[1] & _LENGTH, 0) + mask

    def _payload_size(self) -> int:
        short = self._head[1] & _LENGTH
        size = _LENGTH_BYTES.get(short, 0)
        return int.from_bytes(self._head[2 : 2 + size], "big") if size else short


class Side(asyncio.Protocol):
    """One side of a tunnel: `other` gets its bytes. `on_end` is called once when it is gone, `on_data` is
    given its bytes first and says what of them is passed on.
    """

    def __init__(
        self, on_data: Callable[[bytes], bytes], on_end: Callable[[Side], None], owner: Guarded
    ) -> None:
        self._on_data = on_data
        self._on_end = on_end
        self._owner = owner
        self.other: Side | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        bound_unsent(self.transport)
        bound_held(self.transport)

    def data_received(self, data: bytes) -> None:
        guarded(self._owner, self._take, data)

    def _take(self, data: bytes) -> None:
        passed = self._on_data(data)
        if passed and self.other is not None:
            self.other.write(passed)

    def write(self, data: bytes) -> None:
        """Send, if it is still there."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, _exc: Exception | None) -> None:
        self.transport = None
        guarded(self._owner, self._on_end, self)

    def close(self) -> None:
        """Send what is left, and close."""
        if self.transport is not None:
            self.transport.close()
