"""Requests to an ingress or to its statistics, and a steady stream of them."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Callable
from contextlib import suppress

PATIENCE_S = 30.0


async def get(port: int, path: str) -> tuple[int, str]:
    """Status and body of a GET on a connection of its own; status 0: nobody answers."""
    return await asyncio.to_thread(_get, port, path)


async def post(port: int, body: bytes = b"") -> int:
    """The status of one request for tokens; 0: it failed."""
    with suppress(OSError, asyncio.IncompleteReadError, IndexError, ValueError):
        return await _post(port, body)
    return 0


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


def _get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()


async def _post(port: int, body: bytes) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-length: {len(body)}\r\n"
        writer.write(head.encode() + b"connection: close\r\n\r\n" + body)
        return int((await reader.read()).split(maxsplit=2)[1])
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
