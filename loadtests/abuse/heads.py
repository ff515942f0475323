"""Abuses by what stands in a head: lines, targets, lengths, protocols that are none of ours."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from loadtests.abuse.client import ask, ask_all, one
from loadtests.abuse.nouns import NO_ANSWER_POSSIBLE, Abuse, Got, Place
from loadtests.wire.messages import get, post

SMALL = b'{"model":"sim","messages":[{"role":"user","content":"Why?"}],"max_tokens":1}'
HEAD_BYTES = 60_000
"""Just below what a head may have."""
_UPGRADES = f"connection: {'a,' * 7600}\r\n" + "upgrade: b\r\n" * 2700
_PATHS = (
    "/v1/models/%00",
    "/v1/models/../../pause",
    "/v1/models/..%2f..%2fpause",
    "/v1/models/%2e%2e/%2e%2e/pause",
    "/v1/models/..\\..\\pause",
    "/v1/models/./../../sleep",
    "//pause",
    "/./pause",
    "/%70ause",
    "/v1/../pause",
    "/pause;a=b",
    "/v1/models/a%0d%0ax: y",
)


async def upgrade_lines(place: Place) -> Got:
    """60 kB of names that each ask for each."""
    return await one(ask(place.gate.port, get("/health", _UPGRADES)))


async def upgrade_lines_admin(place: Place) -> Got:
    """The same at the admin port, where everyone may ask for this."""
    return await one(ask(place.gate.admin_port, get("/metrics", _UPGRADES)))


async def short_lines(place: Place) -> Got:
    """As many lines as fit, on a path that goes to a unit."""
    lines = "a: b\r\n" * (HEAD_BYTES // 6)
    return await ask_all(place.gate.port, [post(SMALL, lines=lines)] * 4, at_once=4)


async def long_line(place: Place) -> Got:
    """One line as long as fits, in those that are read: names, credentials, deadlines."""
    names = ["x-request-id", "authorization", "x-session-id", "x-priority", "x-slo-ttft-ms", "traceparent"]
    names += ["x-forwarded-for", "cookie", "content-type", "accept-encoding", "keep-alive", "te"]
    each = [post(SMALL, lines=f"{name}: {'9' * HEAD_BYTES}\r\n") for name in names]
    return await ask_all(place.gate.port, each, at_once=2)


async def absurd_deadlines(place: Place) -> Got:
    """Numbers that are none, or no time."""
    values = ("nan", "inf", "-1", "0", "1e-300", "1e308", "1_0", "٣", "0x10", "1e999", "", " ")
    names = (
        "x-slo-ttft-ms",
        "x-envoy-expected-rq-timeout-ms",
        "x-priority",
        "x-gateway-inference-fairness-id",
    )
    each = []
    for name in names:
        for value in values:
            line = f"{name}: ".encode() + value.encode() + b"\r\n"
            each.append(post(SMALL).replace(b"content-type", line + b"content-type", 1))
    return await ask_all(place.gate.port, each)


async def long_target(place: Place) -> Got:
    """A path of 100 kB."""
    return await one(ask(place.gate.port, get("/v1/models/" + "a" * 100_000)))


async def many_parameters(place: Place) -> Got:
    """10,000 parameters in a query."""
    query = "&".join(f"a{n}=b" for n in range(7000))
    return await ask_all(place.gate.port, [get(f"/v1/models?{query}"), get(f"/v1/models/sim?{query}")])


async def dot_paths(place: Place) -> Got:
    """Ways to spell the path of an engine's administration."""
    before = place.evil.targets.copy()
    got: Got = Counter()
    for path in _PATHS:
        for _ in range(4):
            got[await ask(place.gate.port, get(path))] += 1
    passed = [target for target in place.evil.targets - before if b"pause" in target or b"sleep" in target]
    got.update(f"reached a unit: {target.decode('latin-1')}" for target in passed)
    return got


async def request_line_only(place: Place) -> Got:
    """A request line of HTTP/0.9, and one of HTTP/3.0."""
    each = [b"GET /\r\n\r\n", b"GET / HTTP/3.0\r\nhost: a\r\n\r\n", b"GET  /  HTTP/1.1\r\nhost: a\r\n\r\n"]
    return await ask_all(place.gate.port, each)


async def other_protocols(place: Place) -> Got:
    """HTTP/2's preface, a websocket, CONNECT, an absolute target, an asterisk, SMTP, a proxy's PROXY line."""
    socket_lines = (
        "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: a\r\nsec-websocket-version: 13\r\n"
    )
    each = [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
        b"GET /v1/models RTSP/1.0\r\nhost: a\r\n\r\n",
        b"SOURCE / ICE/1.0\r\nhost: a\r\n\r\n",
        b"GET http://x?/v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
        get("/v1/realtime", socket_lines),
        get("/v1/models", "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: a\r\n"),
        b"CONNECT 10.0.0.1:443 HTTP/1.1\r\nhost: 10.0.0.1:443\r\n\r\n",
        get("http://169.254.169.254/latest/meta-data"),
        b"OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n",
        b"TRACE /v1/models HTTP/1.1\r\nhost: a\r\n\r\n",
        b"EHLO me\r\n\r\n",
        b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n" + get("/v1/models"),
    ]
    return await ask_all(place.gate.port, each, at_once=4)


async def tls_hello(place: Place) -> Got:
    """Whoever speaks TLS to a port that does not."""
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.Random(1).randbytes(500)
    return await ask_all(place.gate.port, [hello] * 200)


async def random_bytes(place: Place) -> Got:
    """A megabyte of noise, a few times."""
    rng = random.Random(2)
    return await ask_all(place.gate.port, [b"\xff" + rng.randbytes(1 << 20) for _ in range(8)])


async def empty_lines(place: Place) -> Got:
    """Four megabytes of empty lines before a request, as parsers allow."""
    return await one(ask(place.gate.port, b"\r\n" * (2 << 20) + get("/v1/models")))


async def two_lengths(place: Place) -> Got:
    """Requests that two readers would part in two ways."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n"
    each = [
        head + b"content-length: 4\r\ncontent-length: 5\r\n\r\nabcde",
        head + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        head + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        head + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        head + b"content-length: +4\r\n\r\nabcd",
        head + b"content-length: 99999999999999999999999\r\n\r\nabcd",
        head + b"content-length : 4\r\n\r\nabcd",
        head + b"host: b\r\ncontent-length: 0\r\n\r\n",
        head + b" folded: a\r\n\r\n",
    ]
    return await ask_all(place.gate.port, each, at_once=3)


async def pipelined_gets(place: Place) -> Got:
    """A megabyte of requests in one write; the answers are read."""
    request = get("/x")
    count = (1 << 20) // len(request)
    reader, writer = await asyncio.open_connection("127.0.0.1", place.gate.port)
    writer.write(request * count)
    answers = bytearray()
    try:
        # Whoever parses each answer would be slower than the gate.
        while data := await asyncio.wait_for(reader.read(1 << 20), 1.0):
            answers += data
    except (TimeoutError, ConnectionResetError):
        pass
    writer.close()
    whole = answers.count(b"HTTP/1.1 404")
    return +Counter({"404": whole, "closed": count - whole})


HEADS = [
    Abuse("upgrade-lines", "60 kB of Connection names and Upgrade lines", upgrade_lines),
    Abuse("upgrade-lines-admin", "the same at the admin port", upgrade_lines_admin),
    Abuse("short-lines", "10,000 short header lines on a request to a unit", short_lines),
    Abuse("long-line", "60 kB in the lines that are read", long_line),
    Abuse("absurd-deadlines", "deadlines, priorities and tenants that make no sense", absurd_deadlines),
    Abuse("long-target", "a path of 100 kB", long_target),
    Abuse("many-parameters", "7,000 parameters in a query", many_parameters),
    Abuse("dot-paths", "%00, dots and slashes in paths of engine administration", dot_paths),
    Abuse("old-and-new-http", "HTTP/0.9 and HTTP/3.0", request_line_only, answers=NO_ANSWER_POSSIBLE),
    Abuse("other-protocols", "HTTP/2, websockets, CONNECT, TRACE, SMTP, PROXY", other_protocols),
    Abuse("tls-hello", "TLS to a port without", tls_hello, requests=200),
    Abuse("random-bytes", "megabytes of noise", random_bytes, megabytes=8),
    Abuse("empty-lines", "4 MB of empty lines before a request", empty_lines),
    Abuse("two-lengths", "requests that can be read in two ways", two_lengths),
    Abuse("pipelined-gets", "1 MB of pipelined requests in one write", pipelined_gets, requests=29_000),
]
