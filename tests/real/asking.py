"""Requests to an ingress or to its statistics, and a steady stream of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count

from loadtests.wire import messages
from loadtests.wire.blocking import fetch
from loadtests.wire.client import Connection
from loadtests.wire.reply import Reply

PATIENCE_S = 30.0


async def get(port: int, path: str) -> tuple[int, str]:
    """Status and body of a GET on a connection of its own; status 0: nobody answers."""
    try:
        reply = await asyncio.to_thread(fetch, f"http://127.0.0.1:{port}{path}", silence_s=PATIENCE_S)
    except OSError:
        return 0, ""
    return reply.status, reply.body.decode()


async def post(port: int, body: bytes = b"") -> int:
    """The status of one request for tokens; 0: it failed."""
    reply = Reply()
    with suppress(OSError):
        connection = await Connection.open(port)
        try:
            await connection.exchange(messages.post(body, lines="connection: close\r\n"), reply)
        finally:
            connection.close()
    return reply.status if reply.is_whole else 0


async def steadily(port: int, *, rps: float, seconds: float, body: bytes = b"") -> list[int]:
    """The statuses of so many POSTs a second, each sent on time, answered or not those before it."""
    loop, tasks = asyncio.get_running_loop(), []
    began_at = loop.time()
    for number in range(int(rps * seconds)):
        await asyncio.sleep(max(0.0, began_at + number / rps - loop.time()))
        tasks.append(asyncio.create_task(post(port, body)))
    return await asyncio.gather(*tasks)


@asynccontextmanager
async def asked_on(port: int, *, rps: float, body: bytes = b"") -> AsyncIterator[Counter[int]]:
    """So many POSTs a second for as long as the context lasts; the statuses are there once it is left."""
    loop, tasks, statuses = asyncio.get_running_loop(), list[asyncio.Task[int]](), Counter[int]()

    async def ask() -> None:
        began_at = loop.time()
        for number in count():
            await asyncio.sleep(max(0.0, began_at + number / rps - loop.time()))
            tasks.append(asyncio.create_task(post(port, body)))

    asking = asyncio.create_task(ask())
    try:
        yield statuses
    finally:
        asking.cancel()
        statuses.update(await asyncio.gather(*tasks))


async def until(is_so: Callable[[], object]) -> None:
    """Wait for what must come to be; `is_so` may be a coroutine function."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = is_so()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.05)
