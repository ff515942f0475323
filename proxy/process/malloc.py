"""What becomes of memory that was used."""

from __future__ import annotations

import contextlib
import ctypes

LARGE_BLOCK_BYTES = 32 * 1024
_M_MMAP_THRESHOLD = -3
"""Of malloc.h, for mallopt(3)."""


def return_large_blocks() -> None:
    """Have the C library give each block of `LARGE_BLOCK_BYTES` or more back to the system when it is freed.

    glibc does so at first, but keeps ever larger blocks once some were freed: after a wave of large bodies a
    process would stay as large as it has ever been. Other C libraries are left as they are.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
