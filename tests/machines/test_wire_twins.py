"""What is read without the parser is what the parser reads: whatever comes, in whatever reads, from a client
or from a unit, a reader that may do without it and one that may not tell the same.

FUZZ_EXAMPLES=N tries N random examples instead of the same few every time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock, patch

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.config.settings import Limits
from cellgate.proxy.http.reply import ReplyHead, ReplyReader
from cellgate.proxy.http.request import Request, RequestReader
from tests.machines.test_wire_fuzz import REPLIES, fuzz
from tests.wire.noise import CUTS, DAMAGES, WORDS, Cuts, Damage, damaged
from tests.wire.unit import LAST_CHUNK, SSE_HEAD, chunk, whole

# Heads as real clients and proxies write them, and odd ones.

OPENAI_PYTHON = (
    b"Accept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\nAccept: application/json\r\n"
    b"Content-Type: application/json\r\nUser-Agent: OpenAI/Python 1.54.0\r\nX-Stainless-Lang: python\r\n"
    b"X-Stainless-Package-Version: 1.54.0\r\nX-Stainless-OS: Linux\r\nX-Stainless-Arch: x64\r\n"
    b"X-Stainless-Runtime: CPython\r\nX-Stainless-Runtime-Version: 3.11.7\r\n"
    b"Authorization: Bearer sk-0123456789\r\nX-Stainless-Async: false\r\nx-stainless-retry-count: 0\r\n"
)
OPENAI_NODE = (
    b"accept: application/json\r\ncontent-type: application/json\r\nuser-agent: OpenAI/JS 4.73.0\r\n"
    b"x-stainless-lang: js\r\nx-stainless-retry-count: 0\r\nauthorization: Bearer sk-0123456789\r\n"
    b"accept-encoding: gzip,deflate\r\nconnection: keep-alive\r\n"
)
CURL = b"User-Agent: curl/8.5.0\r\nAccept: */*\r\nContent-Type: application/json\r\n"
ENVOY = (
    b"user-agent: OpenAI/Python 1.54.0\r\ncontent-type: application/json\r\nx-forwarded-for: 10.0.0.1\r\n"
    b"x-forwarded-proto: https\r\nx-envoy-internal: true\r\nx-envoy-expected-rq-timeout-ms: 15000\r\n"
    b"x-request-id: 7d9f8a0c-2f3b-4c1e-9d7a-0123456789ab\r\n"
    b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n"
)
REQUEST_HEADS = [OPENAI_PYTHON, OPENAI_NODE, CURL, ENVOY]

NAMES = [
    *(
        b"Accept",
        b"X-A",
        b"x-a",
        b"X_A",
        b"a.b",
        b"X-A ",
        b" X-A",
        b"",
        b"\xffx",
        b"X-Session",
        b"Authorization",
    ),
    *(b"X-Request-Id", b"X-Forwarded-For", b"Accept-Encoding", b"Cookie", b"Keep-Alive", b"TE", b"Trailer"),
    *(b"Connection", b"Proxy-Connection", b"Upgrade", b"Expect", b"Host", b"Content-Length"),
    *(b"Transfer-Encoding", b"X-Cellgate-Unit", b"X-Cellgate-Explain", b"X-Cellgate-Resume"),
    *(b"Content-Type", b"Content-Encoding", b"Date", b"Server", b"Proxy-Authorization", b"HTTP2-Settings"),
]
VALUES = [
    *(
        b"a",
        b"",
        b"a b",
        b" a",
        b"a ",
        b"\ta",
        b"a\tb",
        b"a\0",
        b"a\x7f",
        b"\xe4",
        b"a\rb",
        b"a\nb",
        b"a\r\n b",
    ),
    *(b"keep-alive", b"Keep-Alive", b"close", b"upgrade", b"x-a", b"chunked", b"Chunked", b"gzip, chunked"),
    *(b"100-continue", b"websocket", b"0", b"2", b"02", b"+2", b"2, 2", b"1", b"on", b"identity"),
    *(b"text/event-stream", b"text/event-stream; charset=utf-8", b"x" * 300, b"x" * 2500),
]
ENDS = [b"\r\n", b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\r\r\n", b"\r\n\r\n"]
COLONS = [b": ", b": ", b": ", b": ", b":", b":  ", b" : ", b":\t", b" "]
EACH_ODD_LINE = [
    *(b"%b: %b\r\n" % (name, value) for name in NAMES for value in VALUES),
    *(name + colon + b"a" + end for name in NAMES[::4] for colon in COLONS[3:] for end in ENDS[3:]),
]
ODD_LINES = st.builds(lambda *parts: b"".join(parts), *map(st.sampled_from, (NAMES, COLONS, VALUES, ENDS)))
GOOD_LINES = st.sampled_from(
    [
        *(b"Accept: */*\r\n", b"X-A: b\r\n", b"Connection: keep-alive\r\n", b"X-Request-Id: 1\r\n"),
        *(b"X-Session: s\r\n", b"X-Session: t\r\n", b"Accept-Encoding: gzip\r\n", b"Date: now\r\n"),
    ]
)
LINES = GOOD_LINES | ODD_LINES
REPLY_LINES = (
    st.sampled_from(
        [
            *(
                b"Server: engine\r\n",
                b"date: Mon, 01 Jan 2024 00:00:00 GMT\r\n",
                b"Connection: keep-alive\r\n",
            ),
            *(b"Keep-Alive: timeout=5\r\n", b"x-request-id: 1\r\n", b"content-encoding: identity\r\n"),
        ]
    )
    | ODD_LINES
)
TARGETS = st.sampled_from(
    [
        *(b"POST /v1/chat/completions HTTP/1.1\r\n",) * 6,
        *(
            b"GET /v1/models HTTP/1.1\r\n",
            b"POST /v1/messages?beta=true HTTP/1.1\r\n",
            b"GET /a?b#c HTTP/1.1\r\n",
        ),
        *(b"GET /x HTTP/1.0\r\n", b"GET /x HTTP/1.2\r\n", b"HEAD /x HTTP/1.1\r\n", b"PUT /x HTTP/1.1\r\n"),
        *(b"GET http://a/x HTTP/1.1\r\n", b"CONNECT a:1 HTTP/1.1\r\n", b"GET //a/x HTTP/1.1\r\n"),
        *(
            b"GET /v1/realtime HTTP/1.1\r\n",
            b"GET  /x HTTP/1.1\r\n",
            b"GET /x\tHTTP/1.1\r\n",
            b"get /x HTTP/1.1\r\n",
        ),
        *(
            b"GET /x%00 HTTP/1.1\r\n",
            b"GET /x HTTP/1.1 \r\n",
            b"GET /x HTTP/1.1\n",
            b"\r\nGET /x HTTP/1.1\r\n",
        ),
        *(b"GET /\xe4 HTTP/1.1\r\n", b"GET * HTTP/1.1\r\n", b"OPTIONS * HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n"),
    ]
)

# Readers that tell what they read.

LIMITS = Limits(head_bytes=2000, body_bytes=10_000)
ROUTING = frozenset({b"x-session", b"authorization", b"x-request-id", b"host", b"accept-encoding"})


@contextmanager
def parser_only() -> Iterator[None]:
    """Nothing is read without the parser."""
    with (
        patch("cellgate.proxy.http.request.plain_request", lambda *_, **__: None),
        patch("cellgate.proxy.http.reply.ReplyReader._take_plain", lambda *_: None),
    ):
        yield


class Told(RequestReader):
    """Writes down what it reads."""

    def __init__(self) -> None:
        super().__init__(LIMITS, lambda: 7.0, ROUTING)
        self.log: list[object] = []
        self.queue: list[Request] = []

    def begun(self, request: Request) -> None:
        self.log.append("begun")

    def head_read(self, request: Request) -> None:
        self.log.append("head")

    def body_read(self, request: Request) -> None:
        self.log.append(request.body_size)

    def whole(self, request: Request) -> None:
        self.log.append(summary(request))
        self.queue.append(request)

    def at_once(self, request: Request) -> None:
        self.begun(request)
        self.head_read(request)
        self.whole(request)

    def upgrading(self) -> Request | None:
        last = self.queue[-1] if self.queue else None
        return last if last is not None and last.upgrades else None


def summary(request: Request) -> dict[str, object]:
    """All that was read of a request; but not in how many pieces its body came."""
    return {name: getattr(request, name) for name in Request.__slots__ if name != "pieces"}


def requests(reads: list[bytes]) -> list[object]:
    """What a reader tells of these reads."""
    reader = Told()
    for data in reads:
        if reader.failure is None:
            reader.log.append(reader.feed(data))
            while reader.unread and reader.failure is None:
                reader.resume_parsing()
            reader.log.append((reader.request is None, reader.in_head, reader.failure))
    return reader.log


BODIES = st.sampled_from(
    [b"", b"{}", b"x", b"a" * 1200, b"a" * 12_000, b"a" * 21_000, b'{"model":"m"}\r\n\r\n']
)
FRAMINGS = st.sampled_from(
    [
        lambda body: b"Content-Length: %d\r\n" % len(body),
        lambda body: b"content-length: %d\r\n" % len(body),
        lambda body: b"Content-Length: %d\r\n" % (len(body) + 1),
        lambda body: b"Content-Length: %d\r\n" % max(len(body) - 1, 0),
        lambda body: b"Content-Length: 0%d\r\n" % len(body),
        lambda body: b"Content-Length: +%d\r\n" % len(body),
        lambda body: b"Content-Length: %d\r\nContent-Length: %d\r\n" % (len(body), len(body)),
        lambda body: b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n" % len(body),
        lambda body: b"",
        lambda body: b"Transfer-Encoding: chunked\r\n",
    ]
)


@st.composite
def one_request(draw: st.DrawFn) -> bytes:
    """A request, mostly a good one."""
    body = draw(BODIES)
    framing = draw(FRAMINGS)(body)
    if framing == b"Transfer-Encoding: chunked\r\n":
        body = (chunk(body) if body else b"") + LAST_CHUNK
    lines = draw(st.sampled_from(REQUEST_HEADS) | st.lists(LINES, max_size=6).map(b"".join))
    host = draw(st.sampled_from([b"Host: a\r\n", b"host: a:80\r\n", b"", b"Host: a\r\nHost: a\r\n"]))
    parts = [host, lines, framing]
    return draw(TARGETS) + b"".join(draw(st.permutations(parts))) + b"\r\n" + body


@fuzz(300)
@given(
    st.lists(st.tuples(one_request(), st.one_of(st.just([]), DAMAGES)), min_size=1, max_size=4),
    st.none() | CUTS,
    st.sampled_from([b"", *WORDS]),
)
def test_requests_are_the_same_with_and_without_the_parser(
    sent: list[tuple[bytes, list[Damage]]], cuts: Cuts | None, more: bytes
) -> None:
    each = [damaged(request, damages) for request, damages in sent]
    reads = each if cuts is None else cuts.pieces(b"".join(each))
    reads = [data for data in [*reads, more] if data]
    with parser_only():
        expected = requests(reads)
    assert requests(reads) == expected


def test_each_head_of_a_real_client_is_read_without_the_parser_and_alike() -> None:
    for head in REQUEST_HEADS:
        for first in (b"POST /v1/chat/completions HTTP/1.1\r\n", b"POST /v1/messages?beta=true HTTP/1.1\r\n"):
            sent = [first + b"Host: a\r\n" + head + b"Content-Length: 2\r\n\r\n{}"] * 2
            with parser_only():
                expected = requests(sent)
            with patch("httptools.HttpRequestParser", None):
                assert requests(sent) == expected


GOOD = b"POST /x HTTP/1.1\r\nHost: a\r\nX-A: b\r\nContent-Length: 5\r\n\r\nhello"


def test_each_odd_line_in_a_good_request_is_read_alike_and_so_is_what_follows_it() -> None:
    for line in EACH_ODD_LINE:
        for sent in (
            b"POST /x HTTP/1.1\r\nHost: a\r\n" + line + b"Content-Length: 2\r\n\r\n{}",
            b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n" + line + b"\r\n{}",
            b"GET /x HTTP/1.1\r\n" + line + b"\r\n",
        ):
            with parser_only():
                expected = requests([sent, GOOD])
            assert requests([sent, GOOD]) == expected, sent


@pytest.mark.parametrize("line", [b"", b"Connection: close\r\n", b"Expect: 100-continue\r\n", b"X_A: b\r\n"])
@pytest.mark.parametrize("behind", [b"", b"\r\n", b"\r", b"G", b"GET /y HTTP/1.1\r\nHost: a\r\n\r\n"])
def test_requests_are_read_alike_wherever_they_are_cut_and_whatever_is_behind_them(
    line: bytes, behind: bytes
) -> None:
    for first in (GOOD.replace(b"X-A: b\r\n", line), GOOD.replace(b"Content-Length: 5", b"X-A: c")[:-5]):
        sent = first + behind
        for at in range(1, len(sent)):
            reads = [sent[:at], sent[at:], GOOD, GOOD]
            with parser_only():
                expected = requests(reads)
            assert requests(reads) == expected, reads


def test_a_body_that_is_too_large_is_refused_alike() -> None:
    for size in (LIMITS.body_bytes, LIMITS.body_bytes + 1):
        sent = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size + b"a" * size
        with parser_only():
            expected = requests([sent])
        assert requests([sent]) == expected


def test_the_parser_goes_once_a_body_has_ended_with_a_read_that_began_in_it() -> None:
    reads = [GOOD[:-3], GOOD[-3:], GOOD]
    with patch("httptools.HttpRequestParser", Mock(wraps=httptools.HttpRequestParser)) as made:
        requests(reads)
        requests([*reads, GOOD[:-3], GOOD[-3:]])
    assert made.call_count == 3


# Replies


def head_of(head: ReplyHead | None) -> dict[str, object] | None:
    return None if head is None else {name: getattr(head, name) for name in ReplyHead.__slots__}


def replied(exchanges: list[list[bytes]], *, to_head: bool, taken: bool) -> list[object]:
    """What a reader tells of replies, each of some reads; the next begins where one has ended."""
    reader, log = ReplyReader(), list[object]()
    for reads in exchanges:
        reader.expect(to_head=to_head)
        for data in reads:
            pieces = reader.feed(data)
            log.append((b"".join(pieces), reader.misbehaved))
            if reader.misbehaved:
                return log
            log += [getattr(reader, name) for name in ("begun", "has_head", "ended", "is_chunked")]
            log.append(head_of(reader.head))
            if reader.has_head:
                log += [reader.keep_alive, reader.length, reader.clean or not pieces]
            if reader.head is not None and taken:
                reader.head = None
            if reader.ended:
                break
        log.append(reader.is_ended_by_close())
        if not reader.ended or not reader.keep_alive:
            return log
    return log


MORE_REPLIES = [
    *(*REPLIES, whole(b"{}", "503 Busy"), b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
    SSE_HEAD + b"A\r\n0123456789\r\n" + b"0a;x=y\r\n0123456789\r\n" + chunk(b"x" * 300) + LAST_CHUNK,
    b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
]


@st.composite
def one_reply(draw: st.DrawFn) -> bytes:
    """A reply of the list, with more lines in its head, and damaged perhaps."""
    first, _, rest = draw(st.sampled_from(MORE_REPLIES)).partition(b"\r\n")
    lines = draw(st.just(b"") | st.lists(REPLY_LINES, max_size=4).map(b"".join))
    return damaged(first + b"\r\n" + lines + rest, draw(st.one_of(st.just([]), DAMAGES)))


@st.composite
def reads_of_a_reply(draw: st.DrawFn) -> list[bytes]:
    """As engines write it: its head, and each chunk by itself; or cut anywhere."""
    reply = draw(one_reply())
    if draw(st.booleans()):
        return draw(CUTS).pieces(reply)
    head, end, rest = reply.partition(b"\r\n\r\n")
    chunks = rest.replace(b"\n\n\r\n", b"\n\n\r\n\0").split(b"\0")
    return [data for data in (head + end, *chunks) if data]


@fuzz(350)
@given(st.lists(reads_of_a_reply(), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_replies_are_the_same_with_and_without_the_parser(
    exchanges: list[list[bytes]], to_head: bool, taken: bool
) -> None:
    with parser_only():
        expected = replied(exchanges, to_head=to_head, taken=taken)
    assert replied(exchanges, to_head=to_head, taken=taken) == expected


def test_each_odd_line_in_a_good_reply_is_read_alike() -> None:
    for line in EACH_ODD_LINE:
        until_close = b"HTTP/1.1 200 OK\r\n\r\n"
        for sent, to_head in (
            (SSE_HEAD, False),
            (whole(b"{}"), False),
            (until_close, False),
            (SSE_HEAD, True),
        ):
            first, _, rest = sent.partition(b"\r\n")
            reply = first + b"\r\n" + line + rest
            exchanges = [[reply, chunk(b"a"), chunk(b"b") + LAST_CHUNK], [whole(b"{}")]]
            with parser_only():
                expected = replied(exchanges, to_head=to_head, taken=True)
            assert replied(exchanges, to_head=to_head, taken=True) == expected, reply


def test_a_stream_is_read_alike_wherever_it_is_cut() -> None:
    token = chunk(b'data: {"id":1}\n\n')
    for stream in (token * 2 + LAST_CHUNK + b"\r\n", token + b"0\r\nX-A: b\r\n\r\n", token[:-1]):
        for at in range(len(stream)):
            for reads in ([SSE_HEAD + stream[:at], stream[at:]], [SSE_HEAD, stream[:at], stream[at:]]):
                exchanges = [[data for data in reads if data], [whole(b"{}")]]
                for taken in (False, True):
                    with parser_only():
                        expected = replied(exchanges, to_head=False, taken=taken)
                    assert replied(exchanges, to_head=False, taken=taken) == expected, reads


def test_a_usual_stream_and_a_usual_reply_need_no_parser() -> None:
    tokens = [chunk(b'data: {"id":%d}\n\n' % n) for n in range(5)]
    stream = [SSE_HEAD, tokens[0], tokens[1] + tokens[2], tokens[3], tokens[4] + LAST_CHUNK]
    with patch("httptools.HttpResponseParser", None):
        log = replied([stream, [whole(b"{}")], [b"".join(stream)]], to_head=False, taken=True)
    assert log
