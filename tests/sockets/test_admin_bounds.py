"""What one caller of the admin port can hold: bodies, pages that it does not read, connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from cellgate.proxy.admin import http
from cellgate.proxy.admin.http import BODY_BYTES, AdminServer, Bodies, Handler, Stream, reply

GET = b"GET / HTTP/1.1\r\nHost: gate\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: gate\r\n%b\r\n"
PATIENCE_S = 5.0


class Port:
    """A server, where it listens, and the defects that it has told of."""

    def __init__(self, server: AdminServer, address: tuple[str, int], defects: list[Any]) -> None:
        self.server = server
        self.address = address
        self.defects = defects

    async def dial(self, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A caller that has said this."""
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(sent)
        return reader, writer

    def dial_deaf(self, sent: bytes) -> socket.socket:
        """One that never reads."""
        caller = socket.create_connection(self.address)
        caller.sendall(sent)
        return caller


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[Port]:
    """A server of one's own."""
    loop = asyncio.get_running_loop()
    defects: list[Any] = []
    loop.set_exception_handler(lambda _, context: defects.append(context))
    server = AdminServer(handler)
    listening = await loop.create_server(server, "127.0.0.1", 0)
    try:
        yield Port(server, listening.sockets[0].getsockname(), defects)
    finally:
        listening.close()
        await server.close()
    assert not server.clients


def page(size: int) -> Handler:
    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return reply(b"x" * size)

    return answer


def echo() -> Handler:
    read = Bodies().read

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return reply(await read(request))

    return answer


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.001)


async def test_who_waits_to_be_asked_for_the_body_is_asked() -> None:
    async with served(echo()) as port:
        reader, writer = await port.dial(POST % b"Expect: 100-continue\r\nContent-Length: 2\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hi")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert await reader.readexactly(2) == b"hi"
        writer.close()


async def test_a_body_that_says_no_length_is_refused_when_it_becomes_too_large() -> None:
    async with served(echo()) as port:
        reader, writer = await port.dial(POST % b"Transfer-Encoding: chunked\r\n")
        chunk = b"10000\r\n" + b"a" * 0x10000 + b"\r\n"
        writer.write(chunk * (BODY_BYTES // 0x10000 + 1) + b"0\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413 ")
        writer.close()


async def test_a_body_that_does_not_come_is_given_up_and_so_is_the_wait_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "BODY_S", 0.05)
    monkeypatch.setattr(http, "BODIES_AT_ONCE", 1)
    half = POST % b"Content-Length: 2\r\n" + b"h"

    async with served(echo()) as port:
        callers = [await port.dial(half) for _ in range(3)]
        for reader, writer in callers:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 408 ")
            writer.close()


async def test_a_line_that_is_too_long_is_refused() -> None:
    async with served(page(1)) as port:
        reader, writer = await port.dial(GET[:-2] + b"x: " + b"a" * 10_000 + b"\r\n\r\n")
        answer = await reader.read()
        assert answer.split()[1] == b"431"
        assert b'"code":"head_too_large"' in answer
        writer.close()


async def test_a_page_that_nobody_reads_is_cut_off_and_is_no_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SEND_TIMEOUT_S", 0.05)

    async with served(page(16 * 1024 * 1024)) as port:
        caller = port.dial_deaf(GET)
        await until(lambda: len(port.server.clients) == 1)
        await until(lambda: not port.server.clients)
        assert port.defects == []
        caller.close()


async def test_a_large_page_is_whole_for_who_reads_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SEND_TIMEOUT_S", 0.2)
    size = 16 * 1024 * 1024

    async with served(page(size)) as port:
        reader, writer = await asyncio.open_connection(*port.address, limit=64 * 1024)
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        left = size
        while left:
            left -= len(await reader.read(256 * 1024))
            await asyncio.sleep(0.005)
        writer.close()


async def test_no_page_is_made_for_who_has_yet_to_read_the_last() -> None:
    made = 0

    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        nonlocal made
        made += 1
        return reply(b"x" * 20_000)

    async with served(answer) as port:
        caller = port.dial_deaf(GET * 200)
        await until(lambda: made > 0)
        await asyncio.sleep(0.2)
        assert made < 50
        caller.close()


async def test_what_is_closed_and_never_read_is_gone_some_time_later() -> None:
    async with served(page(120_000)) as port:
        # Little enough to be no longer waited for, and more than the kernel takes.
        caller = socket.socket()
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        caller.connect(port.address)
        caller.sendall(GET[:-2] + b"Connection: close\r\n\r\n")
        await until(lambda: any(each.is_idle() for each in port.server.clients))
        await asyncio.sleep(0.05)
        port.server.tick(port.server.now() + http.IDLE_S + 1.0)
        port.server.tick(port.server.now() + http.IDLE_S + http.CLOSE_S + 2.0)
        await until(lambda: not port.server.clients)
        caller.close()


async def test_of_too_many_connections_the_one_that_is_silent_for_longest_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "CONNECTIONS_MAX", 3)

    async def endless() -> AsyncGenerator[bytes, None]:
        while True:
            yield b"more"
            await asyncio.sleep(0.001)

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return Stream(endless(), "text/plain") if request.path == "/stream" else reply(b"page")

    async with served(answer) as port:
        follower, following = await port.dial(GET.replace(b"/ ", b"/stream "))
        await follower.readuntil(b"more")
        silent, silence = await port.dial()
        await until(lambda: len(port.server.clients) == 2)
        reader, writer = await port.dial(GET)
        await reader.readuntil(b"page")
        _, late = await port.dial()
        with pytest.raises(ConnectionResetError):
            await silent.read()
        await follower.readuntil(b"more")
        writer.write(GET)
        await reader.readuntil(b"page")
        for each in (following, silence, writer, late):
            each.close()
