"""The hand-over of a gate to its successor, by messages over a pair of Unix sockets.

1. The successor says HELLO once it has read its configuration.
2. The gate sends the listeners, and as JSON their names and the state of its units.
3. The successor accepts clients, and sends READY.
4. The gate accepts no more, and sends what has changed since: drained units.

Documents are preceded by their length, 4 bytes in network order. A side that closes early has failed.

In this order: `hand_over`, `InheritedView`, `Inheritance`, `listening_for`, `HandoverError`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from math import inf
from typing import Any

import orjson

from cellgate.probes.readiness import GATE_EPOCHS
from cellgate.proxy.config.settings import Address, Settings
from cellgate.proxy.process.listeners import BACKLOG, listen
from cellgate.router.board import Board
from cellgate.router.nouns import USABLE, Build, Case, Evidence, Hold, HoldKind, Sign, Strength, Verdict
from cellgate.router.unit_state import UnitState

VARIABLE = "CELLGATE_HANDOVER"
"""Has the descriptor of the successor's socket."""
HELLO, READY = b"h", b"r"
FDS_MAX = 64
HANDOVER_ANSWER_S = 10.0
"""How long a living gate may take to answer."""
_LENGTH = struct.Struct("!I")


async def hand_over(
    listeners: Listeners, tell: Callable[[], Any], tell_last: Callable[[], Any], limit_s: float
) -> int:
    """Have a successor take over; its process id. Raises HandoverError.

    `tell` gives the first document for it, `tell_last` the one after it accepts clients.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours:
        with theirs:
            process = _start(theirs)
        try:
            async with asyncio.timeout(limit_s):
                await _hear(ours, HELLO)
                names = {name: len(sockets) for name, sockets in listeners.items()}
                every = [each for sockets in listeners.values() for each in sockets]
                await send(ours, {"listeners": names, "known": tell()}, every)
                await _hear(ours, READY)
        except asyncio.CancelledError:
            await asyncio.to_thread(_end, process)
            raise
        except Exception as error:
            code = await asyncio.to_thread(_end, process)
            raise HandoverError(_why(error, code, limit_s)) from error
        # It accepts clients: from here on there is no way back, and cancellation is impossible.
        with suppress(OSError):
            ours.sendall(frame_document(tell_last()))
    return process.pid


def frame_document(document: Any) -> bytes:
    """A document as it is sent; a named tuple of it becomes a list."""
    body = orjson.dumps(document, default=tuple)
    return _LENGTH.pack(len(body)) + body


async def send(sock: socket.socket, document: Any, listeners: Sequence[socket.socket] = ()) -> None:
    """Send a document, and listeners along with it. Raises OSError."""
    data = frame_document(document)
    # Descriptors go with the first bytes; these few always find room.
    socket.send_fds(sock, [data[: _LENGTH.size]], [listener.fileno() for listener in listeners])
    await asyncio.get_running_loop().sock_sendall(sock, data[_LENGTH.size :])


def receive(sock: socket.socket) -> tuple[Any, list[socket.socket]]:
    """Wait for a document and what comes along with it. Raises OSError, and ValueError when it is none."""
    head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, FDS_MAX)
    listeners = [socket.socket(fileno=fd) for fd in fds]
    for listener in listeners:
        listener.set_inheritable(False)
        listener.setblocking(False)
    if len(head) < _LENGTH.size:
        raise ConnectionError("the previous gate has closed the connection")
    left, pieces = _LENGTH.unpack(head)[0], []
    while left:
        piece = sock.recv(min(left, 1 << 20))
        if not piece:
            raise ConnectionError("the previous gate has closed the connection")
        pieces.append(piece)
        left -= len(piece)
    return orjson.loads(b"".join(pieces)), listeners


# The state of units for a successor, so that it is ready at once and keeps all drains.
#
# Times are `loop.time()`, which is one clock for all processes of a machine. What is measured on traffic
# (rates, prefixes) is measured again. A view of another version is ignored.


VERSION = 1
SOURCE = "predecessor"

_COUNTED_HERE = (GATE_EPOCHS,)
"""Readers of epochs whose numbers restart with each process of the gate."""

KnownUnit = dict[str, Any]


def view_of(board: Board) -> KnownUnit:
    """What is known of all units."""
    return {"version": VERSION, "units": [known_of(state) for state in board]}


def drained(board: Board) -> list[str]:
    """The names of the units that are drained."""
    return [state.unit.name for state in board if state.drained]


def known_of(state: UnitState) -> KnownUnit:
    """The state of one unit for JSON."""
    case, hold = state.case, state.hold
    return {
        "name": state.unit.name,
        "url": state.unit.url,
        "verdict": case.verdict.value,
        "since": case.since,
        "epochs": [epoch for epoch in case.epochs if epoch[0] not in _COUNTED_HERE],
        "restarted": case.restarted,
        "passes": case.passes,
        "reason": case.because.reason if case.because is not None else "",
        "drained": state.drained,
        "hold": None if hold is None else (hold.kind.value, hold.since, hold.ended_at),
        "models": sorted(state.models),
        "cards": state.cards,
        "engine": state.engine,
        "build": list(state.build),
        "faults": [list(fault) for fault in case.faults if not fault[0]],
        "progress_at": state.progress_at,
        "up_since": state.up_since,
    }


class InheritedView:
    """The state from a predecessor, applied to units when they appear on the Board."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        is_read = known["version"] == VERSION
        self._left: dict[str, KnownUnit] = {unit["name"]: unit for unit in known["units"]} if is_read else {}
        self._used = [name for name, unit in self._left.items() if _was_usable(unit)]

    def apply(self, board: Board) -> bool:
        """Apply the known state to units that have appeared since; whether there are any."""
        names = self._left.keys() & board.units.keys()
        for name in names:
            unit, state = self._left.pop(name), board.units[name]
            if unit["url"] == state.unit.url:
                take_over(state, unit)
        return bool(names)

    def is_warm(self, board: Board, *, may_come: bool) -> bool:
        """Whether the gate may take over: it can use a unit, if the predecessor could, and has evidence of
        every unit that both use. `may_come`: wait for units that are not on the Board yet.
        """
        if not self._used:
            return True
        states = [board.units[name] for name in self._used if name in board.units]
        if may_come and len(states) < len(self._used):
            return False
        received = all(state.answered_at > 0.0 for state in states if state.is_usable())
        return received and any(state.is_usable() for state in board)


def _was_usable(unit: KnownUnit) -> bool:
    is_out = unit["drained"] or unit.get("hold") is not None
    return unit["verdict"] in {verdict.value for verdict in USABLE} and not is_out


def take_over(state: UnitState, unit: KnownUnit) -> None:
    """Apply the result of `known_of` from another process to a unit."""
    verdict, since = Verdict(unit["verdict"]), unit["since"]
    sign = Sign.GOOD if verdict is Verdict.UP else Sign.BAD
    because = Evidence(state.unit.name, sign, Strength.STRONG, SOURCE, unit["reason"], since)
    epochs = tuple((reader, reading) for reader, reading in unit["epochs"])
    restarted = None if unit["restarted"] is None else (unit["restarted"][0], unit["restarted"][1])
    # Faults of nodes are reported again by their sources.
    faults = frozenset((node, source) for node, source in unit.get("faults", ()))
    case = Case(verdict, since, epochs, restarted, passes=unit["passes"], faults=faults, because=because)
    state.case = state.case if _is_newer(state.case, case) else case
    state.drained = unit["drained"]
    state.hold = _hold_of(unit.get("hold"))
    state.progress_at, state.up_since = unit["progress_at"], unit["up_since"]
    # The configuration takes precedence over detected values.
    state.models = state.models or frozenset(unit["models"])
    state.cards = state.cards or unit.get("cards", {})
    state.engine = state.engine or unit["engine"]
    state.build = Build(*unit.get("build", ()))


def _is_newer(own: Case, known: Case) -> bool:
    """Whether what this process has found itself is the newer verdict. One clock serves all processes."""
    return own.because is not None and own.because.source != SOURCE and own.since > known.since


def _hold_of(known: Sequence[Any] | None) -> Hold | None:
    """A hold that another process has known. It lasts until this one hears of it, or reaches its limit."""
    if known is None:
        return None
    kind, since, ended_at = known
    return Hold(HoldKind(kind), since, inf, ended_at)


# The successor's side: what a gate inherits from the one that started it.


class NoInheritanceError(Exception):
    """What was to be inherited did not come."""


class Inheritance:
    """Listeners by name, `view`, the attempts of recovery, and stored responses."""

    def __init__(self, sock: socket.socket, document: Any, listeners: list[socket.socket]) -> None:
        self._sock = sock
        self._listeners: dict[str, list[socket.socket]] = {}
        for name, count in document["listeners"].items():
            self._listeners[name] = [listeners.pop(0) for _ in range(count)]
        known = document["known"]
        self.view = InheritedView(known["view"])
        is_read = known["view"]["version"] == VERSION
        self.courses: dict[str, Any] = known["courses"] if is_read else {}
        self.stored: list[list[str]] = known["stored"] if is_read else []
        """Stored responses: of each its id, its payer and its unit."""

    def take(self, name: str) -> list[socket.socket]:
        """The listeners of that name; none if there are none, as when the address is another one now."""
        return self._listeners.pop(name, [])

    def leave_to_child(self) -> None:
        """A child of this process uses the inheritance, and reports when clients are accepted."""
        self._sock.close()
        for unwanted in self._listeners.values():
            for listener in unwanted:
                listener.close()

    async def accept(self) -> dict[str, Any] | None:
        """Report that clients are accepted. Returns what holds now: the units that are `drained`, and the
        responses that were `stored` meanwhile; None: the gate has ended.
        """
        for unwanted in self._listeners.values():
            for listener in unwanted:
                listener.close()
        return await asyncio.to_thread(self._accept)

    def _accept(self) -> dict[str, Any] | None:
        with self._sock, suppress(OSError, ValueError):
            self._sock.sendall(READY)
            last: dict[str, Any] = receive(self._sock)[0]
            return last
        return None


def inherit(environ: MutableMapping[str, str] = os.environ) -> Inheritance | None:
    """The inheritance, if another gate started this process. Raises NoInheritanceError."""
    # Not for child processes.
    descriptor = environ.pop(VARIABLE, "")
    if not descriptor:
        return None
    try:
        sock = socket.socket(fileno=int(descriptor))
        sock.set_inheritable(False)
        sock.settimeout(HANDOVER_ANSWER_S)
        sock.sendall(HELLO)
        return Inheritance(sock, *receive(sock))
    except (OSError, ValueError, KeyError, IndexError, TypeError, orjson.JSONDecodeError) as error:
        raise NoInheritanceError(f"{VARIABLE}={descriptor}: nothing can be taken over: {error!r}") from None


# The listeners of a gate by purpose and address: inherited from the previous gate, or opened.


LISTEN, ADMIN, AGENT_CHECK = "listen", "admin", "agent_check"

Listeners = Mapping[str, Sequence[socket.socket]]
"""By what they are for: `listen`, `admin`, `agent_check`, each followed by the address as configured."""


def listening_for(listeners: Listeners, purpose: str) -> Sequence[socket.socket]:
    """Those of `listeners` that are for this."""
    return next(found for name, found in listeners.items() if name.startswith(purpose))


async def listeners_of(settings: Settings, heritage: Inheritance | None) -> Listeners:
    """The listeners: inherited if the address is the same, else new. Raises OSError."""
    wanted = {LISTEN: settings.listen, ADMIN: settings.admin, AGENT_CHECK: settings.agent_check}
    found: dict[str, Sequence[socket.socket]] = {}
    for purpose, address in wanted.items():
        if address is not None:
            name = f"{purpose} {address}"
            inherited = heritage.take(name) if heritage is not None else []
            with _binding(address):
                found[name] = inherited or await listen(address, BACKLOG)
    return found


@contextmanager
def _binding(address: Address) -> Iterator[None]:
    """Add the address to an OSError."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise OSError(error.errno, reason, str(address)) from error


# The gate's side: starts a successor, passes everything on, and ends only once that one is ready.
#
# Any failure before that ends the successor, and the gate continues unchanged.


class HandoverError(Exception):
    """There is no successor. `str()` says why, for the operator."""


def _start(theirs: socket.socket) -> subprocess.Popen[bytes]:
    """Start the same command again, with new code and configuration if there is any."""
    try:
        return subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env={**os.environ, VARIABLE: str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
        )
    except OSError as error:
        raise HandoverError(f"it could not be started: {error}") from None


async def _hear(ours: socket.socket, word: bytes) -> None:
    received = await asyncio.get_running_loop().sock_recv(ours, len(word))
    if received != word:
        raise ConnectionError(f"it answered {received!r} instead of {word!r}")


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """Kill a failed successor; returns its exit code, if it had ended by itself."""
    with suppress(subprocess.TimeoutExpired):
        # It has closed its end, probably because it is ending.
        return process.wait(0.5)
    process.kill()
    process.wait()
    return None


def _why(error: Exception, code: int | None, limit_s: float) -> str:
    if code is not None:
        return f"it ended with {code} before it was ready; its output is in the log above"
    if isinstance(error, TimeoutError):
        return f"it was not ready within {limit_s:g} s and was killed"
    return f"it was killed, because its sockets could not be passed to it: {error!r}"
