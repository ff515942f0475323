"""What takes too long or too much, over real sockets: 408, 503, and reading that pauses."""

from __future__ import annotations

import asyncio

import pytest

from cellgate.proxy.config.settings import Limits
from tests.wire.client import Client, chat, get, post
from tests.wire.stage import Stage, stage
from tests.wire.unit import LAST_CHUNK, STREAM, TOKENS, Received, chunk, whole

SHORT_S = 0.05
LONG_S = 3600.0
SLOW_HEAD = Limits(head_timeout_s=SHORT_S, body_timeout_s=LONG_S, idle_timeout_s=LONG_S)
SLOW_BODY = Limits(head_timeout_s=0.0, body_timeout_s=SHORT_S, idle_timeout_s=LONG_S)
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: gate\r\nTransfer-Encoding: chunked\r\n\r\n"
DECLARED = post(b"x" * 800)[:-800]


@pytest.fixture(autouse=True)
def _quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellgate.proxy.process.signals.TICK_S", 0.01)


async def refused(client: Client, status: int) -> dict[str, object]:
    """The error that ends the connection."""
    reply = await client.reply()
    assert (reply.status, reply.whole, reply.get("connection")) == (status, True, "close"), reply
    assert await client.rest() == b""
    return reply.error


@pytest.mark.parametrize("begun", [b"P", b"POST /v1/chat/completions HTTP/1.1\r\nHo", DECLARED[:-2]])
async def test_a_head_that_does_not_come_to_its_end_gets_408(begun: bytes) -> None:
    async with stage(STREAM, limits=SLOW_HEAD) as here, here.client() as client:
        client.send(begun)
        assert (await refused(client, 408))["code"] == "head_timeout"
        assert here.received == 0


@pytest.mark.parametrize(
    "begun", [DECLARED, DECLARED + b"x" * 799, CHUNKED, CHUNKED + chunk(b"x") + b"0\r\n"]
)
async def test_a_body_that_does_not_come_to_its_end_gets_408(begun: bytes) -> None:
    async with stage(STREAM, limits=SLOW_BODY) as here, here.client() as client:
        client.send(begun)
        assert (await refused(client, 408))["code"] == "body_timeout"
        assert here.received == 0


async def test_an_idle_connection_is_closed_without_a_word() -> None:
    async with stage(STREAM, limits=Limits(idle_timeout_s=SHORT_S)) as here:
        async with here.client() as client:
            assert await client.rest() == b""
        async with here.client() as client:
            assert (await client.ask(chat())).status == 200
            assert await client.rest() == b""


async def test_a_request_in_flight_has_no_timeout_of_its_clients() -> None:
    async def slow(request: Received) -> None:
        await asyncio.sleep(4 * SHORT_S)
        request.write(whole())

    limits = Limits(head_timeout_s=SHORT_S, body_timeout_s=SHORT_S, idle_timeout_s=SHORT_S)
    async with stage(slow, limits=limits) as here, here.client() as client:
        assert (await client.ask(chat(stream=False))).status == 200


async def test_a_second_request_that_stays_incomplete_gets_408_after_the_answer_to_the_first() -> None:
    limits = Limits(head_timeout_s=SHORT_S, body_timeout_s=SHORT_S, idle_timeout_s=LONG_S)
    async with stage(STREAM, limits=limits) as here, here.client() as client:
        client.send(chat() + DECLARED[:40])
        assert (await client.reply()).body == b"".join(TOKENS)
        assert (await refused(client, 408))["code"] == "head_timeout"


async def test_a_refused_client_that_does_not_leave_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellgate.proxy.http.server.CLOSE_S", SHORT_S)
    async with stage(STREAM) as here, here.client() as client:
        client.send(b"GET /\r\n\r\n")
        assert (await client.reply()).status == 400
        await here.until(lambda: not here.gateway.clients)


async def test_nothing_is_begun_and_no_failure_told_behind_an_answer_that_closes() -> None:
    async with stage(STREAM) as here:
        for closes, behind in (("Connection: close\r\n", b"x"), ("", chat())):
            async with here.client() as client:
                reply = await client.ask(get("/v1/models", closes) + behind)
                assert (reply.status, reply.get("connection")) == (200, "close")
                assert await client.rest() == b""
            here.gateway.announce_stop()
        assert [record.route for record in here.records.kept] == ["models"] * 2


# Memory for bodies

FEW = Limits(bodies_bytes=1000, body_bytes=1000, body_timeout_s=LONG_S)


BODY = b'{"pad": "%b"}' % (b"x" * 789)
SIZE = len(BODY)


async def take_memory(here: Stage, client: Client, body: bytes = BODY) -> None:
    """Let a client take most of the memory there is: it lacks the last byte of its body."""
    client.send(post(body)[:-1])
    await here.until(lambda: here.gateway.memory.used == len(body))


async def until_one_waits(here: Stage) -> None:
    await here.until(lambda: here.gateway.memory.is_short)


async def test_a_body_without_memory_waits_until_some_comes_back() -> None:
    async with stage(STREAM, limits=FEW) as here, here.client() as first, here.client() as second:
        await take_memory(here, first)
        second.send(post(BODY)[:-1])
        await until_one_waits(here)
        assert here.gateway.memory.used == SIZE
        assert (await first.ask(BODY[-1:])).status == 200
        assert (await second.ask(BODY[-1:])).status == 200


async def test_a_body_that_waits_too_long_for_memory_gets_503() -> None:
    limits = Limits(bodies_bytes=1000, body_bytes=1000, head_timeout_s=LONG_S, body_timeout_s=SHORT_S)
    async with stage(STREAM, limits=limits) as here, here.client() as first, here.client() as second:
        await take_memory(here, first)
        reply = await second.ask(post(BODY)[:-1])
        assert (reply.status, reply.error["code"], reply.get("retry-after")) == (503, "no_memory", "1")
        assert await second.rest() == b""


async def test_a_body_that_is_there_already_needs_no_memory() -> None:
    async with stage(STREAM, limits=FEW) as here, here.client() as first, here.client() as second:
        await take_memory(here, first)
        for data in (chat(pad="x" * 300), CHUNKED + chunk(b"{") + chunk(b"}" + b" " * 500) + LAST_CHUNK):
            for _ in range(2):
                assert (await second.ask(data)).status == 200
        assert here.gateway.memory.used == SIZE


async def test_a_chunked_body_waits_for_what_it_lacks_and_no_more() -> None:
    async with stage(STREAM, limits=FEW) as here, here.client() as first, here.client() as second:
        await take_memory(here, first)
        second.send(CHUNKED + chunk(b"{") + chunk(b" " * 300) + chunk(b" " * 300))
        await until_one_waits(here)
        first.abort()
        await here.until(lambda: here.gateway.memory.used == 601)
        assert (await second.ask(chunk(b"}") + LAST_CHUNK)).status == 200


async def test_a_client_that_leaves_gives_its_memory_back_and_waits_no_more() -> None:
    async with stage(STREAM, limits=FEW) as here, here.client() as first, here.client() as second:
        await take_memory(here, first)
        second.send(post(BODY)[:-1])
        await until_one_waits(here)
        second.abort()
        await here.until(lambda: len(here.gateway.clients) == 1)
        assert not here.gateway.memory.is_short
        first.abort()
        await here.until(lambda: not here.gateway.clients)
        assert here.gateway.memory.used == 0


async def test_a_reset_behind_more_pipelined_bytes_than_are_read_is_seen() -> None:
    async def never(request: Received) -> None:
        await asyncio.sleep(LONG_S)

    async with stage(never) as here, here.client() as client:
        client.send(chat(stream=False) * 5000)
        await here.until(lambda: here.received == 1)
        assert here.plane.board.in_flight == 1
        client.reset()
        await here.until(lambda: not here.gateway.clients)
        assert here.plane.board.in_flight == 0


async def test_a_refused_body_gives_its_memory_back_at_once() -> None:
    async with stage(STREAM, limits=FEW) as here, here.client() as client:
        client.send(CHUNKED + chunk(b"x" * 600))
        await here.until(lambda: here.gateway.memory.used == 600)
        client.send(b"zz\r\n")
        assert (await client.reply()).status == 400
        assert here.gateway.memory.used == 0


# Readers slower than their units

LARGE = 16 << 20


async def pour(request: Received) -> None:
    """A plain body that no buffer holds."""
    request.write(whole(b"x" * LARGE)[:-LARGE])
    for _ in range(LARGE >> 18):
        request.write(b"x" * (1 << 18))
        await request.connection.writer.drain()


async def until_still(here: Stage) -> None:
    """Wait until the gate takes nothing more from its units."""
    before = -1
    while (now := here.buffered()) != before or not now:
        before = now
        await asyncio.sleep(SHORT_S)


async def test_a_slow_reader_is_not_buffered_for_though_it_pipelines_and_harms_nobody() -> None:
    async with stage(pour) as here, here.client() as slow:
        slow.stop_reading()
        slow.send(chat(stream=False) * 2)
        await until_still(here)
        assert here.buffered() < 1 << 20
        slow.read_on()
        replies = [await slow.reply() for _ in range(2)]
        assert [(len(reply.body), reply.whole) for reply in replies] == [(LARGE, True)] * 2
        # The unit's connection, paused more than once, is as good as new.
        assert (await slow.ask(chat(stream=False))).whole
        assert len(here.unit.connections) == 1
