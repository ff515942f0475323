"""A TCP connection as two kernels and a wire see it: order, a bounded window, FIN, RST, nothing else.

A `Lane` carries one direction. What is put on it arrives in order, after a seeded latency, whole or split;
while the link is cut it is held. A `Socket` is one end: what it has received waits until it is read, and
the peer may send only while less than `WINDOW` bytes are unread, so a reader that stops makes the writer
stop.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVarTuple
from zlib import crc32

if TYPE_CHECKING:
    from tests.sim.network import Network

Address = tuple[str, int]
Ts = TypeVarTuple("Ts")

WINDOW = 64 * 1024
READ_SIZE = 256_000
_ESTABLISHED, _CLOSE, _CLOSE_WAIT = 1, 7, 8
"""States as TCP_INFO tells them."""


@dataclass(frozen=True, slots=True)
class Link:
    """How bytes travel. `split`, `hiccup`: chances per write; after a hiccup much arrives together."""

    latency_s: tuple[float, float] = (0.0002, 0.002)
    bytes_per_s: float = math.inf
    split: float = 0.1
    hiccup: float = 0.05
    hiccup_s: float = 0.03


class Lane:
    """One direction of a connection: events that reach the other end in the order they were sent."""

    def __init__(self, network: Network, source: Address, target: Address) -> None:
        self._network = network
        self.source = source
        self.target = target
        self._last_s = 0.0
        self._queue: deque[tuple[float, Callable[..., None], tuple[Any, ...]]] = deque()
        self._scheduled = False
        self._is_held = False

    def carry(self, arrive: Callable[[*Ts], None], *args: *Ts, size: int = 0) -> None:
        """Let `arrive` happen at the other end, after everything sent before it."""
        network = self._network
        link, random = network.link(self.source, self.target), network.rng.random
        soonest_s, latest_s = link.latency_s
        takes_s = soonest_s + (latest_s - soonest_s) * random()
        if random() < link.hiccup:
            takes_s += link.hiccup_s
        self._last_s = max(self._last_s, network.loop.now_s + takes_s) + size / link.bytes_per_s
        self._queue.append((self._last_s, arrive, args))
        if not self._scheduled:
            self._schedule()

    def carry_data(self, data: bytes, arrive: Callable[[bytes], None]) -> None:
        """Carry bytes, sometimes in two pieces that arrive apart."""
        network, size = self._network, len(data)
        network.trace.note("send", self.source, self.target, size, crc32(data))
        if size > 1 and network.rng.random() < network.link(self.source, self.target).split:
            cut = network.rng.randrange(1, size)
            self.carry(arrive, data[:cut], size=cut)
            self.carry(arrive, data[cut:], size=size - cut)
        else:
            self.carry(arrive, data, size=size)

    def resume(self) -> None:
        """The link may be whole again: go on with what was held."""
        self._is_held = False
        self._schedule()

    def _schedule(self) -> None:
        if not self._queue or self._scheduled or self._is_held:
            return
        if self._network.is_cut(self.source, self.target):
            self._is_held = True
            self._network.held.append(self)
            return
        self._scheduled = True
        loop = self._network.loop
        loop.outside(max(0.0, self._queue[0][0] - loop.now_s), self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        queue, now_s = self._queue, self._network.loop.now_s
        if not self._network.is_cut(self.source, self.target):
            while queue and queue[0][0] <= now_s:
                _, arrive, args = queue.popleft()
                arrive(*args)
        self._schedule()


class Socket:
    """One end of a connection, as its kernel keeps it. `on_ready` is called when there is news to act on."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.peer: Socket
        self.on_ready: Callable[[], None] = _nobody
        self.error = 0
        self.is_closed = False
        self.sent = self.acked = 0
        self._inbox = bytearray()
        self._fin_sent = False
        self._fin_received = False
        self._in_flight = 0
        self._unreported = 0

    @property
    def local(self) -> Address:
        return self.lane.source

    @property
    def remote(self) -> Address:
        return self.lane.target

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """TCP_INFO: the state, and how many bytes were sent, and acknowledged (with one for the SYN)."""
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        info = bytearray(256)
        info[0] = _CLOSE if self.error else _CLOSE_WAIT if self._fin_received else _ESTABLISHED
        struct.pack_into("Q", info, 120, self.acked + 1)
        struct.pack_into("QQ", info, 200, self.sent, 0)
        return bytes(info[:size])

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Nothing here depends on what programs set."""

    @property
    def is_readable(self) -> bool:
        return bool(self._inbox or self._fin_received or self.error)

    def send(self, data: bytes) -> int:
        """Take as much of `data` as the window has room for. Raises OSError when the connection is broken."""
        if self.error:
            raise _os_error(self.error)
        if self._fin_sent:
            raise _os_error(errno.EPIPE)
        taken = data[: WINDOW - self._in_flight]
        if taken:
            self._in_flight += len(taken)
            self.sent += len(taken)
            self.lane.carry_data(taken, self.peer._receive)
        return len(taken)

    def recv(self) -> bytes | None:
        """What has arrived, b"" at the end, None when there is nothing yet. Raises OSError after a reset."""
        if self._inbox:
            data = bytes(self._inbox[:READ_SIZE] if len(self._inbox) > READ_SIZE else self._inbox)
            del self._inbox[: len(data)]
            self._report_read(len(data))
            return data
        if self.error:
            raise _os_error(self.error)
        return b"" if self._fin_received else None

    def shutdown(self) -> None:
        """Send FIN: no more bytes from this end."""
        if not self._fin_sent and not self.error:
            self._fin_sent = True
            self.lane.carry(self.peer._receive_fin)

    def close(self) -> None:
        """Give the connection up. As in Linux, unread bytes make this a reset and not an end."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._inbox:
            self._reset_peer()
        else:
            self.shutdown()

    def break_off(self) -> None:
        """A reset from outside: this end knows at once, the other when the RST has travelled."""
        self._reset_peer()
        self._receive_reset()

    def _reset_peer(self) -> None:
        if not self.error:
            self.lane.carry(self.peer._receive_reset)

    def _receive(self, data: bytes) -> None:
        if self.error:
            return
        if self.is_closed:
            self._reset_peer()
            return
        self.peer.acked += len(data)
        self._inbox += data
        self.on_ready()

    def _receive_fin(self) -> None:
        self._fin_received = True
        self.on_ready()

    def _receive_reset(self) -> None:
        if not self.error:
            self.error = errno.EPIPE if self._fin_received else errno.ECONNRESET
            self.on_ready()

    def _report_read(self, size: int) -> None:
        self._unreported += size
        if self._unreported >= WINDOW // 4:
            self.lane.carry(self.peer._open_window, self._unreported)
            self._unreported = 0

    def _open_window(self, size: int) -> None:
        self._in_flight -= size
        self.on_ready()


def socket_pair(network: Network, source: Address, target: Address) -> tuple[Socket, Socket]:
    near, far = Socket(Lane(network, source, target)), Socket(Lane(network, target, source))
    near.peer, far.peer = far, near
    return near, far


def _nobody() -> None:
    """A socket that no transport has taken yet."""


def _os_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))
