"""What one turn of the loop may cost: large reads of all connections, to units or to clients, and the begin
of requests. What has to wait is done in turn, one connection after the other.

The loop reads up to 256 kB of a connection at once, 32 times in one turn while more has arrived, and of all
connections that are ready in the same turn: with a few large bodies, or some hundred streams, that is more
than a second of work. So large reads are put aside, their connections are not read meanwhile, and one turn
of the loop parses only a bounded part of all of them.

If all requests of a burst began in one turn, the first would wait with their connections to units, and their
first tokens, until the last had begun, and the units would do nothing meanwhile.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from cellgate.proxy.config.limits import LIMITS, reached

if TYPE_CHECKING:
    from cellgate.proxy.http.errors import Failure
    from cellgate.proxy.http.request import Request


PART_BYTES = 16384
"""Bytes that are parsed of one connection before the next has its turn."""
PIECE_BYTES = 1024
"""What each piece of a body counts as, beside its bytes: many small pieces take the time."""


class PendingRead(Protocol):
    """A connection with a read that is not parsed yet."""

    def go_on(self, size: int, /) -> tuple[int, bool]:
        """Parse about so many bytes of it, if there are any and they may be parsed now: what that cost in
        bytes, and whether there is more to be parsed.
        """


class ReadScheduler:
    """Decides whose read is parsed next, or whose request begins: payers take turns, and the connections of
    each. `soon` schedules a callback for the next turn of the loop, which may cost `bytes_per_turn`.
    """

    def __init__(self, soon: Callable[[Callable[[], None]], object], bytes_per_turn: int) -> None:
        self._soon = soon
        self._bytes_per_turn = bytes_per_turn
        self._waiting: OrderedDict[str, dict[PendingRead, None]] = OrderedDict()
        self._next: dict[PendingRead, str] = {}
        # Of this turn, and of those before it that have left something: a turn is not worth a callback.
        self._left = bytes_per_turn
        self._is_due = False

    def join(self, late: PendingRead) -> None:
        """Have the read of a connection parsed: now, as far as this turn allows, and in turns to come."""
        self._add(late, "")
        if not self._is_due:
            self._go_on()

    def join_next(self, late: PendingRead, payer: str = "") -> None:
        """The same, but not in this turn."""
        self._next[late] = payer
        if not self._is_due:
            self._is_due = True
            self._soon(self._next_turn)

    def has_room(self, cost: int) -> bool:
        """Whether something else that costs so much may be done in this turn; it counts then."""
        left = self._left
        if left <= 0:
            return False
        self._left = left = left - cost
        if left <= 0 and not self._is_due:
            self._is_due = True
            self._soon(self._next_turn)
        return True

    def _next_turn(self) -> None:
        self._left = self._bytes_per_turn
        for late, payer in self._next.items():
            self._add(late, payer)
        self._next.clear()
        self._go_on()

    def _add(self, late: PendingRead, payer: str) -> None:
        self._waiting.setdefault(payer, {})[late] = None

    def _go_on(self) -> None:
        # Connections that are added meanwhile wait for their turn.
        self._is_due = True
        try:
            while self._waiting and self._left > 0:
                payer, own = self._waiting.popitem(last=False)
                late = next(iter(own))
                del own[late]
                if own:
                    self._waiting[payer] = own
                cost, has_more = late.go_on(PART_BYTES)
                self._left -= cost
                if has_more:
                    self._add(late, payer)
        finally:
            self._is_due = self._left <= 0 or bool(self._waiting) or bool(self._next)
            if self._is_due:
                self._soon(self._next_turn)


# Access to what the kernel knows of a TCP connection. For other sockets nothing is done.


UNSENT_BYTES = 64 * 1024
"""The kernel takes no more than this of what it cannot send yet. By itself it takes up to 4 MB a connection:
more than any stream of tokens, so that a client that never reads would never hold back its unit.
"""
HELD_BYTES = 16 * 1024
"""Bytes in the loop's buffer, beyond those in the kernel, from which on the unit of a slow client is
paused.
"""
_NO_LINGER = struct.pack("ii", 1, 0)
_GONE = (7, 8)
"""States of a TCP connection (tcp_states.h): reset, and closed by the other side."""
_BYTES = 256
_ACKED, _SENT = struct.Struct("Q"), struct.Struct("QQ")
_ACKED_AT, _SENT_AT = 120, 200
"""Where `struct tcp_info` of Linux (uapi/linux/tcp.h) has tcpi_bytes_acked, which counts the SYN as well,
and tcpi_bytes_sent with tcpi_bytes_retrans behind it."""
_QUEUED = struct.Struct("I")
_QUEUED_AT = 24
"""Where it has tcpi_unacked, which of a listener is how many connections wait to be accepted."""


def bound_unsent(transport: asyncio.WriteTransport) -> None:
    """Have the kernel take no more than `UNSENT_BYTES` that it cannot send yet."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def bound_held(transport: asyncio.WriteTransport) -> None:
    """Have the loop hold no more than `HELD_BYTES` before it says so."""
    if transport.get_extra_info("socket") is not None:
        transport.set_write_buffer_limits(high=HELD_BYTES)


def has_left(transport: asyncio.BaseTransport) -> bool:
    """Whether the other side of a connection that is not read has closed it: the loop does not look there."""
    sock = transport.get_extra_info("socket")
    return sock is not None and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _GONE


def accept_queue(listener: socket.socket) -> int:
    """How many connections wait on a listener; 1 if that is unknown."""
    size = _QUEUED_AT + _QUEUED.size
    try:
        info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
        (queued,) = _QUEUED.unpack_from(info, _QUEUED_AT)
    except (OSError, AttributeError, struct.error):
        return 1
    return int(queued)


def reset(transport: asyncio.WriteTransport) -> None:
    """Reset a connection: for a client that reads a body until the close, a normal close would end it
    cleanly.
    """
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()


def acknowledged(transport: asyncio.BaseTransport) -> int | None:
    """How many bytes the other side has acknowledged; None if that is unknown."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES)
        (acked,) = _ACKED.unpack_from(info, _ACKED_AT)
    except (OSError, AttributeError, struct.error):
        return None
    return int(acked)


def has_unacked(transport: asyncio.BaseTransport) -> bool:
    """Whether the other side has yet to acknowledge bytes that were sent. False if that is unknown."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return False
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _QUEUED_AT + _QUEUED.size)
        (unacked,) = _QUEUED.unpack_from(info, _QUEUED_AT)
    except (OSError, AttributeError, struct.error):
        return False
    return bool(unacked)


def took_all(transport: asyncio.BaseTransport) -> bool:
    """Whether a unit received all of a request before it closed the connection. True if that is unknown.

    A server that had closed a kept connection before a request came never acknowledges that request: the
    connection was stale. One that has acknowledged it may have died of it. (A server may also close what it
    takes for idle while a request waits to be read, which cannot be seen: so the request may be sent once
    more, and only then has the unit died of it.)
    """
    sock = transport.get_extra_info("socket")
    if sock is None:
        return True
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES)
        (acked,), (sent, again) = _ACKED.unpack_from(info, _ACKED_AT), _SENT.unpack_from(info, _SENT_AT)
    except (OSError, AttributeError, struct.error):
        # No TCP, or another system than Linux.
        return True
    return bool(acked > sent - again)


# The memory that all request bodies share: reading pauses when it is used up, and resumes when some is
# freed.
#
# 1. A body reserves memory as it arrives, and ahead in proportion, up to its declared length. So a client
# that only declares a large body reserves nothing, and one that has sent a sixteenth can complete its body:
# bodies do not deadlock.
# 2. A part is kept for small bodies, which are read on while large ones wait; half of it for those of payers
# that hold little.
# 3. While somebody waits whose bodies that are not whole yet hold less than an equal share, whoever's hold
# most gives up those that would hold theirs for longest. Alone anybody may have all.


_AHEAD = 16
"""A body may reserve this many times what has arrived of it."""
_KEPT_PART = 8
"""One part in this many is kept for small bodies."""
_GIVEN_UP_AT_ONCE = 16
"""So many bodies are given up in one tick."""


def wanted(size: int, length: int) -> int:
    """The memory to be held for a body of which `size` bytes have come; `length` were declared (0: none)."""
    return max(size, min(length, _AHEAD * size))


class ArrivingBody(Protocol):
    """A body that is not whole yet."""

    payer: str

    def whole_in_s(self, now: float) -> float:
        """How long it will hold its memory before it is whole, by how fast it has come; 0: give it time."""

    def give_up(self) -> None:
        """Others need its memory."""


class BodyMemory:
    """Counts bytes. A caller that is refused leaves a callback, which is called when bytes are freed.

    `largest` is the size of the largest body there may be: one of them always has room.
    """

    def __init__(self, total: int, largest: int) -> None:
        self.total = total
        self.used = 0
        self._for_large = max(total - total // _KEPT_PART, min(largest, total))
        self._little = total // _KEPT_PART // 2
        self._for_small = max(total - self._little, self._for_large)
        self._arriving: dict[ArrivingBody, int] = {}
        """What each has taken."""
        self._held: Counter[str] = Counter()
        """The same by payer."""
        self._waiters: dict[Callable[[], None], str] = {}

    @property
    def is_short(self) -> bool:
        """True while somebody waits."""
        return bool(self._waiters)

    def take(self, size: int, held: int = 0, body: ArrivingBody | None = None) -> bool:
        """Reserve `size` bytes for a body that has `held` of them already; False, with nothing reserved, when
        they are not there.
        """
        room = self._for_large
        if held + size <= LIMITS.small_body_bytes:
            has_little = body is None or self._held[body.payer] + size <= self._little
            room = self.total if has_little else self._for_small
        if self.used + size > room:
            return False
        self.used += size
        if body is not None:
            self._arriving[body] = self._arriving.get(body, 0) + size
            self._held[body.payer] += size
        return True

    def arrived(self, body: ArrivingBody) -> None:
        """A body is whole, or gone: what it holds is no longer held by one that arrives."""
        size = self._arriving.pop(body, 0)
        self._held[body.payer] -= size
        if self._held[body.payer] <= 0:
            del self._held[body.payer]

    def release(self, request: Request) -> None:
        """Free what the body of a request holds."""
        size, request.reserved = request.reserved, 0
        self.used -= size
        if size and self._waiters:
            self.give(0)

    def give(self, size: int) -> None:
        """Free bytes and call the waiters, in their order."""
        self.used -= size
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            waiter()

    def wait(self, waiter: Callable[[], None], payer: str = "") -> None:
        """Have `waiter` called once, after bytes were freed; it must then reserve again."""
        self._waiters[waiter] = payer

    def forget(self, waiter: Callable[[], None]) -> None:
        """The waiter is gone."""
        self._waiters.pop(waiter, None)

    def tick(self, now: float) -> None:
        """Take back what the payer with most holds for long, while others wait for their share."""
        if not self._waiters or (hog := self._hog()) is None:
            return
        late = [(body.whole_in_s(now), body) for body in self._arriving if body.payer == hog]
        late.sort(key=lambda each: each[0], reverse=True)
        for whole_in_s, body in late[:_GIVEN_UP_AT_ONCE]:
            if whole_in_s <= LIMITS.body_stall_s or self._hog() != hog:
                return
            reached("body_stall_s")
            body.give_up()

    def _hog(self) -> str | None:
        """The payer that holds most, and more than a share, while one waits that holds less."""
        if not self._held:
            return None
        share = self.total / len(self._held.keys() | set(self._waiters.values()))
        hog, most = self._held.most_common(1)[0]
        if most <= share or all(self._held[payer] >= share for payer in self._waiters.values()):
            return None
        return hog


# A client and the exchange that answers its request, as each sees the other.


class ClientExchange(Protocol):
    """What a connection knows of the exchange that answers its request."""

    def start(self) -> None: ...
    def crashed(self, error: Exception) -> None: ...
    def client_left(self) -> None: ...
    def client_paused(self, paused: bool) -> None: ...
    def stop(self, failure: Failure) -> None: ...
    def tick(self, now: float) -> None: ...


class ResponseClient(Protocol):
    """What an exchange knows of its client. `secure`: by TLS; `shows_internals`: its answers tell which
    unit it was.

    `write` checks nothing, and must not be used once the client has left. `hint` sends heads that come before
    that of the response.
    """

    peer: str
    secure: bool
    shows_internals: bool

    def write(self, data: bytes, /) -> None: ...
    def send(self, data: bytes) -> None: ...
    def hint(self, heads: bytes) -> None: ...
    def finish(self, request: Request, *, keep_alive: bool) -> None: ...
    def give_up(self, exchange: ClientExchange, request: Request) -> None: ...
    def cut(self) -> None: ...


# A client whose answer comes faster than it reads it: what is kept for it, and when it is too slow.
#
# Its unit goes on until `LIMITS.unsent_bytes` wait in the gate: so a slot is held for as long as its engine
# works, and not for as long as its client reads. All clients together have `LIMITS.unsent_total_bytes`; who
# comes when that is used up has its unit paused at once.


LOOK_S = 0.01
"""How often what waits is looked at, beside with each read that is not passed on unread: the loop tells only
once that something does.
"""


class Backlogs:
    """The memory for what slow clients have yet to read. Each has all that it may have, or none."""

    def __init__(self) -> None:
        self.held = 0

    def take(self) -> bool:
        """Reserve as much as one may have; False: there is not so much left."""
        if self.held + LIMITS.unsent_bytes > LIMITS.unsent_total_bytes:
            reached("unsent_total_bytes")
            return False
        self.held += LIMITS.unsent_bytes
        return True

    def give(self) -> None:
        """Give back what one had."""
        self.held -= LIMITS.unsent_bytes


class SlowReader:
    """From when on something waits for a client until all of it was taken. `hold_back` is called once, when
    its unit has to wait.
    """

    __slots__ = ("_acknowledged", "_backlogs", "_has_room", "_hold_back", "_since", "_timer", "_transport")

    def __init__(
        self, transport: asyncio.Transport, backlogs: Backlogs, now: float, hold_back: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._backlogs = backlogs
        self._hold_back = hold_back
        self._since, self._acknowledged = now, acknowledged(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._has_room = backlogs.take()
        if self._has_room:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)
        else:
            hold_back()

    def look(self) -> None:
        """Hold its unit back if as much waits as may."""
        if self._timer is not None and self._transport.get_write_buffer_size() >= LIMITS.unsent_bytes:
            self._timer.cancel()
            self._timer = None
            reached("unsent_bytes")
            self._hold_back()

    def _look_again(self) -> None:
        self.look()
        if self._timer is not None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)

    def is_too_slow(self, now: float) -> bool:
        """Whether it has taken too little for too long."""
        if self._acknowledged is None or now - self._since < LIMITS.slow_reader_s:
            return False
        before, self._acknowledged = self._acknowledged, acknowledged(self._transport)
        self._since = now
        if self._acknowledged is None:
            return False
        return self._acknowledged - before < LIMITS.slow_reader_s * LIMITS.slow_reader_bytes_per_s

    def end(self) -> None:
        """It has taken all, or has left."""
        if self._timer is not None:
            self._timer.cancel()
        if self._has_room:
            self._has_room = False
            self._backlogs.give()
