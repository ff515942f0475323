"""The connection to one publisher of KV events: ZeroMQ, read on the loop. An optional package: pyzmq.

The engine binds a PUB socket, and a ROUTER socket for replays where it is told to. Frames of a message:
[topic][number, 8 bytes][payload]. A replay is asked for with ["", first number], its messages end with number
-1, and older engines leave the topic out (vllm/distributed/kv_events.py).

In this order: `ZmqLink`, `MalformedError`, `configured`, `Numbers`, `KvDecoder`.
"""

from __future__ import annotations

import asyncio
import pickle
import re
import signal
import sys
from array import array
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from itertools import zip_longest
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlsplit

import msgpack
import orjson
import zmq
from zmq.utils.monitor import parse_monitor_message

from cellgate.router.kv_index import TOKEN_BYTES, Cleared, Event, Removed, Stored
from cellgate.router.nouns import KvEvents

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

_KV_WIRE_END = b"\xff" * 8
_KV_WIRE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
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


class ZmqLink:
    """One rank's events, by ZeroMQ. Raises BrokenPublisherError for an address that is none."""

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
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _KV_WIRE_FAILED | _CLOSED
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
            if event & _KV_WIRE_FAILED or self._closed > CLOSED_MAX:
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
                if frames[-2:-1] == [_KV_WIRE_END]:
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


# The payload of one message of KV events, as vLLM and SGLang write it: msgpack, unpacked event by event.
#
# batch     [time, [event, ...], data-parallel rank or nil]      (a default at its end may be left out)
# event     {"type": "BlockStored", "block_hashes": [...], "parent_block_hash": ..., "token_ids": [...],
# "block_size": n, "lora_name": ..., "medium": ..., "extra_keys": [[...] or nil, ...], ...}
# {"type": "BlockRemoved", "block_hashes": [...]}      {"type": "AllBlocksCleared"}
# before    ["BlockStored", hashes, parent, token ids, block size, LoRA id, medium, LoRA name, extra keys]
# ["BlockRemoved", hashes, medium]                     ["AllBlocksCleared"]
#
# A hash is an integer, or bytes of which the last eight count. Sources: vllm/distributed/kv_events.py,
# sglang/srt/disaggregation/kv_events.py. Unknown kinds of events, and groups of layers that keep only the end
# of a prompt (a sliding window), are left out.


PAYLOAD_MAX = 2 << 20
"""Bytes of one message: a step of 65,536 tokens takes a quarter of that."""
EVENTS_MAX = 1 << 16
"""Events of one message, of whatever kind: an engine names each block that it evicts in one of its own."""
ITEMS_MAX = 1 << 16
"""Tokens, or hashes, of one event: to unpack so many takes 2 ms."""
PART_BLOCKS = 128
"""An event of more blocks is handed out in parts of so many: 0.3 ms of work each."""

_HASH = (1 << 60) - 1
_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
_KV_WIRE_WHOLE = frozenset({None, "", "full_attention", "mla_attention"})
"""Kinds of groups of layers that keep the whole prompt."""


class MalformedError(ValueError):
    """The payload is not what an engine sends."""


def events(payload: bytes, rank: int | None = None) -> Iterator[Event]:
    """The events of a batch, unpacked as they are taken. Raises MalformedError: what was taken before counts.

    `rank`: the batch must be of this one, if it names one.
    """
    try:
        yield from _events(payload, rank)
    except MalformedError:
        raise
    except (
        msgpack.UnpackException,
        ValueError,
        TypeError,
        LookupError,
        OverflowError,
        AttributeError,
    ) as error:
        raise MalformedError(f"{type(error).__name__}: {str(error)[:80]}") from error


def _events(payload: bytes, rank: int | None) -> Iterator[Event]:
    unpacker = msgpack.Unpacker(
        max_buffer_size=PAYLOAD_MAX, max_array_len=ITEMS_MAX, max_map_len=64, strict_map_key=False
    )
    unpacker.feed(payload)
    fields = unpacker.read_array_header()
    if not 2 <= fields <= 16 or not isinstance(unpacker.unpack(), int | float):
        raise MalformedError("a batch does not begin with a time")
    removed: list[int] = []
    count = unpacker.read_array_header()
    if count > EVENTS_MAX:
        raise MalformedError(f"a batch has {count} events, more than {EVENTS_MAX}")
    for _ in range(count):
        found = unpacker.unpack()
        kind = found.get("type") if type(found) is dict else _kind(found)
        if kind == "BlockRemoved":
            # An engine names each block that it evicts in an event of its own: they are handed out together.
            names = found["block_hashes"] if type(found) is dict else found[1]
            removed += map(_name, names)
            if len(removed) < PART_BLOCKS:
                continue
        if removed:
            yield from (Removed(removed[at : at + PART_BLOCKS]) for at in range(0, len(removed), PART_BLOCKS))
            removed = []
        if kind == "BlockStored":
            yield from _stored(found if type(found) is dict else dict(zip_longest(_STORED, found[1:9])))
        elif kind == "AllBlocksCleared":
            yield Cleared()
    if removed:
        yield Removed(removed)
    if fields > 2 and rank is not None and (named := unpacker.unpack()) not in (None, rank):
        raise MalformedError(f"a batch of rank {str(named)[:20]} came from the endpoint of rank {rank}")


def _kind(found: Any) -> object:
    if type(found) is list and found:
        return found[0]
    raise MalformedError(f"an event is {type(found).__name__}")


def _stored(found: Mapping[str, Any]) -> Iterator[Stored]:
    if found.get("kv_cache_spec_kind") not in _KV_WIRE_WHOLE or found.get("kv_cache_spec_sliding_window"):
        return
    names, before = [_name(one) for one in found["block_hashes"] or ()], found.get("parent_block_hash")
    parent = None if before is None else _name(before)
    tokens = array("I", found.get("token_ids") or ()).tobytes()
    lora = found.get("lora_name") or found.get("lora_id") or ""
    has_extra = any(found.get("extra_keys") or ()) or found.get("cache_salt")
    extra = _extra(found, str(lora), len(names)) if has_extra else None
    block_tokens = int(found.get("block_size") or 0)
    size = block_tokens * TOKEN_BYTES
    if tokens and len(tokens) != len(names) * size:
        raise MalformedError(
            f"{len(names)} blocks of {block_tokens} with {len(tokens) // TOKEN_BYTES} tokens"
        )
    if len(names) <= PART_BLOCKS:
        yield Stored(names, parent, tokens, block_tokens, str(lora).encode(), extra)
        return
    for at in range(0, len(names), PART_BLOCKS):
        part = slice(at, at + PART_BLOCKS)
        data = tokens[at * size : (at + PART_BLOCKS) * size]
        more = extra[part] if extra else None
        yield Stored(names[part], parent, data, block_tokens, str(lora).encode(), more)
        parent = names[part][-1]


def _name(found: Any) -> int:
    if type(found) is int:
        return found & _HASH
    if type(found) is bytes:
        return int.from_bytes(found[-8:], "big") & _HASH
    raise MalformedError(f"a hash is {type(found).__name__}")


def _extra(found: Mapping[str, Any], lora: str, count: int) -> list[bytes]:
    """By block: what its hash has beside tokens and adapter. The first has the salt, and those behind it
    depend on it by their parent; SGLang names the salt for all.
    """
    keys: Sequence[Any] = found.get("extra_keys") or ()
    by_block = [_bytes_of(block, lora) for block in list(keys)[:count]]
    by_block += [b""] * (count - len(by_block))
    if (salt := found.get("cache_salt")) and found.get("parent_block_hash") is None and count:
        by_block[0] += _bytes_of([salt], lora)
    return by_block


def _bytes_of(keys: Any, lora: str) -> bytes:
    kept = [key for key in keys or () if key != lora]
    return orjson.dumps(kept, default=_hex) if kept else b""


def _hex(value: Any) -> str:
    return bytes(value).hex()


# Where a unit publishes its KV events: as configured, or as its engine tells. Pure.
#
# vLLM's `GET /kv_event_sources` is {rank: {"endpoint": ..., "replay_endpoint": ..., ...}}; SGLang's `GET
# /server_info` has `kv_events`: {"endpoint_host": ..., "endpoint_port_base": n, "dp_size": n,
# "replay_endpoint_port_base": n or null, ...}, where a rank is at the base plus its number. A host that
# stands for all addresses of the engine's machine is that of the unit's URL.


KV_WIRE_RANKS_MAX = 64
"""A unit has at most so many data-parallel ranks."""
PATHS = {"vllm": "/kv_event_sources", "sglang": "/server_info"}
"""What an engine is asked, by its name."""

Publishers = dict[int, Publisher]
"""By data-parallel rank."""

_TCP = re.compile(r"tcp://(?P<host>\[[^\]]+\]|[^:/]+):(?P<port>\d{1,5})")
_EVERYWHERE = frozenset({"*", "0.0.0.0", "[::]", "::"})


def configured(keys: KvEvents) -> Publishers:
    """The ranks of a configured endpoint: each has the port behind the one before."""
    return {
        rank: Publisher(_shifted(keys.endpoint, rank), _shifted(keys.replay_endpoint, rank))
        for rank in range(keys.ranks)
    }


def publishers_in(engine: str, answer: Any, url: str) -> Publishers:
    """The ranks that an engine tells of in JSON; none where it publishes nothing, or nothing that is
    understood.
    """
    host = urlsplit(url).hostname or ""
    host = f"[{host}]" if ":" in host else host
    if not isinstance(answer, Mapping):
        return {}
    found = _by_rank(answer) if engine == "vllm" else _by_base(answer.get("kv_events"))
    publishers = {
        rank: Publisher(_at(host, endpoint), _at(host, replay)) for rank, (endpoint, replay) in found.items()
    }
    return {rank: publisher for rank, publisher in publishers.items() if publisher.endpoint}


def _by_rank(answer: Mapping[str, Any]) -> dict[int, tuple[Any, Any]]:
    rows = {rank: row for rank, row in answer.items() if str(rank).isdecimal() and isinstance(row, Mapping)}
    return {
        int(rank): (row.get("endpoint"), row.get("replay_endpoint"))
        for rank, row in rows.items()
        if int(rank) < KV_WIRE_RANKS_MAX and row.get("publisher", "zmq") == "zmq"
    }


def _by_base(row: Any) -> dict[int, tuple[Any, Any]]:
    if not isinstance(row, Mapping) or row.get("publisher") != "zmq":
        return {}
    host, base, replay = (
        row.get(name) for name in ("endpoint_host", "endpoint_port_base", "replay_endpoint_port_base")
    )
    ranks = row.get("dp_size") or 1
    if not (isinstance(base, int) and isinstance(ranks, int) and 0 < ranks <= KV_WIRE_RANKS_MAX):
        return {}
    return {
        rank: (f"tcp://{host}:{base + rank}", f"tcp://{host}:{replay + rank}" if replay else "")
        for rank in range(ranks)
    }


def _at(host: str, endpoint: Any) -> str:
    """The endpoint as it is reached from here; empty if it is none by TCP."""
    match = _TCP.fullmatch(endpoint) if isinstance(endpoint, str) else None
    if match is None or not 0 < int(match["port"]) < 65536:
        return ""
    return f"tcp://{host if match['host'] in _EVERYWHERE else match['host']}:{match['port']}"


def _shifted(endpoint: str, rank: int) -> str:
    match = _TCP.fullmatch(endpoint)
    return f"tcp://{match['host']}:{int(match['port']) + rank}" if match else ""


# The numbers of a publisher's messages: what is missing, what came twice, who has begun again. Pure.
#
# A process counts its messages from 0. Those of a replay come on another connection than those that are
# published, which may come a second time behind it; but published ones never run backwards within one
# process.


class NumberStep(Enum):
    """What to do with a published message."""

    APPLY = "apply"
    SKIP = "skip"
    """A replay had it."""
    GAP = "gap"
    """Some before it are missing."""
    RESTART = "restart"
    """It is of another process."""


class Numbers:
    """The numbers that one publisher has used. `next` is the number of the next message; None: any."""

    __slots__ = ("_published", "next")

    def __init__(self) -> None:
        self.next: int | None = None
        self._published = -1

    def begin_anew(self) -> None:
        """Nothing is known of its messages."""
        self.next = None
        self._published = -1

    def take(self, number: int) -> NumberStep:
        """A message was published."""
        if number <= self._published:
            return NumberStep.RESTART
        self._published = number
        if self.next is None or number == self.next:
            return NumberStep.APPLY
        return NumberStep.SKIP if number < self.next else NumberStep.GAP


# Batches of KV events, decoded without holding up the loop: small ones here, others in another process.
#
# 1. What is small is decoded on the loop, a part at a time. A larger batch goes to one process, which all
#    publishers share in turn; it sends back what it has decoded in parts, because to unpack takes time as
#    well.
# 2. The process has a limit of CPU time for each batch. It ends when nothing has come for a while.


SMALL_BYTES = 1 << 14
"""A batch up to this size is decoded on the loop: the most that it can be made to take is 3 ms."""
GROWN_BLOCKS = 256
"""Blocks, or events, of one part: to apply so many takes half a millisecond."""
BATCH_CPU_S = 2.0
KV_WIRE_STUCK_S = 10.0
KV_WIRE_IDLE_S = 10.0
LENGTH_BYTES = 8
"""Each message is its length, big-endian, followed by that many bytes; a part of length 0 is the end."""
_KV_WIRE_COMMAND = (sys.executable, "-c", "from cellgate.extras.kv_events.wire import main; main()")

EventPart = list[Event]


def parts(payload: bytes, rank: int | None) -> Iterator[EventPart]:
    """The events of a batch, some at a time. Raises MalformedError: what was taken before counts."""
    part: EventPart = []
    size = 0
    for event in events(payload, rank):
        part.append(event)
        size += 1 if isinstance(event, Cleared) else 1 + len(event.blocks)
        if size >= GROWN_BLOCKS:
            yield part
            part, size = [], 0
    if part:
        yield part


class KvDecoder:
    """Decodes the batches of all publishers of a gate."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    async def decode(self, payload: bytes, rank: int | None) -> AsyncGenerator[EventPart, None]:
        """The events of a batch in parts, as `parts` gives them; others may run between two of them."""
        if len(payload) <= SMALL_BYTES:
            for part in parts(payload, rank):
                yield part
            return
        async with self._turn:
            if self._timer is not None:
                self._timer.cancel()
            is_whole = False
            try:
                async for part in self._in_process(payload, rank):
                    yield part
                is_whole = True
            except (OSError, EOFError, TimeoutError) as error:
                raise MalformedError("decoding a batch took too long, or too much memory") from error
            except MalformedError:
                is_whole = True
                raise
            finally:
                if not is_whole:
                    # Its answer was not read to the end.
                    self.end()
                self._timer = asyncio.get_running_loop().call_later(KV_WIRE_IDLE_S, self.end)

    async def _in_process(self, payload: bytes, rank: int | None) -> AsyncGenerator[EventPart, None]:
        """Raises OSError, EOFError and TimeoutError when the process does not do it."""
        process = self._process or await asyncio.create_subprocess_exec(
            *_KV_WIRE_COMMAND, stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        packed = pickle.dumps((payload, rank))
        async with asyncio.timeout(KV_WIRE_STUCK_S):
            process.stdin.write(len(packed).to_bytes(LENGTH_BYTES, "big"))
            process.stdin.write(packed)
            await process.stdin.drain()
        while True:
            async with asyncio.timeout(KV_WIRE_STUCK_S):
                length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
                result = pickle.loads(await process.stdout.readexactly(length)) if length else None
            if result is None:
                return
            if isinstance(result, str):
                raise MalformedError(result)
            yield result

    def end(self) -> None:
        """End the process, and do not wait for that."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()

    async def close(self) -> None:
        """End the process."""
        if self._timer is not None:
            self._timer.cancel()
        process = self._process
        self.end()
        if process is not None:
            await process.wait()


def main() -> None:
    """Decode batches until there are no more."""
    for each in (signal.SIGINT, signal.SIGTERM):
        # These signals may be sent to all processes of a service, but are meant for the gate.
        signal.signal(each, signal.SIG_IGN)
    asked, answers = sys.stdin.buffer, sys.stdout.buffer
    while head := asked.read(LENGTH_BYTES):
        payload, rank = pickle.loads(asked.read(int.from_bytes(head, "big")))
        # It counts CPU time only, so waiting for the next batch does not count.
        signal.setitimer(signal.ITIMER_PROF, BATCH_CPU_S)
        _answer(answers, payload, rank)
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _answer(answers: BinaryIO, payload: bytes, rank: int | None) -> None:
    try:
        for part in parts(payload, rank):
            _send(answers, part)
    except (MalformedError, MemoryError) as error:
        _send(answers, str(error) or "a batch takes too much memory")
        return
    answers.write(bytes(LENGTH_BYTES))
    answers.flush()


def _send(answers: BinaryIO, result: EventPart | str) -> None:
    packed = pickle.dumps(result)
    answers.write(len(packed).to_bytes(LENGTH_BYTES, "big") + packed)
    answers.flush()
