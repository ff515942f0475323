"""How much memory this process may use, and what becomes of what it has used."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

LARGE_BLOCK_BYTES = 8 * 1024
_M_MMAP_THRESHOLD = -3
"""Of malloc.h, for mallopt(3)."""


def quarter_of_memory() -> int:
    """A quarter of the machine's memory, or of the control group's limit if that is smaller, in bytes."""
    machine = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min([machine, *cgroup_limits(Path("/"))]) // 4


def cgroup_limits(root: Path) -> Iterator[int]:
    """The limits in bytes set on our control group and on those it is in (cgroups(7), version 2 and 1)."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            mount, limit = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, limit = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        inner = Path(group.lstrip("/"))
        for level in (inner, *inner.parents):
            with contextlib.suppress(OSError, ValueError):  # Absent at the root; "max" where none is set.
                yield int((mount / level / limit).read_text())


def return_large_blocks() -> None:
    """Have the C library give each block of `LARGE_BLOCK_BYTES` or more back to the system when it is freed.

    glibc does so at first, but keeps ever larger blocks once some were freed: after a wave of large bodies a
    process would stay as large as it has ever been. Other C libraries are left as they are.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
