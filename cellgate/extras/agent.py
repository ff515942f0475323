"""`cellgate agent`: watches the processes that a node needs and reports at once when one stops working.

One file, standard library only, Python 3.8 or later: it also runs as `python agent.py` in an engine's image.
1. A process is gone only when the kernel says so; what the agent cannot read keeps its last state.
2. Command lines never leave the machine, because they may hold keys: only names, numbers and hashes do.
3. A client that does not read, or sends garbage, costs a bounded amount of memory and is dropped.
   docs/agent.md has the rule that distinguishes needed processes from helpers, and the protocol.

In this order: `Agent`, `Proc`, `Pattern`, `ProcessWatch`, `stack_of`, `Reporter`, `Client`, `UsageError`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import ipaddress
import json
import os
import re
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

LOOK_S = 0.1
NICE = -10
BEAT_S = 0.25
HEARTBEAT = b'{"cellgate_agent":1}'
"""The line that means: nothing has changed."""
PRESSURE = 0.9
"""The share of its limit of open files from which on a process is about to fail."""

SCAN_S = 1.0
SETTLE_S = 3.0
"""Processes that match a pattern are needed once no new one has started for this long."""
PATIENCE_S = 10.0
"""After this long those that have settled are needed, even if others still start and end."""
DISTRUST_S = 60.0
"""A process that is gone for this long while the others run may be a helper: canaries then decide."""
COUNT_FILES_S = 5.0
NEEDED_MAX = 256
AGENT_SHOWN_MAX = 64
NAMED_MAX = 3
SAID_MAX = 80
"""Characters of a name or a value in a report."""
ALONE_EXIT = 3
"""With fewer visible processes than this, the agent may be in its own namespace."""
AGENT_HEAD_BYTES = 8 * 1024
HEAD_S = 5.0
AGENT_UNREAD_BYTES = 64 * 1024
CLIENTS_MAX = 128
TOKEN_VARIABLE = "CELLGATE_AGENT_TOKEN"
IMAGE_VARIABLE = "CELLGATE_IMAGE_DIGEST"
"""The digest of the engine's image: nothing inside a container knows it."""

RAS_ADDRESS = ("localhost", 28028)
REPORT_S = 9.0
"""A report that takes longer is not awaited: a driver may keep its reader waiting without an end."""
RAS_S = 7.0
RAS_WAIT_S = 2
"""How long NCCL's RAS service waits for ranks that do not answer."""
RAS_BYTES = 4 << 20
COMMUNICATORS_MAX = 8
RANKS_MAX = 16
COUNTERS_MAX = 1024
FLAGS_MAX = 128
ANCESTORS_MAX = 8

_AGENT_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")

# State of a process -> what it means once it has lasted this long. A tracer (a profiler, a debugger) stops a
# process for moments; a disk or a driver may keep one waiting for a while.
_CONDITIONS: dict[str, tuple[str, float]] = {
    "X": ("gone", 0.0),
    "Z": ("zombie", 0.0),
    "T": ("stopped", 0.0),
    "t": ("stopped", 0.5),
    "D": ("blocked", 5.0),
}
_SAID = {
    "gone": "gone",
    "zombie": "dead, a zombie",
    "stopped": "stopped",
    "blocked": "waiting in the kernel for 5 s without using any CPU",
}
_LOST = ("X", "Z")

# Processes that match a pattern only because they start, wrap or serve the one that is meant.
_WRAPPERS = frozenset(
    "sh bash dash ash zsh ksh tini dumb-init docker-init catatonit timeout sudo su".split()  # noqa: SIM905
)
_HELPERS = re.compile(r"--match\b|multiprocessing\.(resource_tracker|forkserver)|compile_worker")


class Agent:
    """Checks the processes ten times a second and reports to its clients."""

    def __init__(
        self, watch: ProcessWatch, token: str = "", ras: tuple[str, int] = RAS_ADDRESS, root: str = "/"
    ) -> None:
        self._watch = watch
        self._token = token
        self._ras = ras
        self._proc, self._sysfs = Proc(os.path.join(root, "proc")), os.path.join(root, "sys")
        self.clients: set[Client] = set()
        self.status = watch.look()
        self.reporter = Reporter(self._compose)

    async def run(self, host: str, port: int) -> None:
        """Serve until SIGTERM or SIGINT. Raises OSError when the address is not available."""
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        server = await loop.create_server(lambda: Client(self), host, port)
        for sock in server.sockets or ():
            _log("listens on {}:{}".format(*sock.getsockname()[:2]))
        _log(self.status.reason)
        works = (_each(LOOK_S, self._look), _each(BEAT_S, self._beat))
        tasks = [loop.create_task(work) for work in works]
        await stopped.wait()
        for task in tasks:
            task.cancel()
        server.close()
        for client in list(self.clients):
            client.transport.abort()

    def admits(self, fields: list[bytes]) -> bool:
        """Whether a request with these header lines may watch."""
        given = b""
        for field in fields:
            name, _, value = field.partition(b":")
            if name.strip().lower() == b"authorization":
                given = value.strip()
        return not self._token or hmac.compare_digest(given, b"Bearer " + self._token.encode())

    def _compose(self, of_ranks: bool) -> dict[str, Any]:
        """A report; called in another thread."""
        pids = [needed.pid for needed in self.status.needed]
        report: dict[str, Any] = {
            "stack": stack_of(self._proc, self._sysfs, pids, self._token.encode()),
            "counters": counters_of(self._sysfs),
            "addresses": self._proc.addresses(),
        }
        if of_ranks:
            report["ranks"] = ranks_of(self._ras)
        return report

    def _look(self) -> None:
        before, self.status = self.status, self._watch.look()
        changed = self.status[:3] != before[:3]
        if changed:
            _log(self.status.reason)
        # Lasting pressure is reported each time it is measured.
        pressed = max(self.status.open_files or 0.0, before.open_files or 0.0) >= PRESSURE
        if changed or (pressed and self.status.counted_at != before.counted_at):
            self._tell(chunk(self.status.line()))

    def _beat(self) -> None:
        self._tell(_BEAT_CHUNK)
        too_old = time.monotonic() - HEAD_S
        for client in list(self.clients):
            if not client.is_served and client.since < too_old:
                client.transport.abort()

    def _tell(self, data: bytes) -> None:
        for client in list(self.clients):
            if client.watching:
                client.send(data)


def _is_wrapper(argv: Sequence[str]) -> bool:
    return os.path.basename(argv[0]).lstrip("-") in _WRAPPERS


# -- what the kernel says ----------------------------------------------------------------------------------


class Stat(NamedTuple):
    """One process. `start`, in clock ticks since boot, distinguishes it from others with the same number."""

    name: str
    state: str
    parent: int
    cpu_s: float
    start: int


class Proc:
    """Reads a proc(5) file system. Raises OSError for what it cannot read."""

    def __init__(self, root: str = "/proc") -> None:
        self._root = root

    def boot_id(self) -> str:
        """Changes when the machine reboots; empty if the kernel does not provide it."""
        try:
            return self._read("sys/kernel/random/boot_id").decode().strip()
        except OSError:
            return ""

    def stat(self, pid: int) -> Stat | None:
        """The process as it is now; None when there is none."""
        try:
            text = self._read(f"{pid}/stat").decode("utf-8", "replace")
        except (FileNotFoundError, ProcessLookupError):
            return None
        # The name stands in parentheses and may itself hold some; what follows are plain fields.
        head, _, tail = text.rpartition(")")
        fields = tail.split()
        if len(fields) < 20:
            return None
        cpu_s = (int(fields[11]) + int(fields[12])) * _AGENT_TICK_S
        name = "".join(char if char.isprintable() else "?" for char in head.partition("(")[2])
        return Stat(name, fields[0], int(fields[1]), cpu_s, int(fields[19]))

    def commands(self) -> dict[int, list[str]]:
        """The arguments of every process that has some: not zombies or kernel threads."""
        found = {}
        for pid in self._pids():
            try:
                argv = self._read(f"{pid}/cmdline").decode("utf-8", "replace").rstrip("\0").split("\0")
            except OSError:
                continue
            if argv != [""]:
                found[pid] = argv
        return found

    def arguments(self, pid: int) -> list[str]:
        """The arguments of one process; none when there is no such process."""
        try:
            return self._read(f"{pid}/cmdline").decode("utf-8", "replace").rstrip("\0").split("\0")
        except OSError:
            return []

    def packages(self, pid: int) -> Iterator[tuple[str, str]]:
        """Name and version of the Python packages beside the libraries that a process has loaded."""
        with suppress(OSError):  # It has ended, or belongs to another user.
            directories = set(re.findall(rb"(/\S*/(?:site|dist)-packages)/", self._read(f"{pid}/maps")))
            for directory in sorted(directories):
                path = os.path.join(self._root, str(pid), "root", os.fsdecode(directory).lstrip("/"))
                for entry in sorted(os.listdir(path)):
                    if entry.endswith(".dist-info"):
                        name, _, version = entry[: -len(".dist-info")].partition("-")
                        yield name.lower(), version

    def addresses(self) -> list[str]:
        """The IP addresses of this machine, without those of its loopback."""
        found: set[str] = set()
        with suppress(OSError):
            text = self._read("net/fib_trie").decode("utf-8", "replace")
            found |= set(re.findall(r"\|-- (\d[\d.]+)\n +/32 host LOCAL", text))
        with suppress(OSError, ValueError):
            for line in self._read("net/if_inet6").decode("utf-8", "replace").splitlines():
                found.add(str(ipaddress.IPv6Address(bytes.fromhex(line[:32]))))
        return sorted(found - {"::1"} - {ip for ip in found if ip.startswith("127.")})[:AGENT_SHOWN_MAX]

    def nvidia_driver(self) -> str:
        """The version of NVIDIA's kernel module; empty without one."""
        with suppress(OSError):
            found = re.search(rb"Kernel Module.*?\s(\d+\.[\d.]+)", self._read("driver/nvidia/version"))
            return found.group(1).decode() if found else ""
        return ""

    def file_use(self, pid: int) -> float | None:
        """Open files as a share of the limit; None when this agent may not know."""
        try:
            limits = self._read(f"{pid}/limits").decode()
            soft = re.search(r"^Max open files +(\d+)", limits, re.M)
            path = os.path.join(self._root, str(pid), "fd")
            # Since Linux 6.2 the directory's size is the count.
            opened = os.stat(path).st_size or len(os.listdir(path))
        except OSError:
            return None
        return opened / max(1, int(soft.group(1))) if soft else 0.0

    def listening(self, port: int) -> set[str]:
        """The links of the sockets that listen on a TCP port, as they stand in /proc/PID/fd."""
        found = set()
        for table in ("net/tcp", "net/tcp6"):
            try:
                rows = [line.split() for line in self._read(table).decode().splitlines()[1:]]
            except OSError:
                continue
            found |= {
                f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")
            }
        return found

    def holders(self, links: set[str]) -> set[int]:
        """The processes that have one of these files open, as far as this agent may inspect them."""
        return {pid for pid in self._pids() if links and not links.isdisjoint(self._links(pid))}

    def _links(self, pid: int) -> set[str]:
        directory, links = os.path.join(self._root, str(pid), "fd"), set()
        with suppress(OSError):  # It has ended, or belongs to another user.
            for name in os.listdir(directory):
                links.add(os.readlink(os.path.join(directory, name)))
        return links

    def _pids(self) -> list[int]:
        return [int(name) for name in os.listdir(self._root) if name.isdigit()]

    def _read(self, path: str) -> bytes:
        # os.read costs half of what a file object does, and this is done ten times a second.
        parts: list[bytes] = []
        fd = os.open(os.path.join(self._root, path), os.O_RDONLY)
        try:
            while not parts or parts[-1]:
                parts.append(os.read(fd, 65536))
        finally:
            os.close(fd)
        return b"".join(parts)


# -- what to watch -----------------------------------------------------------------------------------------


class Target(Protocol):
    """Names processes. `missing` is the reason when there is none; `is_exact`: they are needed at once."""

    missing: str
    is_exact: bool

    def find(self, proc: Proc, commands: dict[int, list[str]]) -> set[int]:
        """The numbers of those named now."""
        ...


class Pattern:
    """The processes whose command line matches a regular expression."""

    is_exact = False

    def __init__(self, text: str) -> None:
        self._regex = re.compile(text)
        self.missing = f"no process matches {text!r}"

    def find(self, proc: Proc, commands: dict[int, list[str]]) -> set[int]:
        """Excludes this agent, wrappers, known helpers, and forks with their parent's command line."""
        return {
            pid
            for pid, argv in commands.items()
            if self._regex.search(" ".join(argv)) and self._is_meant(proc, pid, commands)
        }

    def _is_meant(self, proc: Proc, pid: int, commands: dict[int, list[str]]) -> bool:
        argv = commands[pid]
        if pid == os.getpid() or _is_wrapper(argv):
            return False
        if _HELPERS.search(" ".join(argv)):
            return False
        stat = proc.stat(pid)
        return stat is not None and commands.get(stat.parent) != argv


class PidFile:
    """The process whose number a file holds."""

    is_exact = True

    def __init__(self, path: str) -> None:
        self._path = path
        self.missing = f"no process runs under the number in {path}"

    def find(self, proc: Proc, _commands: dict[int, list[str]]) -> set[int]:
        """Nothing while the file is missing, unreadable or holds no number."""
        try:
            with open(self._path, "rb") as file:
                pid = int(file.read(32))
        except (OSError, ValueError):
            return set()
        return {pid} if proc.stat(pid) else set()


class Port:
    """The process that listens on a TCP port."""

    is_exact = True

    def __init__(self, port: int) -> None:
        self._port = port
        self.missing = f"no process that this agent may inspect listens on port {port}"

    def find(self, proc: Proc, _commands: dict[int, list[str]]) -> set[int]:
        """Who opened it; not the children that inherited it."""
        holders = proc.holders(proc.listening(self._port))
        stats = {pid: proc.stat(pid) for pid in holders}
        return {pid for pid, stat in stats.items() if stat and stat.parent not in holders}


# -- what is needed, and how it does -----------------------------------------------------------------------


class ProcessKey(NamedTuple):
    """Number and start of a process: unique while the machine is up."""

    pid: int
    start: int


class Needed:
    """A needed process as seen last: in `state` since `since`, alive at `alive_at`."""

    def __init__(self, key: ProcessKey, now: float) -> None:
        self.pid, self.start = key
        self.name, self.state, self.cpu_s = "", "R", 0.0
        self.since = self.alive_at = now

    def observe(self, proc: Proc, now: float) -> None:
        """Read its state again. Death is final: its number may be reused."""
        if self.state == "X":
            return
        try:
            stat = proc.stat(self.pid)
        except OSError:
            return
        state = stat.state if stat and stat.start == self.start else "X"
        if state != self.state or (stat and state == "D" and stat.cpu_s > self.cpu_s):
            self.state, self.since = state, now
        if stat and state != "X":
            self.name, self.cpu_s = stat.name, stat.cpu_s
        if state not in _LOST:
            self.alive_at = now

    def condition(self, now: float) -> str:
        """One word: ok, or its fault."""
        word, after_s = _CONDITIONS.get(self.state, ("ok", 0.0))
        return word if now - self.since >= after_s else "ok"


class Status(NamedTuple):
    """The agent's report. `open_files` is the largest share of its limit in use, as of `counted_at`."""

    state: str
    reason: str
    epoch: str
    needed: tuple[Needed, ...] = ()
    open_files: float | None = None
    counted_at: float = 0.0

    def line(self) -> bytes:
        """As JSON, on one line."""
        processes = [
            {"pid": n.pid, "name": n.name, "state": n.state, "cpu_s": round(n.cpu_s, 2)}
            for n in self.needed[:AGENT_SHOWN_MAX]
        ]
        said: dict[str, Any] = {"cellgate_agent": 1, "state": self.state, "reason": self.reason}
        said.update(epoch=self.epoch, processes=processes, open_files=self.open_files)
        return json.dumps(said, separators=(",", ":")).encode()


class ProcessWatch:
    """Finds the processes that `targets` name, and their state. `clock`: seconds since boot."""

    def __init__(self, targets: Sequence[Target], proc: Proc, clock: Callable[[], float]) -> None:
        self._targets = targets
        self._proc = proc
        self._clock = clock
        self._boot_id = proc.boot_id()
        self._needed: tuple[Needed, ...] = ()
        self._counts = [1] * len(targets)
        self._epoch = ""
        self._missing = ""
        self._matched_at: dict[ProcessKey, float] = {}
        self._scan_at = self._count_at = self._counted_at = 0.0
        self._open_files: float | None = None

    def look(self) -> Status:
        """The processes as they are now. All of /proc is searched only while a needed process is missing."""
        now = self._clock()
        for needed in self._needed:
            needed.observe(self._proc, now)
        if now >= self._scan_at and (not self._needed or any(n.state in _LOST for n in self._needed)):
            self._scan_at = now + SCAN_S
            self._search(now)
        if now >= self._count_at:
            uses = [self._proc.file_use(n.pid) for n in self._needed if n.state not in _LOST]
            self._open_files = max((round(use, 3) for use in uses if use is not None), default=None)
            pressed = (self._open_files or 0.0) >= PRESSURE
            self._count_at = now + (SCAN_S if pressed else COUNT_FILES_S)
            self._counted_at = now
        return self._status(now)

    def _status(self, now: float) -> Status:
        if not self._needed:
            return Status("absent", self._missing, "")
        conditions = [(needed, needed.condition(now)) for needed in self._needed]
        for word, said in _SAID.items():
            bad = [needed for needed, condition in conditions if condition == word]
            if bad:
                return self._say(word, f"{said}: {_few(bad)}")
        return self._say("ok", f"running: {_few(self._needed)}")

    def _say(self, state: str, reason: str) -> Status:
        return Status(state, reason, self._epoch, self._needed, self._open_files, self._counted_at)

    def _search(self, now: float) -> None:
        """Make named processes needed, once complete and, if a pattern matched them, settled."""
        survivors = {ProcessKey(n.pid, n.start) for n in self._needed if n.state not in _LOST}
        lost_at = min((n.alive_at for n in self._needed if n.state in _LOST), default=0.0)
        if self._needed and (not survivors or now - lost_at >= DISTRUST_S):
            self._counts = [1] * len(self._targets)
        try:
            commands = self._proc.commands()
            found = [self._find(target, commands, survivors, lost_at) for target in self._targets]
        except OSError as error:
            self._missing = f"this agent cannot read /proc: {error.strerror}"
            return
        self._matched_at = {key: self._matched_at.get(key, now) for keys in found for key in keys}
        exact = {key for index, keys in enumerate(found) if self._targets[index].is_exact for key in keys}
        settled = exact | {key for key, at in self._matched_at.items() if now - at >= SETTLE_S}
        self._missing = self._wanting(found, settled, now)
        if self._missing and len(commands) <= ALONE_EXIT:
            self._missing += " (it sees almost no processes: is the process namespace shared?)"
        if not self._missing:
            self._adopt(settled, [len(keys & settled) for keys in found], now)

    def _find(
        self, target: Target, commands: dict[int, list[str]], survivors: set[ProcessKey], lost_at: float
    ) -> set[ProcessKey]:
        """The processes of a target; after a loss, those that match: survivors, and newer ones."""
        stats = {pid: self._proc.stat(pid) for pid in target.find(self._proc, commands)}
        keys = {
            ProcessKey(pid, stat.start) for pid, stat in stats.items() if stat and stat.state not in _LOST
        }
        if target.is_exact:
            return keys
        return {key for key in keys if key in survivors or (key.start + 1) * _AGENT_TICK_S >= lost_at}

    def _wanting(self, found: list[set[ProcessKey]], settled: set[ProcessKey], now: float) -> str:
        """Why the settled ones cannot become needed; empty: they can."""
        for index, target in enumerate(self._targets):
            if len(found[index]) < self._counts[index]:
                return target.missing
        has_waited = now - min(self._matched_at.values()) < PATIENCE_S
        short = any(len(keys & settled) < self._counts[index] for index, keys in enumerate(found))
        if short or (has_waited and len(settled) < len(self._matched_at)):
            return f"the processes asked for run; waiting until no new one has started for {SETTLE_S:g} s"
        if len(settled) > NEEDED_MAX:
            return f"{len(settled)} processes match, which is too many: use a narrower pattern"
        return ""

    def _adopt(self, keys: set[ProcessKey], counts: list[int], now: float) -> None:
        self._needed = tuple(Needed(key, now) for key in sorted(keys))
        for needed in self._needed:
            needed.observe(self._proc, now)
        self._counts = counts
        self._epoch = _short_hash(self._boot_id, *(f"{key.pid} {key.start}" for key in sorted(keys)))
        self._matched_at = {}
        self._count_at = now


def _few(processes: Sequence[Needed]) -> str:
    more = f" and {len(processes) - NAMED_MAX} more" if len(processes) > NAMED_MAX else ""
    return ", ".join(f"process {n.pid} ({n.name})" for n in processes[:NAMED_MAX]) + more


def _short_hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


# -- what the node runs ------------------------------------------------------------------------------------

_INTERPRETER = re.compile(r"python[\d.]*|pypy[\d.]*")
_AGENT_PACKAGES = re.compile(r"vllm|sglang|tensorrt_llm|torch|transformers|neuronx_cc|nvidia_nccl_cu\d+")
_MODULES = ("nvidia", "neuron", "amdgpu", "efa", "mlx5_core")
# What starts or carries an engine: its flags are not those of the engine.
_CARRIERS = re.compile(r"--match\b|\bmultiprocessing\b|(^|/)raylet\b")
_AGENT_SECRET = re.compile(
    r"key|secret|passw|pwd|credential|auth|cookie|bearer|api.?token|token(?!s|iz)", re.I
)
_NUMBER = re.compile(r"-?\d{1,12}(\.\d{1,12})?")
SECRET = "***"


def stack_of(proc: Proc, sysfs: str, pids: Sequence[int], key: bytes) -> dict[str, str]:
    """The software of this node by name: packages, drivers, the image, and the flags of the engine, whose
    values are hashed with `key` (see `flags_of`).
    """
    stack = {f"driver {name}": _line_of(f"{sysfs}/module/{name}/version") for name in _MODULES}
    stack["driver nvidia"] = stack["driver nvidia"] or proc.nvidia_driver()
    stack["image"] = os.environ.get(IMAGE_VARIABLE, "")
    for pid in pids[:1]:
        stack.update(
            (f"package {name}", version)
            for name, version in proc.packages(pid)
            if _AGENT_PACKAGES.fullmatch(name)
        )
    stack = {name: value[:SAID_MAX] for name, value in stack.items() if value}
    stack.update(flags_of(_command_of(proc, pids), key))
    return stack


def flags_of(argv: Sequence[str], key: bytes) -> dict[str, str]:
    """The program, flags and other arguments of a command line, by name.

    Numbers stay as they are. Whatever may hold a word of a person's is hashed with `key`, and the value of a
    flag that is called like a secret is left out: gates compare, and need not know.
    """
    found: dict[str, list[str]] = {}
    current, count = "", 0
    program, arguments = _program_of(argv)
    for word in arguments:
        if word.startswith("-") and not _NUMBER.fullmatch(word):
            name, equals, value = word.partition("=")
            current = f"flag {name[:SAID_MAX]}"
            found.setdefault(current, []).extend([value] if equals else [])
        else:
            count += not current
            found.setdefault(current or f"argument {count}", []).append(word)
        if len(found) > FLAGS_MAX:
            break
    document = {name: _hidden(name, " ".join(values), key) for name, values in found.items()}
    return {"program": program[:SAID_MAX], **document} if argv else {}


def _program_of(argv: Sequence[str]) -> tuple[str, Sequence[str]]:
    """What runs, and its arguments: of `python -m MODULE` and `python SCRIPT` the module and the script."""
    name = os.path.basename(argv[0]) if argv else ""
    if _INTERPRETER.fullmatch(name) and len(argv) > 1:
        if argv[1] == "-m" and len(argv) > 2:
            return argv[2], argv[3:]
        if not argv[1].startswith("-"):
            return os.path.basename(argv[1]), argv[2:]
    return name, argv[1:]


def _hidden(name: str, value: str, key: bytes) -> str:
    if _AGENT_SECRET.search(name):
        return SECRET
    if not value or _NUMBER.fullmatch(value):
        return value
    return "#" + hmac.new(key, f"{name}={value}".encode(), "sha256").hexdigest()[:12]


def _command_of(proc: Proc, pids: Sequence[int]) -> list[str]:
    """The command line that started the engine: its workers call themselves something else."""
    for pid in pids:
        for _ in range(ANCESTORS_MAX):
            argv, stat = proc.arguments(pid), proc.stat(pid)
            has_flags = any(word.startswith("-") for word in argv[1:])
            if has_flags and not _is_wrapper(argv) and not _CARRIERS.search(" ".join(argv)):
                return argv
            if stat is None or not stat.parent:
                break
            pid = stat.parent
    return []


def _line_of(path: str) -> str:
    """The first line of a small file; empty when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(256).decode("utf-8", "replace").partition("\n")[0].strip()
    except OSError:
        return ""


# -- what its ranks and devices say ------------------------------------------------------------------------

# Linux: Documentation/ABI/stable/sysfs-class-infiniband; the drivers mlx5 and efa. Counters that also grow in
# quiet times are left out.
_PORT_ERRORS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
_HARDWARE_ERRORS = (
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "req_transport_retries_exceeded",
    "retrans_timeout_events",
    "unresponsive_remote_events",
    "impaired_remote_conn_events",
    "rdma_read_wr_err",
    "rdma_write_wr_err",
    "rx_drops",
)
_LINK_ERRORS = (
    *(f"counters/{name}" for name in _PORT_ERRORS),
    *(f"hw_counters/{name}" for name in _HARDWARE_ERRORS),
)
# AWS Neuron: the guide of its sysfs. The status of a core counts what calls of the runtime returned.
_CORE_ERRORS = (
    "timeout",
    "hw_error",
    "failure",
    "generic_error",
    "infer_completed_with_error",
    "infer_failed_to_queue",
)
_DEVICE_ERRORS = ("mem_ecc_uncorrected", "sram_ecc_uncorrected")


def counters_of(sysfs: str) -> dict[str, int]:
    """The error counters of links (InfiniBand, RoCE, EFA) and Neuron devices, as far as there are any."""
    neuron = f"{sysfs}/devices/virtual/neuron_device"
    found = [
        (f"{device}/{port} {name.rpartition('/')[2]}", f"{ports}/{port}/{name}")
        for device in _entries(f"{sysfs}/class/infiniband")
        for ports in [f"{sysfs}/class/infiniband/{device}/ports"]
        for port in _entries(ports)
        for name in _LINK_ERRORS
    ]
    for device in _entries(neuron):
        found += [(f"{device} {name}", f"{neuron}/{device}/stats/hardware/{name}") for name in _DEVICE_ERRORS]
        cores = [entry for entry in _entries(f"{neuron}/{device}") if entry.startswith("neuron_core")]
        found += [
            (f"{device}/{core} {name}", f"{neuron}/{device}/{core}/stats/status/{name}/total")
            for core in cores
            for name in _CORE_ERRORS
        ]
    read = ((name, _line_of(path) or _line_of(f"{path}/total")) for name, path in found[:COUNTERS_MAX])
    return {name: int(value) for name, value in read if value.isdigit()}


def _entries(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def ranks_of(address: tuple[str, int]) -> list[dict[str, Any]]:
    """What NCCL's RAS service says of the communicators of this job, the largest first; nothing where no
    service listens, or one before NCCL 2.28.7, which has no JSON.

    The protocol is lines of text, each answered by a line; the status has no end but that of the connection
    (NCCL: src/ras/client.cc, client_support.cc).
    """
    until = time.monotonic() + RAS_S
    try:
        with socket.create_connection(address, timeout=1.0) as connection:
            for command in ("CLIENT PROTOCOL 2", f"TIMEOUT {RAS_WAIT_S}", "SET FORMAT json"):
                connection.sendall(command.encode() + b"\n")
                if _received(connection, until, 256, b"\n")[:5] == b"ERROR":
                    return []
            connection.sendall(b"STATUS\n")
            status = json.loads(_received(connection, until, RAS_BYTES))
        communicators = sorted(status["communicators"], key=lambda comm: -int(comm["size"]))
        return [_communicator(comm) for comm in communicators[:COMMUNICATORS_MAX]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def _received(connection: socket.socket, until: float, limit: int, end: bytes = b"") -> bytes:
    """Bytes up to `end`, or to the end of the connection. Raises OSError when that is late or too long."""
    data = bytearray()
    while not end or not data.endswith(end):
        connection.settimeout(max(0.01, until - time.monotonic()))
        piece = connection.recv(65536)
        data += piece
        if len(data) > limit or (not piece and end) or time.monotonic() > until:
            raise OSError("no answer, or too long")
        if not piece:
            break
    return bytes(data)


def _communicator(comm: dict[str, Any]) -> dict[str, Any]:
    """One communicator in short: who is behind, who does not answer, who reports an error."""
    ranks, behind = comm["ranks"], []
    most: dict[str, int] = {}
    for rank in ranks:
        for operation, count in rank["collective_counts"].items():
            most[operation] = max(most.get(operation, 0), int(count))
    for rank in ranks:
        late = [
            (most[operation] - count, operation) for operation, count in rank["collective_counts"].items()
        ]
        by, operation = max(late, default=(0, ""))
        if by > 0:
            behind.append([*_place(rank), str(operation), most[operation] - by, most[operation]])
    missing = [rank for rank in comm["missing_ranks"] if any(rank["status"].values())]
    # Of ncclResult_t: 0 is success, 7 in progress.
    failed = [rank for rank in ranks if rank["status"]["async_error"] not in (0, 7)]
    return {
        "id": "{} {}".format(comm["hash"], comm["secondary_hash"]),
        "size": int(comm["size"]),
        "launched": sum(sum(rank["collective_counts"].values()) for rank in ranks),
        "behind_count": len(behind),
        "behind": behind[:RANKS_MAX],
        "missing": [[*_place(rank), bool(rank["status"]["considered_dead"])] for rank in missing[:RANKS_MAX]],
        "failed": [[*_place(rank), int(rank["status"]["async_error"])] for rank in failed[:RANKS_MAX]],
    }


def _place(rank: dict[str, Any]) -> list[Any]:
    return [int(rank["rank"]), str(rank["host"])[:SAID_MAX], int(rank["pid"])]


class Reporter:
    """Composes reports in a thread, because a driver may keep a reader waiting: one at a time.

    `compose` is called in that thread, with whether ranks are to be asked. All who ask while it works get its
    report; those who want to know of ranks get the next one, unless it has them.
    """

    def __init__(self, compose: Callable[[bool], dict[str, Any]]) -> None:
        self._compose = compose
        self._asking: dict[Client, bool] = {}
        """And whether they want to know of ranks."""
        self._is_composing = False

    def ask(self, client: Client, *, of_ranks: bool) -> None:
        """Send a report to a client, or 503 if there is none within REPORT_S."""
        self._asking[client] = of_ranks
        asyncio.get_running_loop().call_later(REPORT_S, self._abort, client)
        if not self._is_composing:
            self._begin(of_ranks)

    def _begin(self, of_ranks: bool) -> None:
        self._is_composing = True
        args = asyncio.get_running_loop(), of_ranks
        threading.Thread(target=self._work, args=args, daemon=True).start()

    def _work(self, loop: asyncio.AbstractEventLoop, of_ranks: bool) -> None:
        try:
            report = self._compose(of_ranks)
        except Exception as error:
            report = {"error": f"the report failed: {error!r}"}
        with suppress(RuntimeError):  # The loop has ended meanwhile.
            loop.call_soon_threadsafe(self._done, report, of_ranks)

    def _done(self, report: dict[str, Any], of_ranks: bool) -> None:
        self._is_composing = False
        asking, self._asking = self._asking, {}
        for client, wants_ranks in asking.items():
            if wants_ranks and not of_ranks:
                self._asking[client] = True
            else:
                client.reply(200, {"cellgate_agent": 1, **report})
        if self._asking:
            self._begin(True)

    def _abort(self, client: Client) -> None:
        if self._asking.pop(client, None) is not None:
            client.reply(503, {"error": f"the report is not ready after {REPORT_S:g} s"})


# -- how it is told ----------------------------------------------------------------------------------------


def chunk(line: bytes) -> bytes:
    """One line as one chunk of HTTP/1.1."""
    return b"%x\r\n%b\n\r\n" % (len(line) + 1, line)


_BEAT_CHUNK = chunk(HEARTBEAT)
_STATUSES = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class Client(asyncio.Protocol):
    """One connection: a request, and its answer, which for /watch has no end."""

    transport: asyncio.Transport

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._received = 0
        self._head = b""
        self.watching = False
        self.is_served = False
        """It has asked for something that it gets over time."""
        self.since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the client, or refuse it."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.since = time.monotonic()
        self._agent.clients.add(self)
        if len(self._agent.clients) > CLIENTS_MAX and not self._takes_place():
            self._refuse(503, f"this agent has {CLIENTS_MAX} clients already")

    def _takes_place(self) -> bool:
        """Whether there was one that has asked for nothing that counts: the oldest of them goes."""
        silent = [each for each in self._agent.clients if not each.is_served and each is not self]
        if not silent:
            return False
        oldest = min(silent, key=lambda each: each.since)
        self._agent.clients.discard(oldest)
        oldest.transport.abort()
        return True

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Remove the client."""
        self._agent.clients.discard(self)

    def data_received(self, data: bytes) -> None:
        """Collect the head; bytes after it are ignored, up to a limit."""
        self._received += len(data)
        if self.transport.is_closing():
            return
        if self.is_served:
            if self._received > AGENT_HEAD_BYTES:
                self.transport.abort()
            return
        self._head += data[:AGENT_HEAD_BYTES]
        head, end, _ = self._head.partition(b"\r\n\r\n")
        if end:
            self._answer(head.split(b"\r\n"))
        elif self._received > AGENT_HEAD_BYTES:
            self._refuse(431, f"a request to this agent has at most {AGENT_HEAD_BYTES} bytes")

    def send(self, data: bytes) -> None:
        """Write to a watcher; one that does not read is dropped."""
        if self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size() > AGENT_UNREAD_BYTES:
            self.transport.abort()
        else:
            self.transport.write(data)

    def _answer(self, lines: list[bytes]) -> None:
        words = lines[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            self._refuse(400, "this is a cellgate agent; use HTTP/1.1")
        elif words[0] != b"GET":
            self._refuse(405, "use GET")
        elif words[1] == b"/healthz":
            status = self._agent.status
            document = {"state": status.state, "reason": status.reason, "epoch": status.epoch}
            self.reply(200 if status.state == "ok" else 503, document)
        elif words[1] not in (b"/watch", b"/report", b"/report?ranks"):
            self._refuse(404, "unknown path; use GET /healthz, GET /watch or GET /report")
        elif not self._agent.admits(lines[1:]):
            self._refuse(401, "send `Authorization: Bearer TOKEN` with the token of this agent")
        elif words[1] != b"/watch":
            self.is_served = True
            self._agent.reporter.ask(self, of_ranks=words[1] == b"/report?ranks")
        else:
            self.watching = self.is_served = True
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nCache-Control: no-store\r\n"
            self.transport.write(head + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
            self.send(chunk(self._agent.status.line()))

    def _refuse(self, status: int, reason: str) -> None:
        self.reply(status, {"error": reason})

    def reply(self, status: int, document: dict[str, Any]) -> None:
        """Answer with JSON, and close; nothing to a client that has left."""
        if self.transport.is_closing():
            return
        body = json.dumps(document).encode() + b"\n"
        head = f"HTTP/1.1 {status} {_STATUSES[status]}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()


async def _each(period_s: float, work: Callable[[], None]) -> None:
    """Repeat `work`; a defect is logged and does not end it."""
    while True:
        try:
            work()
        except Exception as error:
            _log(f"{work.__name__} failed: {error!r}")
        await asyncio.sleep(period_s)


def _log(text: str) -> None:
    with suppress(OSError):  # The log may have no reader, or a slow one: the agent must not wait.
        if select.select((), (2,), (), 0)[1]:
            print(f"cellgate agent: {text}", file=sys.stderr, flush=True)


# -- how it is started -------------------------------------------------------------------------------------


class UsageError(Exception):
    """Invalid arguments; `str()` says what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--match",
        metavar="PATTERN",
        action="append",
        default=[],
        type=_pattern,
        help="needed: processes whose command line matches this regular expression; once for each kind",
    )
    add("--pid-file", metavar="PATH", help="needed: the process whose number is in this file")
    add("--port", metavar="PORT", type=_port, help="needed: the process that listens on this TCP port")
    add(
        "--listen",
        metavar="HOST:PORT",
        type=_address,
        default="127.0.0.1:9911",
        help="the address to listen on; any other than loopback requires a token (default: %(default)s)",
    )
    add(
        "--ras",
        metavar="HOST:PORT",
        type=_address,
        default=RAS_ADDRESS,
        help="where NCCL's RAS service answers, if it does (default: localhost:28028)",
    )
    add("--token-file", metavar="PATH", help=f"file with the token; default: the variable {TOKEN_VARIABLE}")


def run(args: argparse.Namespace) -> int:
    """Run an agent until it is told to stop; its exit code."""
    try:
        agent = _agent(args)
        with suppress(OSError):
            # If allowed: it needs little CPU, and watches processes that use all of it.
            os.setpriority(os.PRIO_PROCESS, 0, NICE)
        asyncio.run(agent.run(*args.listen))
    except UsageError as error:
        _log(str(error))
        return 2
    except OSError as error:
        _log(f"cannot listen on {args.listen[0]}:{args.listen[1]}: {error.strerror or error}")
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of this file on its own."""
    description = (
        "Watch the processes that an inference node needs, and report to gates at once when one stops."
    )
    parser = argparse.ArgumentParser("agent.py", description=description, allow_abbrev=False)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def _agent(args: argparse.Namespace) -> Agent:
    targets: list[Target] = list(args.match)
    targets += [PidFile(args.pid_file)] if args.pid_file else []
    targets += [Port(args.port)] if args.port else []
    if not targets:
        raise UsageError("nothing to watch: give --match, --pid-file or --port")
    if not os.path.exists("/proc/self/stat"):
        raise UsageError("there is no /proc here: the agent runs on Linux")
    token = _token(args.token_file)
    if not token and not _is_loopback(args.listen[0]):
        raise UsageError(
            f"{args.listen[0]} can be reached from other machines, so gates must send a token: "
            f"set {TOKEN_VARIABLE} or --token-file, or listen on 127.0.0.1"
        )
    watch = ProcessWatch(targets, Proc(), lambda: time.clock_gettime(time.CLOCK_BOOTTIME))
    return Agent(watch, token, args.ras)


def _token(path: str | None) -> str:
    if path is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    try:
        with open(path, encoding="utf-8") as file:
            token = file.read(4096).strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the token in {path}: {error}") from None
    if not token:
        raise UsageError(f"there is no token in {path}: the file is empty")
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _pattern(text: str) -> Pattern:
    try:
        return Pattern(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid regular expression: {error}") from None


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"expected a port from 1 to 65535, found {text!r}")
    return int(text)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, found {text!r}")
    return host.strip("[]"), int(port)


if __name__ == "__main__":
    raise SystemExit(main())
