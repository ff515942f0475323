"""Requests through the gate over real sockets: connections, order, bodies, paths, and heads for units."""

from __future__ import annotations

import asyncio
import gzip
import re
import zlib
from typing import Any

import orjson
import pytest

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.config.settings import Limits
from cellgate.proxy.observe.access_log import Finished, json_line
from cellgate.proxy.request.conversation import read_conversation
from cellgate.router.nouns import Ask, Load, RankLoad, Refusal
from cellgate.router.unit_state import Lease
from tests.wire.client import Client, chat, get, post
from tests.wire.stage import Stage, stage
from tests.wire.unit import LAST_CHUNK, PAUSE_S, STREAM, TOKENS, Received, chunk, whole

EVENTS = b"".join(TOKENS)
PATH = "/v1/chat/completions"
CHUNKED = f"POST {PATH} HTTP/1.1\r\nHost: gate\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
ID = re.compile(r"[0-9a-f]{32}")


async def echo(request: Received) -> None:
    """Answer with the body of the request."""
    request.write(whole(request.body or b"{}"))


async def test_connections_are_kept_on_both_sides_and_requests_at_once_have_one_each() -> None:
    async def slow(request: Received) -> None:
        await asyncio.sleep(PAUSE_S)
        request.write(STREAM)

    async with stage(slow) as here, here.client() as first, here.client() as second:
        for _ in range(2):
            replies = await asyncio.gather(first.ask(chat()), second.ask(chat()))
            assert [(reply.status, reply.body) for reply in replies] == [(200, EVENTS)] * 2
            assert [reply.get("connection") for reply in replies] == [None, None]
        assert [connection.requests for connection in here.unit.connections] == [2, 2]


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
        for request in here.unit.requests:
            framing = request.get("content-length"), request.get("transfer-encoding")
            assert framing == (str(len(body)), None)


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
        assert here.unit.requests[1].get("expect") is None
        # Who does not wait for it needs none.
        assert (await client.ask(second)).interim in ([], [100])


async def test_http_1_0_gets_no_chunks_and_no_100_and_a_close_as_does_who_says_close() -> None:
    for extra in ("", "Connection: keep-alive\r\n", "Expect: 100-continue\r\n", "Connection: x, Close\r\n"):
        for request in (chat(head=extra), get("/v1/models", extra), get("/nowhere", extra)):
            async with stage(STREAM) as here, here.client() as client:
                is_old = "Close" not in extra
                old = request.replace(b"HTTP/1.1\r\nHost: gate", b"HTTP/1.0")
                reply = await client.ask(old if is_old else request)
                assert (reply.whole, reply.interim, reply.get("connection")) == (True, [], "close")
                assert request.startswith(b"GET") or reply.body == EVENTS
                assert reply.chunks is None or not is_old
                assert await client.rest() == b""


# What reaches the unit of a head


async def test_fields_of_the_connection_stay_behind_and_those_for_the_unit_go_on_as_they_are() -> None:
    dropped = {
        "Connection": "keep-alive, X-Hop, Cookie",
        "Keep-Alive": "timeout=5",
        "Proxy-Connection": "keep-alive",
        "Proxy-Authorization": "Basic eDp5",
        "TE": "trailers",
        "Trailer": "X-T",
        "Upgrade": "h2c",
        "X-Hop": "1",
        "Cookie": "a=b",
        "Accept-Encoding": "gzip, br",
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in dropped.items())
    kept = {"traceparent": f"00-{'4b' * 16}-{'f0' * 8}-01", "tracestate": "a=1", "x-real-ip": "192.0.2.1"}
    lines += "".join(f"{name}: {value}\r\n" for name, value in kept.items())
    lines += "x-hop: 2\r\nX-Hopper: 3\r\nAuthorization: Bearer sk-x\r\nX-A: 1\r\nX-B: \r\nX-A: 2, 3\r\n"
    async with stage(STREAM) as here, here.client() as client:
        assert (await client.ask(get("/version?x=1&y=%20", lines))).status == 200
        (request,) = here.unit.requests
        assert [name for name in dropped if request.all(name.lower())] == []
        assert {name: request.get(name) for name in kept} == kept
        assert (request.get("x-hopper"), request.get("authorization")) == ("3", "Bearer sk-x")
        assert (request.all("x-a"), request.get("x-b")) == (["1", "2, 3"], "")
        # The unit is addressed by its own name.
        assert (request.method, request.target, request.version) == ("GET", "/version?x=1&y=%20", "HTTP/1.1")
        assert request.get("host") == f"127.0.0.1:{here.unit.port}"
        assert request.get("content-length") is None


async def test_the_head_for_a_unit_has_these_lines_and_no_more() -> None:
    """Each line of the gate's own costs something, and tells units something: a new one is named here."""
    async with stage(STREAM) as here, here.client() as client:
        for asked, extra in ((chat(), ["content-length"]), (get("/version"), [])):
            assert (await client.ask(asked)).status == 200
            names = [name for name, _ in here.unit.requests[-1].fields]
            own = ["x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "x-request-id", *extra]
            assert names == [*(["content-type"] if extra else []), "host", *own]


@pytest.mark.parametrize("offered", ["h2c", "websocket, h2c", "h2c, websocket", "TLS/1.0"])
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


async def test_a_good_request_id_is_kept_and_a_bad_one_replaced() -> None:
    async with stage(STREAM) as here, here.client() as client:
        for path in (PATH, "/v1/embeddings", "/v1/models", "/nowhere"):
            good, asks = "X-Request-Id: req-1/a:b\r\n", path in (PATH, "/v1/embeddings")
            reply = await client.ask(post(b"{}", good, path) if asks else get(path, good))
            assert reply.get("x-request-id") == "req-1/a:b"
        made = ["req-1/a:b"] * 2
        for bad in ("", "a b", "x" * 129, "a,b", "<script>", '"a"', "\xe4"):
            reply = await client.ask(chat(head=f"X-Request-Id: {bad}\r\n"))
            made.append(reply.get("x-request-id") or "")
            assert ID.fullmatch(made[-1])
        assert [request.get("x-request-id") for request in here.unit.requests] == made
        assert len(set(made)) == len(made) - 1


async def test_of_a_large_conversation_only_what_is_new_is_read() -> None:
    said = [{"role": "user", "content": f"{number} " + "word " * 200} for number in range(1200)]
    async with stage(echo) as here:
        elsewhere: list[int] = []

        async def counted(body: bytes, _payer: str, _why_not: object, route: str) -> Any:
            elsewhere.append(len(body))
            return read_conversation(body, route)

        here.gateway.services.large_reads._read = counted
        async with here.client() as client:
            for turn in range(1, 4):
                body = orjson.dumps({"messages": said[: 1100 + turn], "model": "tiny"})
                assert len(body) > LIMITS.json_bytes_on_loop
                assert (await client.ask(post(body))).body == body
        assert len(elsewhere) == 1


# Paths of other APIs than chat: where they go, and what comes back.

BODY = orjson.dumps({"model": "tiny", "input": "hello"})


async def test_sagemaker_pings_the_gate_and_no_unit() -> None:
    async with stage(whole()) as here, here.client() as client:
        assert (await client.ask(get("/ping"))).status == 200
        here.plane.set_drain("u0", True)
        assert (await client.ask(get("/ping"))).status == 503
        assert here.received == 0


# Header lines that say how a request is to be routed, from the socket to the router and on to the unit.

WISHES = {
    "x-session-id": "s-1",
    "x-gateway-inference-fairness-id": "team",
    "x-priority": "-3",
    "x-slo-ttft-ms": "60000",
}


async def test_they_reach_the_router_and_cross_to_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage(STREAM) as here, here.client() as client:
        asks = _noted(here, monkeypatch)
        head = "".join(f"{name.title()}: {value}\r\n" for name, value in WISHES.items())
        assert (await client.ask(chat(head=head))).status == 200
        (ask,) = asks
        assert (ask.session, ask.tenant, ask.priority) == ("s-1", "team", -3)
        assert 59.0 < ask.deadline_at - here.gateway.now() <= 60.0
        (received,) = here.unit.requests
        assert {name: received.get(name) for name in WISHES} == WISHES
        # Credentials tell whose a request is.
        for key in ("a", "b", "a"):
            await client.ask(chat(head=f"Authorization: Bearer {key}\r\n"))
        one, other, same = (ask.tenant for ask in asks[1:])
        assert one == same != other
        assert here.unit.requests[1].get("authorization") == "Bearer a"
        # A sub-agent that has a session of its own is of the one above it.
        await client.ask(chat(head="X-Session-Affinity: own\r\nX-Parent-Session-Id: s-1\r\n"))
        assert asks.pop().session == "s-1"
        # One that makes no sense is named, and reaches no unit.
        reply = await client.ask(chat(head="x-slo-ttft-ms: soon\r\n"))
        assert (reply.status, reply.error["param"], here.received) == (400, "x-slo-ttft-ms", 5)
        assert reply.error["message"] == "x-slo-ttft-ms: expected milliseconds above 0, found 'soon'"


def _noted(here: Stage, monkeypatch: pytest.MonkeyPatch) -> list[Ask]:
    """The asks that the router gets from now on."""
    asks: list[Ask] = []
    pick = here.plane.router.pick

    def noting(ask: Ask, *args: Any, **kwargs: Any) -> Lease | Refusal:
        asks.append(ask)
        return pick(ask, *args, **kwargs)

    monkeypatch.setattr(here.plane.router, "pick", noting)
    return asks


# Compressed requests: units get them plain, bombs do nothing, and what is not supported is said.

zstd: Any = pytest.importorskip("backports.zstd")

LARGE_BODY = orjson.dumps(
    {"model": "tiny", "messages": [{"role": "user", "content": "hi" * 1000}], "stream": True}
)
CODERS: list[tuple[Any, str]] = [(gzip.compress, "gzip"), (zstd.compress, "zstd")]
CODED = {
    "gzip": gzip.compress(LARGE_BODY),
    "x-gzip": gzip.compress(LARGE_BODY),
    "deflate": zlib.compress(LARGE_BODY),
    "zstd": zstd.compress(LARGE_BODY),
    "GZIP": gzip.compress(LARGE_BODY),
    "identity": LARGE_BODY,
}


def coded(body: bytes, coding: str = "gzip") -> bytes:
    return post(body, f"Content-Encoding: {coding}\r\n")


async def test_the_unit_gets_it_plain_and_its_model_counts() -> None:
    async with stage(STREAM, models={"gpt": (("tiny", 1.0),)}) as here, here.client() as client:
        for coding, body in CODED.items():
            reply = await client.ask(coded(body, coding))
            assert (reply.status, reply.whole) == (200, True)
            request = here.unit.requests[-1]
            assert (request.body, request.get("content-encoding")) == (LARGE_BODY, None)
            assert here.records.kept[-1].model == "tiny"
        # A large one is decoded over many turns.
        large = orjson.dumps({"model": "tiny", "text": "".join(f"{n} {n * n}" for n in range(100_000))})
        for coding, body in (("gzip", gzip.compress(large)), ("zstd", zstd.compress(large))):
            assert (await client.ask(coded(body, coding))).status == 200
            assert here.unit.requests[-1].body == large


BOMBS = [(compress(b" " * size), coding) for size in (2_900_000, 50_000_000) for compress, coding in CODERS]
UNREADABLE = [
    *((b"xyz", coding, 415, "unsupported_encoding") for coding in ("br", "gzip, zstd", "compress")),
    *((body, coding, 413, "body_too_large") for body, coding in BOMBS),
    *((body, "gzip", 400, "bad_request") for body in (LARGE_BODY, CODED["gzip"][:-1], CODED["zstd"])),
]


async def test_what_cannot_be_read_is_refused_and_its_memory_freed() -> None:
    async with stage(STREAM, limits=Limits(body_bytes=3_000_000)) as here:
        for body, coding, status, code in UNREADABLE:
            async with here.client() as client:
                reply = await client.ask(coded(body, coding))
                assert (reply.status, reply.error["code"]) == (status, code)
                if status == 415:
                    assert reply.get("accept-encoding") == "gzip, deflate, zstd"
                    assert (await client.ask(get("/v1/models"))).status == 200
        assert here.received == 0


async def test_a_client_that_leaves_meanwhile_leaves_nothing_behind() -> None:
    async with stage(STREAM) as here, here.client() as client:
        noisy = orjson.dumps({"model": "tiny", "text": "".join(f"{n} {n * n}" for n in range(400_000))})
        client.send(coded(gzip.compress(noisy)))
        await here.until(lambda: here.gateway.memory.used > 3_000_000)
        client.abort()
        await here.until_quiet()


# The rank that a unit with data parallel ranks is asked for, and that the log names.

RANKS = RankLoad(0, running=9), RankLoad(1)


def show_ranks(here: Stage) -> None:
    """The engine's metrics show two ranks, of which the first is busy with requests of others."""
    [state] = here.plane.board
    here.plane.board.report(Load(state.unit.name, here.plane.now(), 9, ranks=RANKS))


async def test_a_request_is_sent_to_a_rank_and_logged_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[Finished] = []
    async with stage(STREAM) as here, here.client() as client:
        monkeypatch.setattr(here.gateway.services, "finished", records.append)
        await client.ask(chat())
        show_ranks(here)
        await client.ask(chat())
        await client.ask(chat(head="X-Data-Parallel-Rank: 0\r\n"))
        assert [request.get("x-data-parallel-rank") for request in here.unit.requests] == [None, "1", "0"]
        assert [rank.in_flight for state in here.plane.board for rank in state.ranks.ranks] == [0, 0]
    assert [record.rank for record in records] == [None, 1, None]
    assert [b'"rank":1' in json_line(0.0, record) for record in records] == [False, True, False]


# Bad input: each gets its answer, and no byte of it reaches a unit.

START = f"POST {PATH} HTTP/1.1\r\nHost: gate\r\n".encode()
SMALL = b'{"model": "tiny"}'
HEAD_LIMIT = 2048


async def refused(here: Stage, client: Client, data: bytes, status: int) -> dict[str, object]:
    """The error with which `data` is refused; the connection must end, and no unit have seen a thing."""
    reply = await client.ask(data)
    assert (reply.status, reply.whole, reply.get("connection")) == (status, True, "close"), reply
    assert await client.rest() == b""
    assert not any(unit.connections for unit in here.units)
    return reply.error


@pytest.mark.parametrize(
    ("begun", "rest", "status"),
    [
        (b"", START + b"Content-Length: +3\r\n\r\nabc", 400),
        (b"", START + b"X-A: " + b"b" * HEAD_LIMIT, 431),
        (CHUNKED + chunk(SMALL), b"0\r\nX-A: " + b"b" * 5 * HEAD_LIMIT, 431),
        (CHUNKED + chunk(SMALL), b"3;a=" + b"b" * 5 * HEAD_LIMIT, 431),
        (b"", post(b"x" * 3001, "Expect: 100-continue\r\n")[:-3001], 413),
        (CHUNKED + chunk(b"x" * 1500), chunk(b"x" * 1501), 413),
        (b"", b"CONNECT gate:443 HTTP/1.1\r\nHost: gate\r\n\r\n", 501),
    ],
)
async def test_what_is_refused_ends_its_connection_and_reaches_no_unit(
    begun: bytes, rest: bytes, status: int
) -> None:
    limits = Limits(head_bytes=HEAD_LIMIT, body_bytes=3000)
    async with stage(STREAM, limits=limits, pass_unlisted=True) as here, here.client() as client:
        client.send(begun)
        error = await refused(here, client, rest, status)
        assert (error["type"], here.outcomes) == ("invalid_request_error", ["client_error"])
        if status in (413, 431):
            what = "head is larger than 2048" if status == 431 else "body is larger than 3000"
            assert error["message"] == f"the request's {what} bytes"
        assert here.gateway.memory.used == 0


async def test_what_comes_before_a_malformed_request_is_answered() -> None:
    async with stage(STREAM) as here, here.client() as client:
        client.send(chat() + chat() + START + b"Content-Length: +3\r\n\r\nabc" + chat())
        assert [(await client.reply()).status for _ in range(3)] == [200, 200, 400]
        assert await client.rest() == b""
        assert here.received == 2


async def test_a_large_body_does_not_make_a_head_large_and_just_the_limit_passes() -> None:
    async with stage(STREAM, limits=Limits(head_bytes=HEAD_LIMIT)) as here, here.client() as client:
        for _ in range(2):
            assert (await client.ask(chat(pad="b" * 3 * HEAD_LIMIT))).status == 200
        client.send(chat() * 64)
        assert [(await client.reply()).status for _ in range(64)] == [200] * 64
        crumbs = b"".join(chunk(SMALL[n : n + 1]) for n in range(len(SMALL)))
        assert (await client.ask(CHUNKED + chunk(b" ") * HEAD_LIMIT + crumbs + LAST_CHUNK)).status == 200
    async with stage(STREAM, limits=Limits(body_bytes=len(SMALL))) as here, here.client() as client:
        for request in (post(SMALL), CHUNKED + chunk(SMALL) + LAST_CHUNK):
            assert (await client.ask(request)).status == 200


async def test_a_method_that_the_path_does_not_take_gets_405() -> None:
    async with stage(STREAM) as here, here.client() as client:
        for method in ("GET", "DELETE", "HEAD"):
            reply = await client.ask(get(PATH, method=method), method)
            assert (reply.status, reply.get("allow")) == (405, "POST")
        reply = await client.ask(get("/v1/models", method="POST"))
        assert (reply.status, reply.get("allow")) == (405, "GET, HEAD")
        assert (await client.ask(get("/v1/models"))).status == 200
        assert here.received == 0


async def test_paths_of_administration_and_those_that_others_may_read_otherwise_reach_no_unit() -> None:
    """Tables: tests/unit/request/test_routes.py."""
    async with stage(whole(), pass_unlisted=True) as here, here.client() as client:
        for path in ("/pause", "/%70ause", "/sleep?level=1", "/v1/%6coad_lora_adapter", "/sleep/x"):
            reply = await client.ask(post(b"{}", path=path))
            assert (reply.status, reply.error["type"]) == (403, "permission_error"), path
        for path in ("/v1/models/../../pause", "/v1/models/%2e%2e/pause", "//pause", "/x/./y"):
            async with here.client() as other:
                reply = await other.ask(get(path))
            assert (reply.status, reply.error["code"]) == (400, "bad_request"), path
        assert here.received == 0
