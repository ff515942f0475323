"""Large bodies are parsed in another process: a thread would hold the interpreter's lock meanwhile.

1. One body at a time, smaller ones first. The number that waits is limited; a body whose client leaves is
   dropped.
2. A body that the process cannot parse, or dies of, is refused. The next body gets a new process.
3. A request that stops waiting while its body is being parsed is kept until then: its memory is in use.
"""

from __future__ import annotations

import asyncio
import heapq
import pickle
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from itertools import count

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.logs.log import log_line
from cellgate.proxy.request.large_body_reader import LENGTH_BYTES, ReadResult
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.router.nouns import Ask

STUCK_S = 30.0
"""A process that takes this long is blocked: its CPU time is limited to less."""
_S_EACH_BYTE = 1e-7
"""A smaller body goes first, if it came later by less than this for each byte that it is smaller."""
_COMMAND = (sys.executable, "-c", "from cellgate.proxy.request.large_body_reader import main; main()")

_Turn = tuple[float, int, "asyncio.Future[None]"]


class LargeBodies:
    """Reads bodies in one process, started when the first large body comes."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._is_busy = False
        self._waiting: list[_Turn] = []
        self._numbers = count()

    async def read(self, body: bytes) -> Ask | Failure:
        """What a body asks for, or why it is refused. Raises RuntimeError when reading it shows a defect."""
        if len(self._waiting) >= LIMITS.large_bodies_waiting:
            reached("large_bodies_waiting")
            reason = "too many large request bodies wait to be read; retry later"
            return Failure(FailureKind.NO_RESOURCES, reason)
        await self._turn(len(body))
        reading = asyncio.ensure_future(self._read(body))
        reading.add_done_callback(self._next)
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            await asyncio.wait((reading,))
            raise

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    # -- whose turn it is ----------------------------------------------------------------------------------

    async def _turn(self, size: int) -> None:
        if not self._is_busy:
            self._is_busy = True
            return
        loop = asyncio.get_running_loop()
        turn = (loop.time() + size * _S_EACH_BYTE, next(self._numbers), loop.create_future())
        heapq.heappush(self._waiting, turn)
        try:
            await turn[2]
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
                heapq.heapify(self._waiting)
            elif not turn[2].cancelled():
                # Its turn came at this very moment.
                self._next()
            raise

    def _next(self, _: object = None) -> None:
        while self._waiting:
            if not (turn := heapq.heappop(self._waiting)[2]).done():
                turn.set_result(None)
                return
        self._is_busy = False

    # -- the process ---------------------------------------------------------------------------------------

    async def _read(self, body: bytes) -> Ask | Failure:
        try:
            process = self._process or await asyncio.create_subprocess_exec(
                *_COMMAND, stdin=PIPE, stdout=PIPE, start_new_session=True
            )
        except OSError as error:
            return _without_process(f"cannot be started: {error.strerror}")
        self._process = process
        try:
            async with asyncio.timeout(STUCK_S):
                told = await _ask(process, body)
        except (OSError, EOFError, TimeoutError) as error:
            await self.close()
            if process.returncode == -signal.SIGPROF:
                reached("large_body_cpu_s")
                return Failure(FailureKind.BODY_TOO_LARGE, "parsing the request's body takes too long")
            is_stuck = isinstance(error, TimeoutError)
            return _without_process(
                f"did not answer in {STUCK_S:.0f} s" if is_stuck else f"ended with {process.returncode}"
            )
        if told.ends:
            await self.close()
        for name in told.reached:
            reached(name)
        if told.ask is None:
            raise RuntimeError(told.trouble)
        return told.ask


async def _ask(process: Process, body: bytes) -> ReadResult:
    """Raises OSError and EOFError (of asyncio) when the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(len(body).to_bytes(LENGTH_BYTES, "big"))
    process.stdin.write(body)
    await process.stdin.drain()
    length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
    told: ReadResult = pickle.loads(await process.stdout.readexactly(length))
    return told


def _without_process(how: str) -> Failure:
    log_line(
        "warning",
        f"the process that parses large bodies {how}; the body is refused, the next gets a new process",
    )
    return Failure(FailureKind.NO_RESOURCES, "the gate could not read the request's body; retry later")
