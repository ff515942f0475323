"""HTTP of the admin port: what ends a response, what a connection may ask, what is too much."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from email.utils import parsedate

import uvloop
from aiohttp import web

from cellgate.proxy.admin.http import AdminServer, Stream, reply

GET = b"GET %b HTTP/1.%d\r\nHost: gate\r\n\r\n"


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


def talk(*sent: bytes, tick_at_s: float | None = None) -> bytes:
    """All that comes back on one connection, until the server ends it."""

    async def main() -> bytes:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        server = AdminServer(_answer)
        listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        for data in sent:
            writer.write(data)
            await asyncio.sleep(0.01)
        if tick_at_s is not None:
            server.tick(server.now() + tick_at_s)
        answer = await asyncio.wait_for(reader.read(), 5.0)
        writer.close()
        listening.close()
        await server.close()
        assert not server.clients
        return answer

    return uvloop.run(main())


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


def test_requests_of_one_connection_are_answered_in_order() -> None:
    answer = talk(GET % (b"/a%20b?x=1", 1) + GET % (b"/stream", 1), GET % (b"/last", 0))
    assert plain(answer) == (
        b"HTTP/1.1 200 OK\r\ncontent-length: 19\r\ncontent-type: text/plain\r\n\r\nGET /a b {'x': '1'}"
        b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"
        b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
        b"HTTP/1.0 200 OK\r\nconnection: close\r\ncontent-length: 12\r\ncontent-type: text/plain\r\n\r\n"
        b"GET /last {}"
    )


def test_a_handler_that_fails_leaves_nobody_without_an_answer() -> None:
    answer = talk(GET % (b"/defect", 1))
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b'"code":"internal"' in answer


def test_a_stream_to_an_old_client_ends_with_its_connection() -> None:
    assert plain(talk(GET % (b"/stream", 0))) == (
        b"HTTP/1.0 200 OK\r\nconnection: close\r\ncontent-type: text/plain\r\n\r\nonetwo"
    )


def test_a_head_has_the_length_of_what_it_does_not_carry() -> None:
    assert plain(talk(b"HEAD /a HTTP/1.1\r\nHost: gate\r\nConnection: close\r\n\r\n")) == (
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 10\r\ncontent-type: text/plain\r\n\r\n"
    )


def test_what_is_too_large_or_no_request_is_refused_and_the_connection_ends() -> None:
    large = b"POST /a HTTP/1.1\r\nHost: gate\r\nContent-Length: 1048577\r\n\r\n"
    for sent, status in ((large, b"413"), (b"nonsense\r\n\r\n", b"400"), (b"GET / HTTP/1.1\r\n\r\n", b"400")):
        assert re.match(rb"HTTP/1\.[01] " + status, talk(sent))


def test_who_is_silent_for_too_long_is_sent_away() -> None:
    assert talk(tick_at_s=76.0) == b""
    assert talk(b"GET / HT", tick_at_s=11.0).startswith(b"HTTP/1.1 408")


def test_what_a_handler_streams_is_closed_when_its_client_leaves() -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"more"
                await asyncio.sleep(0.001)
        finally:
            closed.set()

    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return Stream(endless(), "text/plain")

    async def main() -> None:
        server = AdminServer(answer)
        listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        writer.write(GET % (b"/", 1))
        await reader.readuntil(b"more")
        writer.close()
        await asyncio.wait_for(closed.wait(), 5.0)
        listening.close()
        await server.close()

    uvloop.run(main())
