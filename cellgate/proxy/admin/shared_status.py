"""The status that the gate published last, in memory shared with its health process.

The event loop writes it without a system call; the health process reads it even while the loop is blocked. A
record has a checksum, and an incomplete one is ignored, so neither side ever waits for the other.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable
from typing import NamedTuple

SIZE = 1024 * 1024
_CHECK = struct.Struct("<I")
_RECORD = struct.Struct("<d?II")
_BODY_AT = _CHECK.size + _RECORD.size
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
    """One record. `fd` is for the other process; without one a new record is created, with the state
    `starting`.
    """

    def __init__(self, fd: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # In memory and not on a disk: writing must never wait.
        self.fd = os.memfd_create("shared-status") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, SIZE)
        self._memory = mmap.mmap(self.fd, SIZE)
        self._last = PublishedStatus(clock(), False, b"")
        if fd is None:
            self.publish(False, b'{"ready": false, "reason": "the gate is starting"}\n')

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
