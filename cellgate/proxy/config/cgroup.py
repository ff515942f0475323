"""How much memory this process may use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


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
