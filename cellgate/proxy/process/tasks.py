"""`end_tasks`: tasks that run until the gate ends, ended for certain."""

from __future__ import annotations

import asyncio

AGAIN_S = 1.0
"""A task that goes on for this long after it was cancelled is cancelled once more."""


async def end_tasks(*tasks: asyncio.Task[None]) -> None:
    """Cancel these and wait until they have ended, with whatever exception.

    Once is not enough: `asyncio.wait_for` of Python 3.11, by which redis-py sends, forgets a cancellation
    that comes in the same turn as its result. Such a task would go on, and who waits for it would hang.
    """
    going = {task for task in tasks if not task.done()}
    while going:
        for task in going:
            task.cancel()
        _, going = await asyncio.wait(going, timeout=AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)
