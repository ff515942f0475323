"""What one caller of the admin port can hold: bodies, pages that it does not read, connections."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from email.utils import parsedate
from typing import Any

import pytest
from aiohttp import web

from cellgate.proxy.admin import http
from cellgate.proxy.admin.http import BODY_BYTES, AdminServer, Bodies, Handler, Stream, reply
from tests.wire.stage import until

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
        port.server.tick(port.server.now() + http.ADMIN_IDLE_S + 1.0)
        port.server.tick(port.server.now() + http.ADMIN_IDLE_S + http.CLOSE_S + 2.0)
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


# HTTP of the admin port: what ends a response, what a connection may ask, what is too much.

PATH = b"GET %b HTTP/1.%d\r\nHost: gate\r\n\r\n"


async def _answer(request: web.BaseRequest) -> web.StreamResponse:
    if request.path == "/defect":
        raise ZeroDivisionError("boom")
    if request.path == "/stream":
        return Stream(_parts(), "text/plain")
    body = f"{request.method} {request.path} {dict(request.query)}".encode()
    return reply(body, content_type="text/plain")


async def _parts() -> AsyncGenerator[bytes, None]:
    for part in (b"one", b"two"):
        await asyncio.sleep(0)
        yield part


async def talk(*sent: bytes, tick_at_s: float | None = None) -> bytes:
    """All that comes back on one connection, until the server ends it."""
    async with served(_answer) as port:
        reader, writer = await port.dial()
        for data in sent:
            writer.write(data)
            await asyncio.sleep(0.01)
        if tick_at_s is not None:
            port.server.tick(port.server.now() + tick_at_s)
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
        return answer


def plain(answer: bytes) -> bytes:
    """The same bytes, but for what may differ: the order of the lines of a head, the case of their names, and
    the two lines that are in every head.
    """
    parts = []
    for part in re.split(rb"(?=HTTP/1\.[01] \d)", answer)[1:]:
        head, _, body = part.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        fields = dict(line.split(b": ", 1) for line in lines)
        assert fields.pop(b"Server") == b"cellgate"
        assert parsedate(fields.pop(b"Date").decode())
        named = sorted(b"%b: %b\r\n" % (name.lower(), value) for name, value in fields.items())
        parts.append(first + b"\r\n" + b"".join(named) + b"\r\n" + body)
    return b"".join(parts)


async def test_requests_of_one_connection_are_answered_in_order() -> None:
    answer = await talk(PATH % (b"/a%20b?x=1", 1) + PATH % (b"/stream", 1), PATH % (b"/last", 0))
    assert plain(answer) == (
        b"HTTP/1.1 200 OK\r\ncontent-length: 19\r\ncontent-type: text/plain\r\n\r\nGET /a b {'x': '1'}"
        b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"
        b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
        b"HTTP/1.0 200 OK\r\nconnection: close\r\ncontent-length: 12\r\ncontent-type: text/plain\r\n\r\n"
        b"GET /last {}"
    )
    # A stream to an old client ends with its connection; a head has the length of what it does not carry.
    assert plain(await talk(PATH % (b"/stream", 0))) == (
        b"HTTP/1.0 200 OK\r\nconnection: close\r\ncontent-type: text/plain\r\n\r\nonetwo"
    )
    assert plain(await talk(b"HEAD /a HTTP/1.1\r\nHost: gate\r\nConnection: close\r\n\r\n")) == (
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 10\r\ncontent-type: text/plain\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("sent", "tick_at_s", "status", "code"),
    [
        (PATH % (b"/defect", 1), None, b"500", b"internal"),
        (POST % b"Content-Length: 1048577\r\n", None, b"413", b"body_too_large"),
        (GET[:-2] + b"x: " + b"a" * 10_000 + b"\r\n\r\n", None, b"431", b"head_too_large"),
        (b"nonsense\r\n\r\n", None, b"400", b"bad_request"),
        (b"GET / HTTP/1.1\r\n\r\n", None, b"400", b"bad_request"),
        (b"GET / HT", 11.0, b"408", b"head_timeout"),
    ],
)
async def test_what_fails_is_answered_and_ends_the_connection(
    sent: bytes, tick_at_s: float | None, status: bytes, code: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "LINGER_S", 0.05)
    answer = await talk(sent, tick_at_s=tick_at_s)
    assert re.match(rb"HTTP/1\.[01] " + status, answer)
    assert b'"code":"%b"' % code in answer


async def test_who_is_silent_for_too_long_is_sent_away() -> None:
    assert await talk(tick_at_s=76.0) == b""
