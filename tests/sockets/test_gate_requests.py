"""Requests through the gate over real sockets: connections, order, bodies, and the head that a unit gets."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import orjson
import pytest

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.config.settings import Limits
from cellgate.proxy.request.conversation import read_conversation
from tests.wire.client import chat, get, post
from tests.wire.stage import live, stage
from tests.wire.unit import LAST_CHUNK, PAUSE_S, STREAM, TOKENS, Received, chunk, whole

EVENTS = b"".join(TOKENS)
PATH = "/v1/chat/completions"
CHUNKED = f"POST {PATH} HTTP/1.1\r\nHost: gate\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
ID = re.compile(r"[0-9a-f]{32}")


async def echo(request: Received) -> None:
    """Answer with the body of the request."""
    request.write(whole(request.body or b"{}"))


@live
async def test_connections_are_kept_on_both_sides() -> None:
    async with stage(STREAM) as here, here.client() as client:
        for _ in range(5):
            reply = await client.ask(chat())
            assert (reply.status, reply.body, reply.get("connection")) == (200, EVENTS, None)
        assert [connection.requests for connection in here.unit.connections] == [5]


@live
async def test_requests_at_once_have_a_connection_each_and_share_them_later() -> None:
    async def slow(request: Received) -> None:
        await asyncio.sleep(PAUSE_S)
        request.write(STREAM)

    async with stage(slow) as here, here.client() as first, here.client() as second:
        for _ in range(2):
            replies = await asyncio.gather(first.ask(chat()), second.ask(chat()))
            assert [reply.body for reply in replies] == [EVENTS, EVENTS]
        assert [connection.requests for connection in here.unit.connections] == [2, 2]


@live
async def test_pipelined_requests_are_answered_in_order() -> None:
    async def later_ones_are_faster(request: Received) -> None:
        await asyncio.sleep(PAUSE_S / (1 + len(here.unit.requests)))
        await echo(request)

    async with stage(later_ones_are_faster) as here, here.client() as client:
        bodies = [b'{"n": %d}' % number for number in range(5)]
        asked = [post(body) for body in bodies]
        client.send(b"".join([asked[0], get("/v1/models"), *asked[1:3], get("/nowhere"), *asked[3:]]))
        replies = [await client.reply() for _ in range(7)]
        assert [reply.status for reply in replies] == [200, 200, 200, 200, 404, 200, 200]
        assert [replies[n].body for n in (0, 2, 3, 5, 6)] == bodies
        assert replies[1].json["data"][0]["id"] == "tiny"


@live
async def test_requests_arrive_alike_in_any_pieces() -> None:
    body = b'{"messages": [],\r\n\r\n"pad": "GET / HTTP/1.1"\r\n\r\n}'
    requests = post(body) + CHUNKED + b"".join(chunk(body[n : n + 9]) for n in range(0, len(body), 9))
    data = requests + b"0\r\nX-A: b\r\n\r\n" + post(body)
    async with stage(echo) as here, here.client() as client:
        for size in (1, 3, 16, 50, 1000):
            for at in range(0, len(data), size):
                client.send(data[at : at + size])
                await asyncio.sleep(0)
            replies = [await client.reply() for _ in range(3)]
            assert [(reply.status, reply.body) for reply in replies] == [(200, body)] * 3


@live
async def test_a_chunked_body_reaches_the_unit_with_its_length() -> None:
    async with stage(echo) as here, here.client() as client:
        parts = [b'{"messages": ', b"[]", b"}"]
        reply = await client.ask(CHUNKED + b"".join(map(chunk, parts)) + LAST_CHUNK)
        assert reply.body == b'{"messages": []}'
        request = here.unit.requests[0]
        assert (request.get("content-length"), request.get("transfer-encoding")) == ("16", None)


@live
async def test_a_large_body_arrives_whole() -> None:
    async with stage(echo) as here, here.client() as client:
        body = b'{"prompt": "' + b"abcdefghijklmnopqrstuvwxyz0123456789" * 200_000 + b'"}'
        assert (await client.ask(post(body))).body == body
        assert here.gateway.memory.used == 0


@live
async def test_a_client_that_waits_for_100_is_told_to_go_on() -> None:
    async with stage(echo) as here, here.client() as client:
        request = post(b'{"a": 1}', "Expect: 100-continue\r\n")
        client.send(request[:-8])
        assert await client.reader.readexactly(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        reply = await client.ask(request[-8:])
        assert (reply.status, reply.body, reply.interim) == (200, b'{"a": 1}', [])
        assert here.unit.requests[0].get("expect") is None


@live
async def test_a_client_that_does_not_wait_for_100_gets_none() -> None:
    async with stage(echo) as here, here.client() as client:
        reply = await client.ask(post(b'{"a": 1}', "Expect: 100-Continue\r\n"))
        assert (reply.status, reply.body) == (200, b'{"a": 1}')
        assert reply.interim in ([], [100])


@live
async def test_100_is_said_in_its_turn_and_not_into_the_answer_before() -> None:
    async def slow(request: Received) -> None:
        await asyncio.sleep(PAUSE_S)
        request.write(STREAM)

    async with stage(slow) as here, here.client() as client:
        second = chat(head="Expect: 100-continue\r\n")
        at = second.index(b"\r\n\r\n") + 4
        client.send(chat() + second[:at])
        assert (await client.reply()).interim == []
        assert await client.reader.readexactly(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await client.ask(second[at:])).body == EVENTS


@live
async def test_http_1_0_gets_no_chunks_and_no_100_and_a_close() -> None:
    for extra in ("", "Connection: keep-alive\r\n", "Expect: 100-continue\r\n"):
        for request in (chat(head=extra), get("/v1/models", extra), get("/nowhere", extra)):
            async with stage(STREAM) as here, here.client() as client:
                reply = await client.ask(request.replace(b"HTTP/1.1\r\nHost: gate", b"HTTP/1.0"))
                assert (reply.chunks, reply.interim, reply.get("connection")) == (None, [], "close")
                assert request.startswith(b"GET") or reply.body == EVENTS
                assert await client.rest() == b""


@live
async def test_a_client_that_says_close_is_closed_after_its_answer() -> None:
    for request in (chat(head="Connection: close\r\n"), get("/v1/models", "Connection: x, Close\r\n")):
        async with stage(STREAM) as here, here.client() as client:
            reply = await client.ask(request)
            assert (reply.status, reply.whole, reply.get("connection")) == (200, True, "close")
            assert await client.rest() == b""


@live
async def test_empty_lines_before_a_request_are_skipped() -> None:
    async with stage(STREAM) as here, here.client() as client:
        client.send(b"\r\n" + chat() + b"\r\n\r\n" + chat())
        assert [(await client.reply()).status for _ in range(2)] == [200, 200]


# What reaches the unit of a head


async def received(head: str, *, version: str = "1.1") -> Received:
    """A chat request with these header lines, as the unit saw it."""
    async with stage(STREAM) as here, here.client() as client:
        request = chat(head=head).replace(b"HTTP/1.1", f"HTTP/{version}".encode())
        assert (await client.ask(request)).status == 200
        return here.unit.requests[0]


@live
async def test_fields_of_the_connection_stay_behind() -> None:
    dropped = {
        "Connection": "keep-alive, X-Hop, Authorization",
        "Keep-Alive": "timeout=5",
        "Proxy-Connection": "keep-alive",
        "Proxy-Authorization": "Basic eDp5",
        "TE": "trailers",
        "Trailer": "X-T",
        "Upgrade": "h2c",
        "X-Hop": "1",
        "Authorization": "Bearer x",
        "Accept-Encoding": "gzip, br",
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in dropped.items())
    request = await received(lines + "x-hop: 2\r\nX-Hopper: 3\r\nX-Kept: 4\r\n")
    assert [name for name in dropped if request.all(name.lower())] == []
    assert (request.get("x-hopper"), request.get("x-kept")) == ("3", "4")


@pytest.mark.parametrize("offered", ["h2c", "websocket, h2c", "h2c, websocket", "TLS/1.0"])
@live
async def test_an_upgrade_to_http2_is_ignored_and_hidden_from_the_unit(offered: str) -> None:
    """Java's client asks for it with each request on a new connection, and so does `curl --http2`."""
    h2c = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {offered}\r\nHTTP2-Settings: AAEAAEAA\r\n"
    async with stage(STREAM) as here, here.client() as client:
        for asked in (chat(head=h2c), chat(head=h2c, text="x" * 100_000), get("/version", h2c)):
            assert (await client.ask(asked)).status == 200
            request = here.unit.requests[-1]
            assert [request.get(name) for name in ("upgrade", "http2-settings", "connection")] == [None] * 3
            assert asked.endswith(request.body)
        assert len(here.unit.requests[1].body) > 100_000


@live
async def test_fields_for_the_unit_go_on_as_they_are_and_in_order() -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    request = await received(
        f"traceparent: {trace}\r\ntracestate: a=1\r\nAuthorization: Bearer sk-x\r\n"
        "X-A: 1\r\nX-B: \r\nX-A: 2, 3\r\n"
    )
    assert (request.get("traceparent"), request.get("tracestate")) == (trace, "a=1")
    assert (request.get("authorization"), request.all("x-a"), request.get("x-b")) == (
        "Bearer sk-x",
        ["1", "2, 3"],
        "",
    )


@live
async def test_the_unit_is_addressed_by_its_own_name() -> None:
    async with stage(STREAM) as here, here.client() as client:
        await client.ask(get("/version?x=1&y=%20", "X-Real-IP: 192.0.2.1\r\n"))
        request = here.unit.requests[0]
        assert (request.method, request.target, request.version) == ("GET", "/version?x=1&y=%20", "HTTP/1.1")
        assert request.get("host") == f"127.0.0.1:{here.unit.port}"
        assert (request.get("content-length"), request.get("x-real-ip")) == (None, "192.0.2.1")


@live
async def test_the_unit_learns_who_asked() -> None:
    request = await received("")
    assert request.get("x-forwarded-for") == "127.0.0.1"
    assert (request.get("x-forwarded-proto"), request.get("x-forwarded-host")) == ("http", "gate")


@live
async def test_what_an_ingress_has_said_is_kept_and_added_to() -> None:
    request = await received(
        "X-Forwarded-For: 192.0.2.7\r\nX-Forwarded-For: 192.0.2.8\r\n"
        "X-Forwarded-Proto: https\r\nX-Forwarded-Host: api.example\r\n"
    )
    assert request.get("x-forwarded-for") == "192.0.2.7, 192.0.2.8, 127.0.0.1"
    assert (request.get("x-forwarded-proto"), request.get("x-forwarded-host")) == ("https", "api.example")


@live
async def test_a_good_request_id_is_kept_and_echoed() -> None:
    async with stage(STREAM) as here, here.client() as client:
        for path in (PATH, "/v1/embeddings"):
            reply = await client.ask(post(b"{}", "X-Request-Id: req-1/a:b\r\n", path))
            assert reply.get("x-request-id") == "req-1/a:b"
            assert here.unit.requests[-1].get("x-request-id") == "req-1/a:b"
        for own in (get("/v1/models", "X-Request-Id: q\r\n"), get("/nowhere", "X-Request-Id: q\r\n")):
            assert (await client.ask(own)).get("x-request-id") == "q"


@pytest.mark.parametrize("bad", ["", "a b", "x" * 129, "a,b", "<script>", '"a"', "\xe4"])
@live
async def test_a_bad_request_id_is_replaced(bad: str) -> None:
    async with stage(STREAM) as here, here.client() as client:
        reply = await client.ask(chat(head=f"X-Request-Id: {bad}\r\n"))
        made = reply.get("x-request-id")
        assert made is not None
        assert ID.fullmatch(made)
        assert here.unit.requests[0].get("x-request-id") == made


@live
async def test_request_ids_that_are_made_differ() -> None:
    async with stage(STREAM) as here, here.client() as client:
        made = {(await client.ask(chat())).get("x-request-id") for _ in range(10)}
        assert len(made) == 10


@live
async def test_a_client_that_uses_up_its_pipeline_is_read_again() -> None:
    async with stage(STREAM, limits=Limits()) as here, here.client() as client:
        client.send(chat(pad="x" * 2000) * 200)
        for _ in range(200):
            assert (await client.reply()).body == EVENTS
        assert (await client.ask(chat())).body == EVENTS


@live
async def test_of_a_large_conversation_only_what_is_new_is_read() -> None:
    said = [{"role": "user", "content": f"{number} " + "word " * 200} for number in range(1200)]
    async with stage(echo) as here:
        elsewhere: list[int] = []

        async def counted(body: bytes, _payer: str, _why_not: object, route: str) -> Any:
            elsewhere.append(len(body))
            return read_conversation(body, route)

        here.gateway.large_reads._read = counted
        async with here.client() as client:
            for turn in range(1, 4):
                body = orjson.dumps({"messages": said[: 1100 + turn], "model": "tiny"})
                assert len(body) > LIMITS.json_bytes_on_loop
                assert (await client.ask(post(body))).body == body
        assert len(elsewhere) == 1
