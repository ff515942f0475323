"""What the gate uses, all its processes together: read from /proc, also while nobody asks."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from loadtests.kit import processes

_LOOK_S = 0.05
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU time of a process, its threads, its live children and those of it that have ended."""
    for _ in range(3):
        # A child may end between being listed and being read.
        with suppress(ProcessLookupError, FileNotFoundError):
            return processes.cpu_s(pid) + _ended_children_s(pid)
    return _ended_children_s(pid)


def resident_mb(pid: int) -> float:
    """Resident memory of a process and its live children; 0 when it has ended."""
    for _ in range(3):
        with suppress(ProcessLookupError, FileNotFoundError):
            return processes.resident_mb(pid)
    return 0.0


def queued_s(pid: int) -> float:
    """How long the main thread of a process could have run, and had no processor (proc(5), schedstat)."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def _ended_children_s(pid: int) -> float:
    """`cutime` + `cstime` of /proc/PID/stat (proc(5), fields 16 and 17)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / _TICKS_PER_S


class Peak:
    """The most memory a process had while inside."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.most_mb = resident_mb(pid)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.most_mb = max(self.most_mb, resident_mb(self._pid))
            time.sleep(_LOOK_S)
