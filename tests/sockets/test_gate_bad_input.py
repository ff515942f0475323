"""Bad input of clients over real sockets: each gets its answer, and no byte of it reaches a unit."""

from __future__ import annotations

import pytest

from cellgate.proxy.config.settings import Limits
from tests.wire.client import Client, chat, get, post
from tests.wire.stage import Stage, stage
from tests.wire.unit import LAST_CHUNK, STREAM, chunk, whole

PATH = "/v1/chat/completions"
START = f"POST {PATH} HTTP/1.1\r\nHost: gate\r\n".encode()
CHUNKED = START + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b'{"model": "tiny"}'
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
        (CHUNKED + chunk(BODY), b"0\r\nX-A: " + b"b" * 5 * HEAD_LIMIT, 431),
        (CHUNKED + chunk(BODY), b"3;a=" + b"b" * 5 * HEAD_LIMIT, 431),
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
        crumbs = b"".join(chunk(BODY[n : n + 1]) for n in range(len(BODY)))
        assert (await client.ask(CHUNKED + chunk(b" ") * HEAD_LIMIT + crumbs + LAST_CHUNK)).status == 200
    async with stage(STREAM, limits=Limits(body_bytes=len(BODY))) as here, here.client() as client:
        for request in (post(BODY), CHUNKED + chunk(BODY) + LAST_CHUNK):
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


NOT_JSON = {
    "nothing": (b"", "char 0"),
    "cut off": (b'{"model": "tiny', "line 1 column 16"),
    "wrong on the second line": (b'{\n"model": tiny}', "line 2 column 10"),
    "two documents": (b"{} {}", "line 1 column 4"),
    "no UTF-8": (b'{"model": "\xff"}', "line 1 column"),
    "half a surrogate": (b'{"model": "\\ud800"}', "line 1 column"),
    "absurdly nested arrays": (b'{"messages": ' + b"[" * 100_000, "line 1 column"),
    "absurdly nested objects": (b'{"a":' * 100_000, "line 1 column"),
    "nested and closed": (b"[" * 50_000 + b"]" * 50_000, "line 1 column"),
    "large and cut off": (b'{"prompt": "' + b"x" * (1 << 20), "line 1 column"),
    "an array": (b"[]", "an array"),
    "a string": (b'"tiny"', "a string"),
    "null": (b"null", "null"),
    "a model that is no name": (b'{"model": 7}', "`model` must be a string, not a number"),
}


@pytest.mark.parametrize(("body", "said"), NOT_JSON.values(), ids=NOT_JSON)
async def test_bodies_that_are_no_json_object_get_400_that_says_where(body: bytes, said: str) -> None:
    async with stage(STREAM) as here, here.client() as client:
        reply = await client.ask(post(body))
        assert reply.status == 400
        assert said in reply.error["message"]
        assert (reply.error["type"], reply.error["code"]) == ("invalid_request_error", "bad_json")
        # The request was read to its end, so the connection goes on.
        assert (await client.ask(chat())).status == 200
        assert here.received == 1
