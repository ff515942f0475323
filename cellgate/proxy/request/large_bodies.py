"""Large bodies are parsed in other processes: a thread would hold the interpreter's lock meanwhile.

1. Keys, or addresses, take turns, and pay with the CPU time that their bodies take. Of each one body is
   parsed at a time, the smaller ones first, and the processes are a few: a body that takes seconds holds up
   those of the same key.
2. The number that waits is limited; where it is reached, a payer with few displaces the last of the one with
   most. A body whose client leaves is dropped.
3. A body that the process cannot parse, or dies of, is refused. The next body gets a new process.
4. A request that stops waiting while its body is being parsed is kept until then: its memory is in use.

In this order: `LargeBodies`, `ReadResult`, `LargeReads`.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import resource
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import BinaryIO, NamedTuple

from cellgate.proxy.config.limits import LIMITS, REACHED, reached
from cellgate.proxy.http.body_memory import BodyMemory
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.request import Request
from cellgate.proxy.observe.defects import report_defect
from cellgate.proxy.observe.log import log_line
from cellgate.proxy.process.memory import return_large_blocks
from cellgate.proxy.request.beginnings import Beginnings
from cellgate.proxy.request.body import has_more_nodes, read_large_ask
from cellgate.proxy.request.conversation import Conversation, read_conversation
from cellgate.router.nouns import Ask
from cellgate.router.queue import Entered, FairQueue, FairRules

STUCK_S = 30.0
"""A process that takes this long is blocked: its CPU time is limited to less."""
IDLE_S = 2.0
"""A process beside the first one ends when it had nothing to do for so long."""
_US_EACH_BYTE = 0.004
"""What a body is expected to take, in millionths of a second: text takes that, and the rest is charged later.
"""
_LARGE_BODY_RULES = FairRules(
    limit=LIMITS.large_bodies_waiting, limit_bytes=sys.maxsize, quantum_tokens=1000, age_tokens=1_000_000
)
"""Its tokens are millionths of a second of CPU."""
_DEBTORS_MAX = 1024
_LARGE_BODY_COMMAND = (sys.executable, "-c", "from cellgate.proxy.request.large_bodies import main; main()")
_TOO_MANY = Failure(
    FailureKind.NO_RESOURCES, "too many large request bodies of this client wait to be read; retry later"
)


class LargeBodies:
    """Reads bodies in a few processes, the first started when the first large body comes."""

    def __init__(self) -> None:
        self._queue: FairQueue[asyncio.Future[Parser | Failure]] = FairQueue(_LARGE_BODY_RULES)
        self._idle: list[Parser] = []
        self._busy: dict[str, Parser] = {}
        """By who pays for the body in it."""
        self._debts: dict[str, tuple[float, float]] = {}
        """Millionths of a second that somebody has used and not paid, and when that was."""

    async def read(
        self,
        body: bytes,
        payer: str = "",
        why_not: Callable[[], Failure | None] = lambda: None,
        route: str = "",
    ) -> Ask | Conversation | Failure:
        """What a body asks for, or why it is refused; when it is its turn, `why_not` is asked first. Raises
        RuntimeError when reading it shows a defect.
        """
        expected_us = _expected_us(len(body))
        parser = await self._turn(len(body), payer)
        if isinstance(parser, Failure):
            return parser
        if (failure := why_not()) is not None:
            self._free(payer, 0.0)
            return failure
        reading = asyncio.ensure_future(parser.read(body, route))
        reading.add_done_callback(lambda _: self._free(payer, parser.cpu_s * 1e6 - expected_us))
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            await asyncio.wait((reading,))
            raise

    async def close(self) -> None:
        for parser in (*self._idle, *self._busy.values()):
            await parser.close()

    # -- whose turn it is ----------------------------------------------------------------------------------

    async def _turn(self, size: int, payer: str) -> Parser | Failure:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[Parser | Failure] = loop.create_future()
        cost = _expected_us(size) + self._debt(payer, loop.time())
        entered = self._queue.add(
            turn, loop.time(), tokens_s=1e6, tenant=payer, tokens=round(cost), size=size, group=payer
        )
        if not isinstance(entered, Entered):
            reached("large_bodies_waiting")
            return _TOO_MANY
        if entered.displaced is not None:
            reached("large_bodies_waiting")
            entered.displaced.item.set_result(_TOO_MANY)
        self._read_on()
        try:
            return await turn
        except asyncio.CancelledError:
            was_queued = self._queue.remove(entered.entry)
            if not was_queued and not turn.cancelled() and isinstance(turn.result(), Parser):
                # Its turn came at this very moment.
                self._free(payer, 0.0)
            raise

    def _read_on(self) -> None:
        """Give idle processes to those whose turn it is."""
        while len(self._busy) < LIMITS.large_body_processes:
            entry = self._queue.first(self._busy)
            if entry is None:
                return
            self._queue.take(entry)
            if entry.item.done():
                continue
            parser = self._busy[entry.tenant] = self._idle.pop() if self._idle else Parser()
            entry.item.set_result(parser)

    def _free(self, payer: str, more_us: float) -> None:
        """The body of somebody was parsed, and took so much more than was charged for it."""
        loop, parser = asyncio.get_running_loop(), self._busy.pop(payer)
        if more_us > 0.0:
            if len(self._debts) >= _DEBTORS_MAX:
                self._debts.pop(next(iter(self._debts)))
            self._debts[payer] = self._debt(payer, loop.time()) + more_us, loop.time()
        self._idle.append(parser)
        self._read_on()
        if len(self._idle) + len(self._busy) > 1 and parser in self._idle:
            loop.call_later(IDLE_S, self._end_idle, parser, parser.bodies)

    def _end_idle(self, parser: Parser, bodies: int) -> None:
        if parser in self._idle and parser.bodies == bodies and len(self._idle) + len(self._busy) > 1:
            self._idle.remove(parser)
            parser.end()

    def _debt(self, payer: str, now: float) -> float:
        """What somebody has not paid, and pays with its next body. It is forgiven as time passes."""
        debt, since = self._debts.pop(payer, (0.0, now))
        return max(0.0, debt - (now - since) * 1e6)


class Parser:
    """One process, started with its first body. `bodies`: how many it had; `cpu_s`: of the last of them."""

    def __init__(self) -> None:
        self.process: Process | None = None
        self.cpu_s = 0.0
        self.bodies = 0

    async def read(self, body: bytes, route: str = "") -> Ask | Conversation | Failure:
        """What a body asks for, or why it is refused. Raises RuntimeError when reading it shows a defect."""
        self.bodies += 1
        self.cpu_s = 0.0
        try:
            process = self.process or await asyncio.create_subprocess_exec(
                *_LARGE_BODY_COMMAND, stdin=PIPE, stdout=PIPE, start_new_session=True
            )
        except OSError as error:
            return _without_process(f"cannot be started: {error.strerror}")
        self.process = process
        try:
            async with asyncio.timeout(STUCK_S):
                result = await _ask(process, body, route)
        except (OSError, EOFError, TimeoutError) as error:
            self.cpu_s = LIMITS.large_body_cpu_s
            await self.close()
            if process.returncode == -signal.SIGPROF:
                reached("large_body_cpu_s")
                return Failure(FailureKind.BODY_TOO_LARGE, "parsing the request's body takes too long")
            is_stuck = isinstance(error, TimeoutError)
            return _without_process(
                f"did not answer in {STUCK_S:.0f} s" if is_stuck else f"ended with {process.returncode}"
            )
        self.cpu_s = result.cpu_s
        if result.ends:
            await self.close()
        for name in result.reached:
            reached(name)
        if result.found is None:
            raise RuntimeError(result.trouble)
        return result.found

    def end(self) -> None:
        """End the process, and do not wait for that."""
        process, self.process = self.process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()

    async def close(self) -> None:
        process = self.process
        self.end()
        if process is not None:
            await process.wait()


def _expected_us(size: int) -> float:
    return size * _US_EACH_BYTE


async def _ask(process: Process, body: bytes, route: str) -> ReadResult:
    """Raises OSError and EOFError (of asyncio) when the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(len(body).to_bytes(LENGTH_BYTES, "big") + route.encode().ljust(ROUTE_BYTES))
    process.stdin.write(body)
    await process.stdin.drain()
    length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
    result: ReadResult = pickle.loads(await process.stdout.readexactly(length))
    return result


def _without_process(how: str) -> Failure:
    log_line(
        "warning",
        f"the process that parses large bodies {how}; the body is refused, the next gets a new process",
    )
    return Failure(FailureKind.NO_RESOURCES, "the gate could not read the request's body; retry later")


# The process that parses large bodies for a gate: bodies in on stdin, what they ask for out on stdout.
#
# 1. Each body has a limit of CPU time and of memory. Out of memory is answered; out of time, the kernel ends
#    the process, because the parser cannot be interrupted otherwise.
# 2. After a body that leaves much memory allocated the process ends, and announces that in its answer.
# 3. It ends when the gate ends, because its stdin is closed then.


LENGTH_BYTES = 8
"""Each message is its length, big-endian, followed by that many bytes; before a body comes its route."""
ROUTE_BYTES = 16
_BYTES_EACH = 16
"""Memory for each byte of a body, beside the constant: a character of a text may take four, twice."""
_LARGE_BODY_KEPT_BYTES = 128 << 20
_LARGE_BODY_NICE = 5


class ReadResult(NamedTuple):
    """The answer: what the body asks for, or its failure; or `trouble`, a defect of this process.

    `reached` are the limits that took effect, `ends` says that the process has now ended, `cpu_s` is
    what it took.
    """

    found: Ask | Conversation | Failure | None
    trouble: str
    reached: tuple[str, ...]
    ends: bool
    cpu_s: float


def main() -> None:
    """Read bodies until there are no more."""
    for each in (signal.SIGINT, signal.SIGTERM):
        # These signals may be sent to all processes of a service, but are meant for the gate.
        signal.signal(each, signal.SIG_IGN)
    os.nice(_LARGE_BODY_NICE)
    return_large_blocks()
    bodies, answers = sys.stdin.buffer, sys.stdout.buffer
    while head := bodies.read(LENGTH_BYTES):
        length, route = int.from_bytes(head, "big"), bodies.read(ROUTE_BYTES).rstrip().decode()
        _bound(length)
        result = read(bodies, length, route)
        packed = pickle.dumps(result)
        answers.write(len(packed).to_bytes(LENGTH_BYTES, "big") + packed)
        answers.flush()
        if result.ends:
            return


def read(bodies: BinaryIO, length: int, route: str = "") -> ReadResult:
    """Read the next body, of `length` bytes."""
    before, trouble, ends, begun_s = dict(REACHED), "", False, time.process_time()
    found: Ask | Conversation | Failure | None = None
    try:
        found = _read(bodies.read(length), route)
    except MemoryError:
        reached("large_body_memory")
        found = Failure(FailureKind.BODY_TOO_LARGE, "parsing the request's body takes too much memory")
        ends = True
    except Exception as error:
        trouble = repr(error)
    counted = tuple(name for name, count in REACHED.items() for _ in range(count - before[name]))
    cpu_s = time.process_time() - begun_s
    return ReadResult(found, trouble, counted, ends or _resident_bytes() > _LARGE_BODY_KEPT_BYTES, cpu_s)


def _read(body: bytes, route: str) -> Ask | Conversation | Failure:
    """One with few values may be read in parts, so that the gate can recognise them."""
    known = None if has_more_nodes(body, LIMITS.json_nodes) else read_conversation(body, route)
    return known or read_large_ask(body, route)


def _bound(length: int) -> None:
    """Set the limits of CPU time and memory for the next body."""
    size, (_, hard) = LIMITS.large_body_memory + _BYTES_EACH * length, resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size if hard < 0 else min(size, hard), hard))
    # It counts CPU time only, so waiting for the next body does not count.
    signal.setitimer(signal.ITIMER_PROF, LIMITS.large_body_cpu_s)


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


# Large bodies that are being parsed off the loop, each for a request that waits for it.


WhyNot = Callable[[], Failure | None]
"""Why a body is not worth reading any more."""
ReadBody = Callable[[bytes, str, WhyNot, str], Awaitable[Ask | Conversation | Failure]]
"""Reads a body, in the share of somebody, of a route."""


class LargeReads:
    """`read` reads one body; `memory` is what bodies reserve; `beginnings` learns from parts of them."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, read: ReadBody, memory: BodyMemory, beginnings: Beginnings
    ) -> None:
        self._loop = loop
        self._read = read
        self._memory = memory
        self._beginnings = beginnings
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """How many are being read."""
        return len(self._tasks)

    def start(
        self, request: Request, payer: str, why_not: WhyNot, route: str, tell: Callable[[Ask | Failure], None]
    ) -> Callable[[], None]:
        """Read the body of a request, then `tell`, in any case. What is returned stops that.

        The memory that the body has reserved is released after the parsing has ended.
        """
        held = 0

        async def run() -> None:
            try:
                found = await self._read(request.body, payer, why_not, route)
                if isinstance(found, Conversation):
                    self._beginnings.learn(request.body, found, payer)
                    found = found.ask
            except asyncio.CancelledError:
                # A task that ends with it keeps the traceback, and so the body, until garbage is collected.
                return
            except Exception as error:
                what = f"a body of {len(request.body)} bytes could not be read"
                report_defect(self._loop, what, error)
                found = Failure(FailureKind.INTERNAL, "the gate failed on the request's body")
            tell(found)

        def over(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if held:
                self._memory.give(held)

        def stop() -> None:
            nonlocal held
            if not task.done():
                held, request.reserved = request.reserved, 0
                task.cancel()

        task = self._loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(over)
        return stop
