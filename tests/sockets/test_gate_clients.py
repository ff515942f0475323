"""Clients that leave, read slowly, take too long or too much, or belong to pages of other sites."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from cellgate.proxy.config.limits import LIMITS, REACHED
from cellgate.proxy.config.settings import Cors, Limits, Timeouts
from cellgate.proxy.http.errors import Failure
from cellgate.router.nouns import Ask
from loadtests.wire.raw import dial
from tests.real.asking import until
from tests.wire.client import Client, chat, get, post
from tests.wire.stage import Stage, stage
from tests.wire.unit import LAST_CHUNK, PAUSE_S, SSE_HEAD, STREAM, TOKENS, Received, Script, chunk, whole

PLAIN_HELD = whole(b"x" * 99)[:-90]
PLAIN_BEGUN = whole(b"x" * 99_999)[:-99_990]


def then_silent(data: bytes) -> Script:
    """Write, and nothing more for as long as anyone would wait."""

    async def play(request: Received) -> None:
        request.write(data)
        await asyncio.sleep(60.0)

    return play


MOMENTS: dict[str, tuple[bytes, bytes]] = {
    "before the head": (b"", b""),
    "after the head of a stream": (SSE_HEAD, b""),
    "in the first event": (SSE_HEAD + chunk(TOKENS[0][:9]), b""),
    "in the middle of a stream": (SSE_HEAD + chunk(TOKENS[0]), TOKENS[0]),
    "in a plain body that is held": (PLAIN_HELD, b""),
    "in the middle of a plain body": (PLAIN_BEGUN, b"x" * 9),
}
WAYS: dict[str, Callable[[Client], None]] = {
    "aborts": lambda client: client.abort(),
    "closes": lambda client: client.writer.close(),
    "shuts down": lambda client: client.writer.write_eof(),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("way", WAYS)
async def test_a_client_that_leaves_closes_its_units_connection(moment: str, way: str) -> None:
    (sent, seen), leave = MOMENTS[moment], WAYS[way]
    async with stage(then_silent(sent), STREAM) as here, here.client() as client:
        # Requests that it has pipelined are left undone.
        client.send(chat() * 3)
        request = await here.units[0].received()
        if seen:
            await client.reader.readuntil(seen)
        else:
            await asyncio.sleep(PAUSE_S)
        leave(client)
        await request.connection.until_gone()
        await here.until(lambda: here.outcomes)
        assert (here.outcomes, here.plane.board.in_flight) == (["client_left"], 0)
        assert here.records.kept[0].status == (200 if seen else 499)
        # It was nobody's fault: the unit is as good as before, and nobody else was asked.
        assert [state.case.verdict.value for state in here.plane.board] == ["up", "up"]
        assert len(here.units[1].requests) == 0


async def test_a_body_whose_client_left_is_freed_at_once_and_not_when_garbage_is_collected() -> None:
    class Body(bytearray):
        """Can be waited for, unlike bytes."""

    asked, bodies = asyncio.Event(), list[weakref.ref[Body]]()

    async def read_large(body: bytes, *_: object) -> Ask | Failure:
        held = Body(body)
        bodies.append(weakref.ref(held))
        asked.set()
        await asyncio.Event().wait()
        return Ask(str(len(held)))

    gc.disable()
    try:
        async with stage(STREAM) as here, here.client() as client:
            here.gateway.services.large_reads._read = read_large
            client.send(post(b'{"prompt": "' + b"x" * (1 << 20) + b'"}'))
            await asked.wait()
            client.abort()
            await here.until(lambda: not here.gateway.services.large_reads and not here.gateway.clients)
            assert [each() for each in bodies] == [None]
    finally:
        gc.enable()


async def test_a_client_that_was_kept_warm_has_been_answered_when_it_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cellgate.proxy.process.signals.TICK_S", 0.01)

    async def play(request: Received) -> None:
        request.write(SSE_HEAD)
        await asyncio.sleep(3 * PAUSE_S)
        request.connection.close()

    warm = Timeouts(head_hold_s=PAUSE_S)
    async with stage(play, then_silent(b""), timeouts=warm) as here, here.client() as client:
        client.send(chat())
        shown = await client.event()
        await here.units[1].received()
        client.abort()
        await here.until(lambda: here.outcomes)
        (record,) = here.records.kept
        assert (record.status, record.outcome.value, record.attempts) == (200, "client_left", 2)
        assert record.bytes_out >= len(shown)


# Clients that read slower than their unit writes: the slot is the engine's, and the bytes are the gate's.

EVENT = b'data: {"id":"1","choices":[{"delta":{"content":"%b"}}]}\n\n' % (b"a" * 900)


async def long_answer(request: Received) -> None:
    """300 kB of tokens, in the order of what an engine writes, and its end."""
    write = request.write
    write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(320):
        write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
        await asyncio.sleep(0)
    write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def reader(here: Stage) -> socket.socket:
    """A client that has asked and reads nothing."""
    return dial(here.gateway.port, chat(stream=True))


async def until_free(here: Stage) -> None:
    await until(lambda: here.received and not here.plane.board.in_flight)


async def test_a_slot_ends_with_its_engine_and_the_rest_waits_in_the_gate() -> None:
    async with stage(long_answer) as here:
        raw = reader(here)
        await until_free(here)
        assert here.gateway.backlogs.held == LIMITS.unsent_bytes
        raw.setblocking(True)
        got = b""
        while b"[DONE]" not in got:
            got += await asyncio.to_thread(raw.recv, 65536)
        assert got.count(b'"id"') == 320
        raw.close()
        await until(lambda: not here.gateway.backlogs.held)


async def test_who_reads_nothing_is_ended_by_a_named_limit() -> None:
    async with stage(long_answer) as here:
        before = REACHED["slow_reader_s"]
        raw = reader(here)
        await until_free(here)
        (client,) = here.gateway.clients
        # What the kernel takes at first is not read either.
        for windows in (1, 2):
            client.tick(here.gateway.now() + windows * (LIMITS.slow_reader_s + 1.0))
        assert REACHED["slow_reader_s"] > before
        client.tick(here.gateway.now() + 10 * LIMITS.slow_reader_s)
        await until(lambda: not here.gateway.clients)
        assert here.gateway.backlogs.held == 0
        raw.close()


# What pages of other sites, and peers that are not trusted, get of an answer.

APP = "https://app.example"
PREFLIGHT = f"Origin: {APP}\r\nAccess-Control-Request-Method: POST\r\n"


async def test_a_page_of_a_listed_origin_reads_answers_and_errors_and_asks_before() -> None:
    async with stage(STREAM, cors=Cors((APP,))) as here, here.client() as client:
        for request in (chat(head=f"Origin: {APP}\r\n"), chat(model="none", head=f"Origin: {APP}\r\n")):
            assert (await client.ask(request)).get("access-control-allow-origin") == APP
        reply = await client.ask(get("/v1/chat/completions", PREFLIGHT, method="OPTIONS"))
        assert (reply.status, reply.get("access-control-allow-origin")) == (200, APP)
        other = await client.ask(chat(head="Origin: https://evil.example\r\n"))
        assert (other.status, other.get("access-control-allow-origin")) == (200, None)
        assert [received.get("origin") for received in here.unit.requests] == [None, None]


ENGINES = (
    "Access-Control-Allow-Origin: *\r\nAccess-Control-Allow-Credentials: true\r\n"
    "Access-Control-Expose-Headers: x-a\r\nVary: Origin\r\nOpenAI-Model: 1\r\n"
)


@pytest.mark.parametrize("origins", [(APP,), ("*",)])
async def test_what_the_engine_says_of_pages_is_replaced(origins: tuple[str, ...]) -> None:
    """Browsers refuse an answer with two lines. llama.cpp and TGI send their own."""
    stream = STREAM.replace(b"Transfer", ENGINES.encode() + b"Transfer", 1)
    for script in (stream, whole(head=ENGINES)):
        async with stage(script, cors=Cors(origins)) as here, here.client() as client:
            reply = await client.ask(chat(head=f"Origin: {APP}\r\n"))
            assert reply.get("access-control-allow-origin") == origins[0]
            assert reply.get("access-control-allow-credentials") is None
            assert "x-request-id" in (reply.get("access-control-expose-headers") or "")
            assert reply.all("vary") == (["origin"] if origins == (APP,) else [])
            assert reply.get("openai-model") == "1"
            other = await client.ask(chat(head="Origin: https://evil.example\r\n"))
            assert other.get("access-control-allow-origin") == (None if origins == (APP,) else "*")
        async with stage(script) as here, here.client() as client:
            reply = await client.ask(chat(head=f"Origin: {APP}\r\n"))
            assert (reply.get("access-control-allow-origin"), reply.get("vary")) == ("*", "Origin")
            assert here.unit.requests[0].get("origin") == APP
            assert (await client.ask(get("/v1/models", PREFLIGHT, method="OPTIONS"))).status == 405


FROM_APP = f"Origin: {APP}\r\n"
REFUSED_EARLY: dict[str, tuple[int, bytes]] = {
    "a body too large": (
        413,
        chat(head=f"{FROM_APP}X-A: b\r\n").replace(b"ength: ", b"ength: 99999999999", 1),
    ),
    "a head too large": (431, chat(head=f"{FROM_APP}X-A: {'a' * 200_000}\r\n")),
    "too many lines": (431, chat(head=FROM_APP + "X-A: b\r\n" * 2000)),
    "two hosts": (400, chat(head=f"{FROM_APP}Host: b\r\n")),
    "a coding that is not known": (400, chat(head=f"{FROM_APP}Transfer-Encoding: foo\r\n")),
}


@pytest.mark.parametrize("origins", [(APP, "https://b.example"), ("*",)])
async def test_a_page_reads_why_its_request_was_not_even_read(origins: tuple[str, ...]) -> None:
    async with stage(STREAM, cors=Cors(origins)) as here:
        for what, (status, request) in REFUSED_EARLY.items():
            async with here.client() as client:
                reply = await client.ask(request)
            assert (reply.status, reply.get("access-control-allow-origin")) == (status, origins[0]), what
            assert "x-request-id" in (reply.get("access-control-expose-headers") or "")
        assert here.received == 0


@pytest.mark.parametrize(("shown_to", "shown"), [("trusted", False), ("all", True)])
async def test_strangers_are_not_told_of_units(
    shown_to: Any, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(STREAM, internal_headers=shown_to) as here:
        monkeypatch.setattr(here.gateway.services.peers, "trusts", lambda _peer: False)
        async with here.client() as client:
            reply = await client.ask(chat())
            told = [reply.get(name) is not None for name in ("x-cellgate-unit", "endpoint-load-metrics-bin")]
            assert told == [shown, shown]
            assert reply.get("x-request-id") is not None
    async with stage(STREAM) as here, here.client() as client:
        assert (await client.ask(chat())).get("x-cellgate-unit") == "u0"


# What takes too long or too much: 408, 503, and reading that pauses.

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


@pytest.mark.parametrize(
    ("limits", "begun", "code"),
    [
        *((SLOW_HEAD, begun, "head_timeout") for begun in (b"P", DECLARED[:40], DECLARED[:-2])),
        *((SLOW_BODY, begun, "body_timeout") for begun in (DECLARED, DECLARED + b"x" * 799, CHUNKED)),
        (SLOW_BODY, CHUNKED + chunk(b"x") + b"0\r\n", "body_timeout"),
    ],
)
async def test_what_does_not_come_to_its_end_gets_408(limits: Limits, begun: bytes, code: str) -> None:
    async with stage(STREAM, limits=limits) as here, here.client() as client:
        client.send(begun)
        assert (await refused(client, 408))["code"] == code
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
        # A second request that stays incomplete is refused after the answer to the first.
        client.send(chat(stream=False) + DECLARED[:40])
        assert (await client.reply()).status == 200
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
        # A refused body gives its memory back at once.
        second.send(CHUNKED + chunk(b"x" * 600))
        await here.until(lambda: here.gateway.memory.used == 600)
        second.send(b"zz\r\n")
        assert (await second.reply()).status == 400
        assert here.gateway.memory.used == 0


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
        before = len(here.unit.connections)
        assert (await slow.ask(chat(stream=False))).whole
        assert len(here.unit.connections) == before
