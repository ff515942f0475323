"""The connection to one publisher of KV events: ZeroMQ, read on the loop. An optional package: pyzmq.

The engine binds a PUB socket, and a ROUTER socket for replays where it is told to. Frames of a message:
[topic][number, 8 bytes][payload]. A replay is asked for with ["", first number], its messages end with number
-1, and older engines leave the topic out (vllm/distributed/kv_events.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import NamedTuple, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from cellgate.proxy.kv_events.decode import PAYLOAD_MAX, MalformedError

REPLAY_S = 0.8
"""How long the next message of a replay may take."""
HEARTBEAT_MS = 300
SILENT_MS = 900
"""A peer that has answered no heartbeat for so long is gone: silence of the engine itself is normal."""
RECONNECT_MS, RECONNECT_MAX_MS = 100, 2000
CLOSED_MAX = 4
"""So many connections in a row may be closed before they could be used: about 2 s of them."""
QUEUED_BYTES = 16 << 20
"""So many bytes of messages of one socket wait to be applied."""
QUEUED_MAX = 16
"""So many messages more wait in a socket once these are there. Then the engine waits, or drops: a gap."""
TAKEN_BYTES = 1 << 20
"""So much is taken out of a socket in one turn of the loop."""
FRAMES_MAX = 8

_END = b"\xff" * 8
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_CLOSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""The connection was closed before it could be used, as by a process that is just ending."""


class Publisher(NamedTuple):
    """The addresses of one rank; an empty `replay`: it cannot repeat what was missed."""

    endpoint: str
    replay: str = ""


class EventBatch(NamedTuple):
    """One message: its number, and a batch of events."""

    number: int
    payload: bytes


class Reached(NamedTuple):
    """The connection is there, or lost."""

    is_up: bool


class BrokenPublisherError(Exception):
    """What is there does not publish KV events as it should."""


class KvEventLink(Protocol):
    """One rank's events."""

    @property
    def can_replay(self) -> bool: ...
    def take(self) -> EventBatch | Reached | None:
        """What has come next; None: nothing yet. Raises BrokenPublisherError, MalformedError."""
        ...

    async def wait(self) -> None:
        """Until something may have come."""
        ...

    def replay(self, first: int) -> AsyncGenerator[EventBatch, None]:
        """The messages from a number on, as far as they are kept. Raises BrokenPublisherError."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


class ZmqLink:
    """A KvEventLink by ZeroMQ. Raises BrokenPublisherError for an address that is none."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], publisher: Publisher) -> None:
        self._context = context
        self._publisher = publisher
        self._loop = asyncio.get_running_loop()
        self._came = asyncio.Event()
        self._closed = 0
        self._socket = _socket(context, zmq.SUB)
        self._socket.subscribe(b"")
        self._inbox = Inbox(self._socket, self._came)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED | _CLOSED
        )
        self._loop.add_reader(int(self._monitor.FD), self._came.set)
        try:
            self._socket.connect(publisher.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise BrokenPublisherError(f"{publisher.endpoint} is no address: {error}") from error

    @property
    def can_replay(self) -> bool:
        """Whether what was missed can be had again."""
        return bool(self._publisher.replay)

    def take(self) -> EventBatch | Reached | None:
        """What has come next; the state of the connection comes first."""
        if (frames := _received(self._monitor)) is not None:
            event = parse_monitor_message(frames)["event"]
            is_up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._closed = 0 if is_up else self._closed + bool(event & _CLOSED)
            if event & _FAILED or self._closed > CLOSED_MAX:
                raise BrokenPublisherError(f"{self._publisher.endpoint} does not speak ZeroMQ")
            return Reached(is_up)
        frames = self._inbox.take()
        return _message(frames) if frames is not None else None

    async def wait(self) -> None:
        """Until something may have come."""
        await self._came.wait()
        self._came.clear()

    async def replay(self, first: int) -> AsyncGenerator[EventBatch, None]:
        """The messages from a number on, as far as the engine keeps them."""
        socket, came = _socket(self._context, zmq.DEALER), asyncio.Event()
        inbox = Inbox(socket, came)
        try:
            socket.connect(self._publisher.replay)
            socket.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(REPLAY_S):
                    while (frames := inbox.take()) is None:
                        await came.wait()
                        came.clear()
                if frames[-2:-1] == [_END]:
                    return
                yield _message(frames)
        except (TimeoutError, zmq.ZMQError) as error:
            reason = f"a replay from {self._publisher.replay} was not answered within {REPLAY_S} s"
            raise BrokenPublisherError(reason) from error
        finally:
            inbox.close()
            socket.close(0)

    def close(self) -> None:
        """Close the sockets."""
        self._loop.remove_reader(int(self._monitor.FD))
        self._inbox.close()
        self._socket.disable_monitor()
        self._socket.close(0)


class Inbox:
    """What has come on a socket and is not applied yet, bounded in bytes. `came` is set when there is more.

    The descriptor of a socket tells only once of what has come, so it is read until there is no more, or
    until enough waits here; then the rest waits at the engine.
    """

    def __init__(self, socket: zmq.Socket[bytes], came: asyncio.Event) -> None:
        self._socket = socket
        self._came = came
        self._loop = asyncio.get_running_loop()
        self._messages: deque[list[bytes]] = deque()
        self._size = 0
        self._soon: asyncio.Handle | None = None
        self._descriptor = int(socket.FD)
        self._loop.add_reader(self._descriptor, self._drain)

    def take(self) -> list[bytes] | None:
        """The next message; None: nothing yet. Raises MalformedError."""
        if not self._messages:
            self._drain()
        if not self._messages:
            return None
        frames = self._messages.popleft()
        self._size -= sum(map(len, frames))
        if len(frames) > FRAMES_MAX:
            raise MalformedError(f"a message has more than {FRAMES_MAX} frames")
        return frames

    def close(self) -> None:
        """Read no more."""
        self._loop.remove_reader(self._descriptor)
        if self._soon is not None:
            self._soon.cancel()
        self._messages.clear()

    def _drain(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        left = TAKEN_BYTES
        while self._size < QUEUED_BYTES and left > 0:
            frames = _received(self._socket)
            if frames is None:
                break
            self._messages.append(frames)
            size = sum(map(len, frames))
            self._size += size
            left -= size
        if left <= 0:
            self._soon = self._loop.call_soon(self._drain)
        if self._messages:
            self._came.set()


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RCVHWM, QUEUED_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, PAYLOAD_MAX)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    return socket


def _received(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def _message(frames: list[bytes]) -> EventBatch:
    """The last two frames count: the topic may be left out."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise MalformedError("a message has no number of 8 bytes")
    return EventBatch(int.from_bytes(frames[-2], "big"), frames[-1])
