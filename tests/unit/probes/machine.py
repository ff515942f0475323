"""A machine for the agent: a /proc of plain files, and a clock set by hand."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cellgate.probes.agent import SETTLE_S, Proc, ProcessWatch, Status

SETTLED_S = SETTLE_S + 1.5
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
FIRST = 50_000_000  # No process of this machine has such a number.


class Machine:
    """A /proc that tests write, and the time since boot."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now_s = 1000.0
        self._next = FIRST
        (root / "sys/kernel/random").mkdir(parents=True)
        (root / "sys/kernel/random/boot_id").write_text("boot-1\n")
        for _ in range(5):
            self.spawn("idle daemon")

    def watch(self, *targets: Any) -> ProcessWatch:
        return ProcessWatch(targets, Proc(str(self.root)), lambda: self.now_s)

    def spawn(self, command: str, parent: int = 1, name: str = "python", pid: int = 0) -> int:
        """Start a process; the words of `command` are its arguments."""
        pid = pid or self._next
        self._next = max(self._next, pid) + 1
        directory = self.root / str(pid)
        (directory / "fd").mkdir(parents=True, exist_ok=True)
        (directory / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")
        (directory / "limits").write_text(
            "Max open files            10                   20             files\n"
        )
        (directory / "start").write_text(str(int(self.now_s * TICKS_PER_S)))
        (directory / "parent").write_text(str(parent))
        self.set(pid, name=name)
        return pid

    def set(self, pid: int, state: str = "S", cpu_ticks: int = 0, name: str = "python") -> None:
        """Let a process be in another state."""
        directory = self.root / str(pid)
        parent, start = ((directory / part).read_text() for part in ("parent", "start"))
        numbers = f"{parent} 0 0 0 0 0 0 0 0 0 {cpu_ticks} 0 0 0 20 0 1 0 {start} 0 0"
        (directory / "stat").write_text(f"{pid} ({name}) {state} {numbers}\n")
        if state == "Z":
            (directory / "cmdline").write_bytes(b"")

    def end(self, *pids: int) -> None:
        """Let processes be gone."""
        for pid in pids:
            (self.root / str(pid)).rename(self.root / f"ended-{pid}-{self._next}")
            self._next += 1

    def open(self, pid: int, *links: str) -> None:
        """Let a process hold these files open, and no others."""
        directory = self.root / str(pid) / "fd"
        for old in directory.iterdir():
            old.unlink()
        for number, link in enumerate(links):
            (directory / str(number)).symlink_to(link)

    def run(
        self, watch: ProcessWatch, for_s: float, meanwhile: Callable[[], object] = lambda: None
    ) -> Status:
        """Look ten times a second; what was seen last."""
        for _ in range(round(for_s * 10)):
            self.now_s += 0.1
            meanwhile()
            status = watch.look()
        return status


def pids(status: Status) -> list[int]:
    """Which processes are needed."""
    return [needed.pid for needed in status.needed]


API, WORKER_0, WORKER_1 = FIRST + 5, FIRST + 6, FIRST + 7
