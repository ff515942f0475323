"""Bad input of clients over real sockets: each gets its answer, and no byte of it reaches a unit."""

from __future__ import annotations

import asyncio

import pytest

from cellgate.proxy.config.settings import Limits
from tests.wire.client import Client, chat, get, post
from tests.wire.stage import Stage, stage
from tests.wire.unit import LAST_CHUNK, STREAM, chunk, whole

PATH = "/v1/chat/completions"
START = f"POST {PATH} HTTP/1.1\r\nHost: gate\r\n".encode()
CHUNKED = START + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b'{"model": "tiny"}'


def head(*lines: str, first: str = f"POST {PATH} HTTP/1.1", host: str = "Host: gate\r\n") -> bytes:
    """A head with whatever lines, and a body of three bytes that must not become a request."""
    fields = "".join(line + "\r\n" for line in lines)
    return f"{first}\r\n{host}{fields}\r\nabc".encode("latin-1")


MALFORMED: dict[str, bytes] = {
    # Content-Length
    "length with a sign": head("Content-Length: +3"),
    "length twice in one field": head("Content-Length: 3,3"),
    "length in two fields": head("Content-Length: 3", "Content-Length: 3"),
    "two lengths": head("Content-Length: 3", "Content-Length: 4"),
    "length in hex": head("Content-Length: 0x3"),
    "length below zero": head("Content-Length: -1"),
    "length with a fraction": head("Content-Length: 3.0"),
    "length beyond 64 bits": head("Content-Length: 18446744073709551616"),
    "length empty": head("Content-Length:"),
    "length with a space inside": head("Content-Length: 3 3"),
    "length in other digits": head("Content-Length: \xb3"),
    "length and coding": head("Content-Length: 3", "Transfer-Encoding: chunked"),
    "coding and length": head("Transfer-Encoding: chunked", "Content-Length: 3"),
    # Transfer-Encoding
    "coding not chunked": head("Transfer-Encoding: identity"),
    "coding before chunked": head("Transfer-Encoding: gzip, chunked"),
    "coding after chunked": head("Transfer-Encoding: chunked, identity"),
    "chunked twice": head("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
    "coding looks like chunked": head("Transfer-Encoding: xchunked"),
    "chunked in a list": head("Transfer-Encoding: ,chunked"),
    "chunked in quotes": head('Transfer-Encoding: "chunked"'),
    "chunked behind a control character": head("Transfer-Encoding: \x0bchunked"),
    "coding empty": head("Transfer-Encoding:"),
    "coding in HTTP/1.0": head("Transfer-Encoding: chunked", first=f"POST {PATH} HTTP/1.0"),
    # Host
    "no host": head("Content-Length: 3", host=""),
    "two hosts": head("Host: other", "Content-Length: 3"),
    "the same host twice": head("Host: gate", "Content-Length: 3"),
    # Lines
    "folded line": head("X-A: b", " c", "Content-Length: 3"),
    "folded with a tab": head("X-A: b", "\tc", "Content-Length: 3"),
    "NUL in a value": head("X-A: b\0c", "Content-Length: 3"),
    "NUL in a name": head("X\0A: b", "Content-Length: 3"),
    "bare CR in a value": head("X-A: b\rX-B: c", "Content-Length: 3"),
    "bare LF ends a line": head("X-A: b\nX-B: c", "Content-Length: 3"),
    "bare LF ends all lines": head("Content-Length: 3").replace(b"\r", b""),
    "bare LF ends the head": START + b"\n",
    "space before the colon": head("Content-Length : 3"),
    "space before a name": head(" Content-Length: 3"),
    "space in a name": head("Content Length: 3"),
    "name empty": head(": 3"),
    "no colon": head("Content-Length 3"),
    # The first line
    "no version": f"GET {PATH}\r\n\r\n".encode(),
    "version 0.9": head(first=f"GET {PATH} HTTP/0.9"),
    "version 2.0": head(first=f"GET {PATH} HTTP/2.0"),
    "version 1.2": head(first=f"GET {PATH} HTTP/1.2"),
    "version nonsense": head(first=f"GET {PATH} HTTQ/1.1"),
    "preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS to a plain port": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "space in the target": head(first="GET /a b HTTP/1.1"),
    "control character in the target": head(first="GET /\x01 HTTP/1.1"),
    "raw bytes in the target": head(first="GET /\xe4 HTTP/1.1"),
    "fragment in the target": head(first=f"GET {PATH}#a HTTP/1.1"),
    "target is no path": head(first="GET gate HTTP/1.1"),
    "target of another scheme": head(first="GET ftp://gate/ HTTP/1.1"),
    "RTSP": head(first=f"GET {PATH} RTSP/1.0"),
    "RTSP behind many spaces": head(first=f"GET   {PATH}   RTSP/1.1"),
    "RTSP with a star": head(first="OPTIONS * RTSP/1.0"),
    "ICE": head(first=f"SOURCE {PATH} ICE/1.0"),
    "SIP": head(first=f"GET {PATH} SIP/2.0"),
    "HTTPS": head(first=f"GET {PATH} HTTPS/1.1"),
    "HTTP in lower case": head(first=f"GET {PATH} http/1.1"),
    "query where a path belongs": head(first="GET http://gate?/v1/models HTTP/1.1"),
    "fragment behind the authority": head(first="GET http://gate#/v1/models HTTP/1.1"),
    "no authority": head(first="GET http:///v1/models HTTP/1.1"),
    "user in the authority": head(first="GET http://a@gate/v1/models HTTP/1.1"),
    "backslash in the authority": head(first="GET http://gate\\x/v1/models HTTP/1.1"),
    "percent in the authority": head(first="GET http://gate%2f/v1/models HTTP/1.1"),
    "port that is none": head(first="GET http://gate:1x/v1/models HTTP/1.1"),
    "authority and no path": head(first="GET gate:80 HTTP/1.1"),
    "target is a star for GET": head(first="GET * HTTP/1.1"),
    "target is a star": head(first="OPTIONS * HTTP/1.1"),
    # Chunks
    "chunk size no number": CHUNKED + b"zz\r\n",
    "chunk size with a sign": CHUNKED + b"+3\r\nabc\r\n0\r\n\r\n",
    "chunk size below zero": CHUNKED + b"-1\r\nabc\r\n0\r\n\r\n",
    "chunk size with 0x": CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
    "chunk size huge": CHUNKED + b"f" * 17 + b"\r\nabc",
    "chunk size empty": CHUNKED + b"\r\nabc\r\n0\r\n\r\n",
    "chunk size with spaces": CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n",
    "chunk size ended by LF": CHUNKED + b"3\nabc\r\n0\r\n\r\n",
    "chunk longer than its size": CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n",
    "chunk ended by LF": CHUNKED + b"3\r\nabc\n0\r\n\r\n",
    "chunk not ended": CHUNKED + b"3\r\nabc0\r\n\r\n",
    "NUL in a chunk extension": CHUNKED + b"3;\0\r\nabc\r\n0\r\n\r\n",
    "LF ends a chunk extension": CHUNKED + b"3;a=b\nabc\r\n0\r\n\r\n",
    "length among the trailers": CHUNKED + b"3\r\nabc\r\n0\r\nContent-Length: 5\r\n\r\n",
    "folded trailer": CHUNKED + b"3\r\nabc\r\n0\r\nX-A: b\r\n c\r\n\r\n",
}


async def refused(here: Stage, client: Client, data: bytes, status: int) -> dict[str, object]:
    """The error with which `data` is refused; the connection must end, and no unit have seen a thing."""
    reply = await client.ask(data)
    assert (reply.status, reply.whole, reply.get("connection")) == (status, True, "close"), reply
    assert await client.rest() == b""
    assert not any(unit.connections for unit in here.units)
    return reply.error


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_requests_get_400_and_reach_no_unit(data: bytes) -> None:
    async with stage(STREAM) as here, here.client() as client:
        error = await refused(here, client, data, 400)
        assert error["type"] == "invalid_request_error"
        assert here.outcomes == ["client_error"]


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_requests_are_refused_however_they_arrive(data: bytes) -> None:
    """Byte by byte: each of them may be all that is seen so far."""
    async with stage(STREAM) as here, here.client() as client:
        for offset in range(len(data)):
            client.send(data[offset : offset + 1])
            await asyncio.sleep(0)
        error = await refused(here, client, b"", 400)
        assert error["type"] == "invalid_request_error"


async def test_what_comes_before_a_malformed_request_is_answered() -> None:
    async with stage(STREAM) as here, here.client() as client:
        client.send(chat() + chat() + MALFORMED["length with a sign"] + chat())
        assert [(await client.reply()).status for _ in range(3)] == [200, 200, 400]
        assert await client.rest() == b""
        assert here.received == 2


HEAD_LIMIT = 2048
HEADS_TOO_LARGE = {
    "long value": get("/v1/models", f"X-A: {'b' * HEAD_LIMIT}\r\n"),
    "long name": get("/v1/models", f"{'X' * HEAD_LIMIT}: b\r\n"),
    "long target": get("/v1/models?" + "b" * HEAD_LIMIT),
    "many fields": get("/v1/models", "".join(f"X-{n}: {'b' * 32}\r\n" for n in range(HEAD_LIMIT // 32))),
    "endless": get("/v1/models", f"X-A: {'b' * HEAD_LIMIT}")[:-4],
    "endless method": b"POST" + b" " * HEAD_LIMIT,
}


@pytest.mark.parametrize("data", HEADS_TOO_LARGE.values(), ids=HEADS_TOO_LARGE)
async def test_a_head_that_is_too_large_gets_431(data: bytes) -> None:
    async with stage(STREAM, limits=Limits(head_bytes=HEAD_LIMIT)) as here, here.client() as client:
        error = await refused(here, client, data, 431)
        assert error["message"] == "the request's head is larger than 2048 bytes"


async def test_a_large_body_does_not_make_a_head_large() -> None:
    async with stage(STREAM, limits=Limits(head_bytes=HEAD_LIMIT)) as here, here.client() as client:
        for _ in range(2):
            assert (await client.ask(chat(pad="b" * 3 * HEAD_LIMIT))).status == 200
        client.send(chat() * 64)
        assert [(await client.reply()).status for _ in range(64)] == [200] * 64
        crumbs = b"".join(chunk(BODY[n : n + 1]) for n in range(len(BODY)))
        assert (await client.ask(CHUNKED + chunk(b" ") * HEAD_LIMIT + crumbs + LAST_CHUNK)).status == 200


@pytest.mark.parametrize("begun", [b"0\r\nX-A: ", b"3;a="])
async def test_an_endless_trailer_or_chunk_extension_is_not_read_for_ever(begun: bytes) -> None:
    async with stage(STREAM, limits=Limits(head_bytes=HEAD_LIMIT)) as here, here.client() as client:
        client.send(CHUNKED + chunk(BODY) + begun)
        refusal = asyncio.create_task(refused(here, client, b"", 431))
        while not refusal.done():
            client.send(b"b" * 100)
            await asyncio.sleep(0.001)
        await refusal


async def test_a_body_declared_too_large_gets_413_before_it_is_sent() -> None:
    async with stage(STREAM, limits=Limits(body_bytes=1000)) as here, here.client() as client:
        error = await refused(here, client, post(b"x" * 1001)[:-1001], 413)
        assert error["message"] == "the request's body is larger than 1000 bytes"
        assert here.gateway.memory.used == 0


async def test_a_client_that_expects_continue_is_told_413_and_not_to_go_on() -> None:
    async with stage(STREAM, limits=Limits(body_bytes=1000)) as here, here.client() as client:
        await refused(here, client, post(b"x" * 1001, "Expect: 100-continue\r\n")[:-1001], 413)


async def test_a_chunked_body_gets_413_as_soon_as_it_passes_the_limit() -> None:
    async with stage(STREAM, limits=Limits(body_bytes=1000)) as here, here.client() as client:
        client.send(CHUNKED + chunk(b"x" * 500))
        await refused(here, client, chunk(b"x" * 501), 413)
        assert here.gateway.memory.used == 0


async def test_a_body_of_just_the_limit_passes() -> None:
    async with stage(STREAM, limits=Limits(body_bytes=len(BODY))) as here, here.client() as client:
        assert (await client.ask(post(BODY))).status == 200
        assert (await client.ask(CHUNKED + chunk(BODY) + LAST_CHUNK)).status == 200


UNSUPPORTED = {
    "CONNECT": (b"CONNECT gate:443 HTTP/1.1\r\nHost: gate\r\n\r\n", 501),
    "CONNECT to a path": (f"CONNECT {PATH} HTTP/1.1\r\nHost: gate\r\n\r\n".encode(), 501),
    "unknown method": (b"BREW /coffee HTTP/1.1\r\nHost: gate\r\n\r\n", 501),
    "method in lower case": (b"get / HTTP/1.1\r\nHost: gate\r\n\r\n", 501),
    "unknown expectation": (post(BODY, "Expect: 200-ok\r\n"), 417),
    "known and unknown expectation": (post(BODY, "Expect: 100-continue, 200-ok\r\n"), 417),
}


@pytest.mark.parametrize(("data", "status"), UNSUPPORTED.values(), ids=UNSUPPORTED)
async def test_what_is_not_supported_is_refused_even_where_every_path_passes(
    data: bytes, status: int
) -> None:
    async with stage(whole(), pass_unlisted=True) as here, here.client() as client:
        await refused(here, client, data, status)


@pytest.mark.parametrize(
    ("path", "method", "allowed"),
    [
        (PATH, "GET", "POST"),
        (PATH, "DELETE", "POST"),
        (PATH, "HEAD", "POST"),
        ("/v1/models", "POST", "GET, HEAD"),
    ],
)
async def test_a_method_that_the_path_does_not_take_gets_405(path: str, method: str, allowed: str) -> None:
    async with stage(STREAM) as here, here.client() as client:
        reply = await client.ask(get(path, method=method), method)
        assert (reply.status, reply.get("allow")) == (405, allowed)
        assert (await client.ask(get("/v1/models"))).status == 200
        assert here.received == 0


@pytest.mark.parametrize(
    "path", ["/pause", "/%70ause", "/sleep?level=1", "/v1/%6coad_lora_adapter", "/sleep/x"]
)
async def test_engine_administration_never_passes(path: str) -> None:
    async with stage(whole(), pass_unlisted=True) as here, here.client() as client:
        reply = await client.ask(post(b"{}", path=path))
        assert (reply.status, reply.error["type"]) == (403, "permission_error")
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


@pytest.mark.parametrize("path", ["/v1/models/../../pause", "/v1/models/%2e%2e/pause", "//pause", "/x/./y"])
async def test_a_path_that_others_may_read_otherwise_reaches_no_unit(path: str) -> None:
    async with stage(whole(), pass_unlisted=True) as here, here.client() as client:
        reply = await client.ask(get(path))
        assert (reply.status, reply.error["code"]) == (400, "bad_request")
        assert here.received == 0
