"""When the gate last sent a request to a unit, read from the gate's own counters."""

import asyncio
import time
from contextlib import suppress
from typing import Self

from loadtests.kit.gate import GateProcess, metric_sum

_LOOK_S = 0.05


class Sent:
    """An async context manager: inside, `last_at` (of `time.monotonic`) is when the number of attempts on the
    unit, ended and open, was last seen to grow. Canaries are no attempts.
    """

    def __init__(self, gate: GateProcess, unit: str) -> None:
        self._gate = gate
        self._label = f'unit="{unit}"'
        self.last_at = 0.0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        most = 0.0
        while True:
            count = await self._count()
            if count > most:
                most, self.last_at = count, time.monotonic()
            await asyncio.sleep(_LOOK_S)

    async def _count(self) -> float:
        page = await asyncio.to_thread(self._gate.metrics)
        names = ("cellgate_attempts_total", "cellgate_in_flight")
        return sum(metric_sum(page, name, self._label) for name in names)
