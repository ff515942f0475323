"""Returns unused memory to the system. With a C library other than glibc it does nothing."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

LARGE_BLOCK_BYTES = 4 << 20
"""To parse a body takes a block of thirteen times its size: up to 300 kB one that is used again."""
KEPT_BYTES = 8 << 20
"""So much that is free at the end of the heap is kept."""
HEAP_BYTES_MAX = 192 << 20
"""Trimming a larger heap takes more than some 25 ms."""
CROWD = 64
"""After this many clients have left, trimming is worthwhile, …"""
FEW = 8
"""… once at most this many leave within a tick."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of malloc.h, for mallopt(3)."""


def return_large_blocks() -> None:
    """Have the C library return each block of `LARGE_BLOCK_BYTES` or more to the system when it is freed, and
    what is free at the end of the heap beyond `KEPT_BYTES`.

    glibc does so at first, but keeps ever larger blocks once some were freed: after a wave of large bodies a
    process would stay as large as it has ever been. Smaller blocks must not be returned each time: the system
    clears every page of a new one, which for a body of 200 kB takes longer than all the rest.
    """
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


class SmallBlocks:
    """Trims the heap once many clients have left: by itself the C library returns only the end of its heap,
    and one block in use there keeps everything below it.

    `clients` says how many there are.
    """

    def __init__(self, clients: Callable[[], int]) -> None:
        self._clients = clients
        self._most = self._last = 0
        self._heap_begin = _heap_end()

    def tick(self, _now: float) -> None:
        """Trim the heap if half of the most clients have left, and hardly any are leaving now."""
        before, self._last = self._last, self._clients()
        self._most = max(self._most, self._last)
        if self._most >= CROWD and self._last <= self._most // 2 and before - self._last <= FEW:
            self._most = self._last
            if _heap_end() - self._heap_begin <= HEAP_BYTES_MAX:
                return_small_blocks()


def return_small_blocks() -> None:
    """Have the C library return all unused whole pages to the system."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def _heap_end() -> int:
    """Where the heap ends now (sbrk(2))."""
    sbrk = ctypes.CDLL(None).sbrk
    sbrk.restype = ctypes.c_ssize_t
    end: int = sbrk(ctypes.c_ssize_t(0))
    return end
