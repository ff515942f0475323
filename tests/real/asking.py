"""Requests to an ingress or to its statistics, and a steady stream of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

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
        await connection.exchange(messages.post(body, lines="connection: close\r\n"), reply)
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


async def until(is_so: Callable[[], object]) -> None:
    """Wait for what must come to be; `is_so` may be a coroutine function."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = is_so()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.05)
