"""The load tools' scripted engine on real sockets, and how a process of it says where it listens."""

from __future__ import annotations

import asyncio

import pytest

from loadtests.kit import processes
from loadtests.wire.blocking import answers
from loadtests.wire.client import Connection
from loadtests.wire.messages import get, post, whole
from loadtests.wire.raw import dial, reset
from loadtests.wire.reply import Reply
from loadtests.wire.scripted import Request, listen, port_of
from tests.wire.stage import live

ENGINE = "loadtests.bench.engine"


async def echo(request: Request) -> None:
    """Method, target and body, after a while."""
    await asyncio.sleep(0.01)
    await request.send(whole(b"%b %b %b" % (request.method, request.target, request.body)))


@live
async def test_requests_on_one_connection_are_answered_in_turn() -> None:
    async with await listen(echo) as server:
        connection, replies = await Connection.open(port_of(server)), [Reply(), Reply()]
        await connection.send(post(b"{}", path="/a"))
        await connection.send(get("/b?c"))
        for reply in replies:
            await connection.read(reply)
        connection.close()
    assert [reply.body for reply in replies] == [b"POST /a {}", b"GET /b?c "]


@live
async def test_a_request_may_come_in_any_pieces() -> None:
    async with await listen(echo) as server:
        connection, reply = await Connection.open(port_of(server)), Reply()
        for byte in post(b"{}", path="/a"):
            await connection.send(bytes([byte]))
            await asyncio.sleep(0)
        await connection.read(reply)
        connection.close()
    assert reply.body == b"POST /a {}"


@live
async def test_a_script_hears_that_its_client_has_gone() -> None:
    gone: list[str] = []

    def answer(request: Request) -> None:
        request.on_gone = lambda: gone.append("heard")

    async with await listen(answer) as server:
        reset(dial(port_of(server), get("/")))
        while not gone:  # noqa: ASYNC110 - nobody tells the test.
            await asyncio.sleep(0.001)


@live
async def test_a_script_that_writes_on_to_nobody_ends() -> None:
    over = asyncio.Event()

    async def flood(request: Request) -> None:
        try:
            while True:
                await request.send(bytes(65536))
        finally:
            over.set()

    async with await listen(flood) as server:
        raw = dial(port_of(server), get("/"))
        await asyncio.sleep(0.05)
        assert not over.is_set()
        raw.close()
        await over.wait()


@live
async def test_noise_ends_the_connection() -> None:
    async with await listen(echo) as server:
        with pytest.raises(ConnectionError):
            await (await Connection.open(port_of(server))).exchange(b"\xff\xff", Reply())


def test_a_process_says_where_it_listens_and_ends_with_whoever_started_it() -> None:
    with processes.announcing(ENGINE, "--units", 2) as (pid, ports):
        assert processes.is_running(pid)
        urls = [f"http://127.0.0.1:{port}/health" for port in ports]
        assert [answers(url, silence_s=5.0) for url in urls] == [True, True]
    assert not processes.is_running(pid)


def test_a_process_that_says_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="ended early, code 2"), processes.announcing(ENGINE, "--what"):
        pass
