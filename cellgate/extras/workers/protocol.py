"""The messages between a worker and the control process, and their encoding.

A message is a tuple that begins with its kind. All messages of one turn of the loop are one frame: its length
in 4 bytes, and a list of messages encoded by marshal. Marshal is the fastest that takes tuples, bytes and
infinities, and creates only plain values; both ends are forks of one process, so they have the same version.
"""

from __future__ import annotations

import asyncio
import marshal
import pickle
import socket
import struct
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

from cellgate.proxy.config.settings import OF_REQUESTS, Settings
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.observe.counters import TallyKey
from cellgate.proxy.observe.log import log_line
from cellgate.proxy.request.ports import PickRequest
from cellgate.router.nouns import Ask

Message = tuple[Any, ...]

_LENGTH = struct.Struct("!I")
_WORKER_VERSION = 2
"""Later versions search for repeated objects, which takes longer than writing them twice."""
FRAME_MAX = 1 << 28


class ToControl:
    """Messages of a worker, with their fields. Ids are those of requests, and of their leases."""

    HELLO = 0
    """Fleet and state of units (None: nothing yet), open leases."""
    ACCEPTING = 1
    ACQUIRE = 2
    """Id, `PickRequest`: acquire a unit. The answer is GRANTED or REFUSED."""
    CANCEL = 3
    """Id: the request is cancelled."""
    COMMITTED = 4
    """Id, at, resumed: the attempt has committed."""
    RELEASED = 5
    """Id, outcome, at."""
    COMPLETED = 6
    """Id, events, usage, at, was_paused."""
    BLAME = 7
    """Id, failure, tokens sent to the client in all, and by this unit, judged: the attempt has failed."""
    STORED = 8
    """Response, unit, payer: the unit that stores it, and for whom."""
    FINISHED = 9
    """Route, status, unit, TTFT, duration, bytes in, bytes out."""
    REPORT = 10
    """A `Report`, pickled."""
    RESTART_SUSPECTED = 13
    """Unit, version of the fleet."""
    STATUS = 15
    """A `WorkerStatus`."""
    SPENT = 18
    """Key, tenant, model, tokens: an answer is longer than it was charged with."""
    SETTLED = 19
    """A `UsageRecord`."""
    REFUSED = 20
    """Tenant, limit: a request was refused at the door."""


class ToWorker:
    """Messages of the control process, with their fields."""

    FLEET = 0
    """Version, cells, units: the whole fleet."""
    UNITS = 1
    """Changes of units: a list of `Known`."""
    PULSE = 2
    """`Pulse`: four times a second; also the sign of life of the control process."""
    OPEN = 3
    """Clients may be accepted."""
    GRANTED = 4
    """Id, unit, at, header line, data parallel rank, fields of a `SplitPlan` or None: a lease was opened
    under this id."""
    REFUSED = 5
    """Id, failure."""
    EVICTED = 6
    """Ids of leases whose unit went down."""
    SETTINGS = 7
    """What a reload has replaced of the settings, pickled, by name."""


HELD_BACK = 2
"""A lease is paused because its client reads too slowly."""


class WorkerStatus(NamedTuple):
    """The status that a worker sends once a tick. Counts are since the last one."""

    version: int
    """The version of the fleet that names of units refer to."""
    at: float
    lag_s: float
    lives: list[tuple[str, float]]
    """Units that have made progress, and when."""
    gaps: list[tuple[str, list[tuple[int, int]]]]
    """Gaps between tokens, by unit: milliseconds, and how many."""
    paused: list[tuple[int, int]]
    """Leases that were paused, or go on: 0, 1, or `HELD_BACK`."""
    clients: int
    connections: int
    """Those to units."""
    cpu_s: float
    resident_bytes: int
    log_dropped: int
    limits: list[tuple[str, int]]
    """Bounds that took effect, by name (see proxy/config/limits.py)."""
    tallies: list[tuple[TallyKey, int]]
    """What was counted (see proxy/observe/counters.py)."""
    defects: int


def settings_out(settings: Settings) -> bytes:
    """What a reload may replace where requests are."""
    return pickle.dumps({name: getattr(settings, name) for name in OF_REQUESTS})


def settings_in(running: Settings, reported: bytes) -> Settings:
    """The settings of a worker, with what was told."""
    return replace(running, **pickle.loads(reported))


class Pulse(NamedTuple):
    """What the control process sends once a tick."""

    at: float
    lives: list[tuple[str, float]]
    load_line: bytes
    """The header line of the gate's load."""
    load_lines: dict[bytes, bytes]
    """The same in other formats."""
    panic_at: float | None


def framed(messages: list[Message]) -> bytes:
    body = marshal.dumps(messages, _WORKER_VERSION)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Decodes what was read into complete messages. Invalid frames raise ValueError."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that end in `data`."""
        data, at = self._rest + data if self._rest else data, 0
        while len(data) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, at)
            if length > FRAME_MAX:
                raise ValueError(f"a frame of {length} bytes")
            end = at + _LENGTH.size + length
            if end > len(data):
                break
            messages: list[Message] = marshal.loads(data[at + _LENGTH.size : end])
            at = end
            yield from messages
        self._rest = data[at:]


FEW_BLOCKS = 16
"""Up to this many it is faster to send them unpacked."""
_BLOCKS = Ask._fields.index("blocks")


def ask_out(ask: Ask) -> Message:
    """An ask as it is sent: the hashes of its blocks, if they are many, as bytes, eight each."""
    plain = tuple(ask)
    if len(ask.blocks) <= FEW_BLOCKS:
        return plain
    return (*plain[:_BLOCKS], array("Q", ask.blocks).tobytes(), *plain[_BLOCKS + 1 :])


def ask_in(plain: Message) -> Ask:
    """An ask that was sent."""
    packed = plain[_BLOCKS]
    if type(packed) is not bytes:
        return Ask._make(plain)
    hashes = array("Q")
    hashes.frombytes(packed)
    return Ask._make((*plain[:_BLOCKS], tuple(hashes), *plain[_BLOCKS + 1 :]))


def request_out(request: PickRequest) -> Message:
    """A request for a unit as it is sent."""
    ask, *rest = request
    return ask_out(ask), *rest


def request_in(plain: Message) -> PickRequest:
    """A request for a unit that was sent."""
    ask, *rest = plain
    return PickRequest(ask_in(ask), *rest)


def failure_out(failure: Failure) -> Message:
    """A failure as it is sent."""
    how = failure.param, failure.retry_after_s, failure.lines, failure.used_up
    return failure.kind.value, failure.message, *how


def failure_in(plain: Message) -> Failure:
    """A failure that was sent."""
    kind, message, *how = plain
    return Failure(FailureKind(kind), message, *how)


# One end of the socket between a worker and the control process: messages are collected and sent together.
#
# 1. Urgent messages (`send`) are sent at the end of this turn of the loop; others (`later`) with the next
# urgent one, or after a few milliseconds.
# 2. Messages arrive in the order in which they were given.


LAZY_S = 0.005
"""The longest delay of a message that is not urgent, such as a released lease."""


class Link(asyncio.Protocol):
    """Calls `received` with each message, and `lost` once when the other end is gone."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, received: Callable[[Message], None], lost: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._received = received
        self._lost = lost
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._out: list[Message] = []
        self._early: list[bytes] = []
        """Frames for when there is a connection."""
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None
        self.closed = False

    def send(self, message: Message) -> None:
        """Send a message at the end of this turn of the loop."""
        self._out.append(message)
        if self._soon is None:
            self._soon = self._loop.call_soon(self._flush)

    def later(self, message: Message) -> None:
        """Send a message within `LATER_S`."""
        self._out.append(message)
        if self._later is None and self._soon is None:
            self._later = self._loop.call_later(LAZY_S, self._flush)

    async def connect(self, sock: socket.socket) -> None:
        """Connect to the other end through `sock`."""
        await self._loop.create_unix_connection(lambda: self, sock=sock)

    def write(self, frame: bytes) -> None:
        """Send an encoded frame after all pending messages."""
        if self._transport is None:
            self._early += (framed(self._out), frame)
            self._out = []
            return
        self._flush()
        if not self._transport.is_closing():
            self._transport.write(frame)

    def close(self) -> None:
        """Send pending messages, and close."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        if self._later is not None:
            self._later.cancel()
        if self._soon is not None:
            self._soon.cancel()
        self._soon = self._later = None
        if self._transport is not None and self._out:
            out, self._out = self._out, []
            if not self._transport.is_closing():
                self._transport.write(framed(out))

    # -- the transport's callbacks -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.writelines(self._early)
        self._early.clear()
        self._flush()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._received(message)
        except Exception as error:
            # After an invalid frame the rest cannot be decoded: treat the other end as lost.
            self._loop.call_exception_handler(
                {"message": "workers: a message could not be handled", "exception": error}
            )
            log_line(
                "error", f"workers: a message could not be handled ({error!r}); the connection is closed"
            )
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, _exc: Exception | None) -> None:
        self.closed = True
        self._transport = None
        for handle in (self._soon, self._later):
            if handle is not None:
                handle.cancel()
        self._lost()
