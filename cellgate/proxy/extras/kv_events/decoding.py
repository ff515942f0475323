"""Batches of KV events, decoded without holding up the loop: small ones here, others in another process.

1. What is small is decoded on the loop, a part at a time. A larger batch goes to one process, which all
   publishers share in turn; it sends back what it has decoded in parts, because to unpack takes time as well.
2. The process has a limit of CPU time for each batch. It ends when nothing has come for a while.
"""

from __future__ import annotations

import asyncio
import pickle
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from typing import BinaryIO

from cellgate.proxy.extras.kv_events.wire import MalformedError, events
from cellgate.router.kv_index import Cleared, Event

SMALL_BYTES = 1 << 14
"""A batch up to this size is decoded on the loop: the most that it can be made to take is 3 ms."""
PART_BLOCKS = 256
"""Blocks, or events, of one part: to apply so many takes half a millisecond."""
BATCH_CPU_S = 2.0
STUCK_S = 10.0
IDLE_S = 10.0
LENGTH_BYTES = 8
"""Each message is its length, big-endian, followed by that many bytes; a part of length 0 is the end."""
_COMMAND = (sys.executable, "-c", "from cellgate.proxy.extras.kv_events.decoding import main; main()")

EventPart = list[Event]


def parts(payload: bytes, rank: int | None) -> Iterator[EventPart]:
    """The events of a batch, some at a time. Raises MalformedError: what was taken before counts."""
    part: EventPart = []
    size = 0
    for event in events(payload, rank):
        part.append(event)
        size += 1 if isinstance(event, Cleared) else 1 + len(event.blocks)
        if size >= PART_BLOCKS:
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
                async for part in self._elsewhere(payload, rank):
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
                self._timer = asyncio.get_running_loop().call_later(IDLE_S, self.end)

    async def _elsewhere(self, payload: bytes, rank: int | None) -> AsyncGenerator[EventPart, None]:
        """Raises OSError, EOFError and TimeoutError when the process does not do it."""
        process = self._process or await asyncio.create_subprocess_exec(
            *_COMMAND, stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        packed = pickle.dumps((payload, rank))
        async with asyncio.timeout(STUCK_S):
            process.stdin.write(len(packed).to_bytes(LENGTH_BYTES, "big"))
            process.stdin.write(packed)
            await process.stdin.drain()
        while True:
            async with asyncio.timeout(STUCK_S):
                length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
                told = pickle.loads(await process.stdout.readexactly(length)) if length else None
            if told is None:
                return
            if isinstance(told, str):
                raise MalformedError(told)
            yield told

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


def _send(answers: BinaryIO, told: EventPart | str) -> None:
    packed = pickle.dumps(told)
    answers.write(len(packed).to_bytes(LENGTH_BYTES, "big") + packed)
    answers.flush()
