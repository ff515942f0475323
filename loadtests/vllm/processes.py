"""The processes below this one, read from /proc, and how they end.

Each is started in a session of its own, so a child's pid names the group of all that it starts in turn. What
must stay true: no child is reaped before its group is empty, so a group id never means somebody else's.
"""

import contextlib
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

TERM_GRACE_S = 10.0
KILL_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Process:
    """One process. `title` is its command line, or what it calls itself; it has ended if not `alive`."""

    pid: int
    parent: int
    group: int
    alive: bool
    title: str


def children() -> set[int]:
    """Return the pids of this process's own children, ended ones included."""
    return {process.pid for process in _all() if process.parent == os.getpid()}


def living(groups: Collection[int]) -> list[Process]:
    """Return the processes of these groups that have not ended, by pid."""
    return [process for process in _all() if process.alive and process.group in groups]


def stop(groups: Collection[int]) -> None:
    """End every process of these groups: asked first, killed after TERM_GRACE_S, then reaped.

    A stopped process hears a request to end only once it continues.
    """
    _signal(groups, signal.SIGTERM)
    _signal(groups, signal.SIGCONT)
    if not _gone_within(TERM_GRACE_S, groups):
        _signal(groups, signal.SIGKILL)
        _gone_within(KILL_GRACE_S, groups)
    for group in groups:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(group, os.WNOHANG)


def _signal(groups: Collection[int], number: signal.Signals) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)


def _gone_within(seconds: float, groups: Collection[int]) -> bool:
    deadline = time.monotonic() + seconds
    while living(groups):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _all() -> list[Process]:
    """Return every process of the machine, by pid."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # It ended while we looked.
            # See proc(5): "pid (name) state ppid pgrp …"; the name may hold blanks and brackets.
            state, parent, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found.append(Process(int(folder.name), int(parent), int(group), state not in "ZX", title))
    return sorted(found, key=lambda process: process.pid)
