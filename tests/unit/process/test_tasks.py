"""Tasks that are ended: also one that forgets that it was cancelled."""

from __future__ import annotations

import asyncio

import pytest

from cellgate.proxy.process import tasks
from cellgate.proxy.process.tasks import end_tasks


async def test_who_forgets_a_cancellation_is_cancelled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "AGAIN_S", 0.01)
    forgotten = asyncio.Event()

    async def forgets_once() -> None:
        while True:
            try:
                await asyncio.sleep(60.0)
            except asyncio.CancelledError:
                if forgotten.is_set():
                    raise
                forgotten.set()

    task = asyncio.create_task(forgets_once())
    await asyncio.sleep(0)
    await end_tasks(task)
    assert forgotten.is_set()
    assert task.cancelled()


async def test_tasks_that_fail_or_have_ended_disturb_nobody() -> None:
    async def fails() -> None:
        raise ValueError

    async def ends() -> None:
        return

    await end_tasks(asyncio.create_task(fails()), asyncio.create_task(ends()))
    await end_tasks()
