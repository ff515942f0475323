"""Large bodies that are being parsed off the loop, each for a request that waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from cellgate.proxy.logs.defects import report_defect
from cellgate.proxy.wire.body_memory import BodyMemory
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.proxy.wire.request import Request
from cellgate.router.nouns import Ask

WhyNot = Callable[[], Failure | None]
"""Why a body is not worth reading any more."""
ReadBody = Callable[[bytes, str, WhyNot], Awaitable[Ask | Failure]]
"""Reads a body, in the share of somebody."""


class LargeReads:
    """`read` reads one body; `memory` is what bodies have reserved."""

    def __init__(self, loop: asyncio.AbstractEventLoop, read: ReadBody, memory: BodyMemory) -> None:
        self._loop = loop
        self._read = read
        self._memory = memory
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """How many are being read."""
        return len(self._tasks)

    def start(
        self, request: Request, payer: str, why_not: WhyNot, tell: Callable[[Ask | Failure], None]
    ) -> Callable[[], None]:
        """Read the body of a request, then `tell`, in any case. What is returned stops that.

        The memory that the body has reserved is released after the parsing has ended.
        """
        held = 0

        async def run() -> None:
            try:
                found = await self._read(request.body, payer, why_not)
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
