"""Processes of the load tools: start, wait until they answer, read what they use, end them by pid."""

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from loadtests.wire.blocking import answers

READY_TIMEOUT_S = 60.0
"""A crowded machine takes that long to start one of several gates."""
STOP_TIMEOUT_S = 10.0
FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
"""The most descriptors that a process may have here."""

_FIRST_NICE = -10

_libc = ctypes.CDLL(None, use_errno=True)


def raise_files(most: int = FILES) -> None:
    """Let this process, and those it starts, have so many descriptors, or as many as there may be."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, FILES), FILES))


def put_first(pid: int) -> None:
    """Let a process run before what else this machine does, where the system allows that.

    Linux compares sessions first (sched(7), autogroup), then the processes of one.
    """
    if os.geteuid() != 0:
        return
    os.setpriority(os.PRIO_PROCESS, pid, _FIRST_NICE)
    if os.getsid(pid) == pid:
        with suppress(OSError):
            Path(f"/proc/{pid}/autogroup").write_text(str(_FIRST_NICE))


def cpu_s(pid: int) -> float:
    """User and system CPU time of a process, its threads and its live children, in seconds.

    POSIX `clock_getcpuclockid` reads the account behind utime + stime of /proc/PID/stat, in nanoseconds
    where those are in ticks.
    """
    clock = ctypes.c_int()
    error = _libc.clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise ProcessLookupError(error, f"no CPU clock of process {pid}: {os.strerror(error)}")
    return time.clock_gettime(clock.value) + sum(cpu_s(child) for child in children(pid))


def resident_mb(pid: int) -> float:
    """Resident memory of a process and its live children, in MB; what they share counts for each."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6 + sum(map(resident_mb, children(pid)))


def sockets(pid: int) -> set[str]:
    """The inodes of all sockets that a process and its live children have open, as /proc/net/tcp has them."""
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(os.readlink(descriptor))
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    return own.union(*map(sockets, children(pid)))


def children(pid: int) -> list[int]:
    """The processes that a process has started and not waited for; none of one that has ended."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, task.read_text().split())
    return found


def is_running(pid: int) -> bool:
    """Whether a process still executes; one that has ended and nobody has waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def machine_cpu_s() -> float:
    """CPU time for which all processors together were busy since boot, in seconds, to a clock tick."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def usual_or_free(port: int) -> int:
    """This port of 127.0.0.1 when nothing listens on it, else a free one."""
    with socket.socket() as probe:
        # Connections that have ended are in nobody's way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return free_port()
        return port


def start(command: Sequence[str], log: Path, folder: Path | None = None) -> subprocess.Popen[bytes]:
    """Start `command` in `folder`, or here, out of reach of Ctrl-C. What it prints goes to `log`."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            start_new_session=True,
        )


@contextmanager
def announcing(module: str, *arguments: object) -> Iterator[tuple[int, Any]]:
    """`python -m module`, once it has said on a line of JSON where it listens: its pid, and what it said.

    Raises RuntimeError when it ends instead.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{module} ended early, code {process.wait()}")
            yield process.pid, json.loads(line)
        finally:
            stop(process)


def wait_ready(process: subprocess.Popen[bytes], port: int, path: str, log: Path) -> None:
    """Return when GET `path` on `port` is a 200.

    Raises RuntimeError with the end of `log` if the process ends, or is not ready after `READY_TIMEOUT_S`.
    """
    give_up_at = time.monotonic() + READY_TIMEOUT_S
    while process.poll() is None and time.monotonic() < give_up_at:
        if answers(f"http://127.0.0.1:{port}{path}", silence_s=1.0):
            return
        time.sleep(0.05)
    how = "is not ready" if process.poll() is None else f"ended with {process.returncode}"
    raise RuntimeError(f"{process.args!r} {how} (GET {path} on port {port}); it printed:\n{tail(log)}")


@contextmanager
def serving(command: Sequence[str], port: int, path: str, log: Path) -> Iterator[int]:
    """A process whose output goes to `log`, once GET `path` on `port` is a 200: its pid."""
    process = start(command, log)
    try:
        wait_ready(process, port, path, log)
        yield process.pid
    finally:
        stop(process)


def end_on_sigterm() -> None:
    """As Ctrl-C does, so that what was started is ended; the exit code is the shell's for SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def tail(log: Path) -> str:
    """The end of what a process printed."""
    return log.read_text(errors="replace")[-2000:]


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that `start` made: ask, then kill."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def send(pid: int, number: signal.Signals) -> None:
    """Signal a process that may have ended."""
    if is_running(pid):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def end_all(pids: Sequence[int]) -> None:
    """Kill these processes, and what they are starting."""
    for pid in pids:
        for child in children(pid):
            send(child, signal.SIGKILL)
        send(pid, signal.SIGKILL)
