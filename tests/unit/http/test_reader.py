"""Requests out of bytes: the same ones wherever the network cuts them, and nothing after a failure."""

from __future__ import annotations

from typing import Any

import httptools
import pytest

from cellgate.proxy.config.settings import Limits
from cellgate.proxy.http.errors import FailureKind
from cellgate.proxy.http.request import Request, RequestReader
from tests.wire.unit import LAST_CHUNK, chunk

LIMITS = Limits(head_bytes=500, body_bytes=100)
GET = b"GET /v1/models?a=b HTTP/1.1\r\nHost: a\r\nX-Request-Id: 1\r\nX-A:  b\r\n\r\n"
POST = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\nabc"
CHUNKED = (
    b"POST /v1/y HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    + chunk(b"ab")
    + chunk(b"c")
    + b"0\r\nX-T: u\r\n\r\n"
)
OLD = b"GET / HTTP/1.0\r\n\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n\r\n"
UPGRADES = [data.replace(b"\r\n\r\n", b"\r\n" + H2C, 1) for data in (GET, POST, CHUNKED)]
CLOSES = POST.replace(b"\r\n\r\n", b"\r\n" + H2C.replace(b"Upgrade,", b"Upgrade, close,"), 1)


class Told:
    """Writes down what the reader tells."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.requests: list[Request] = []

    def begun(self, request: Request) -> None:
        self.log.append("begun")

    def head_read(self, request: Request) -> None:
        self.log.append("head")

    def body_read(self, request: Request) -> None:
        if self.log[-1] != "body":
            self.log.append("body")

    def whole(self, request: Request) -> None:
        self.log.append("whole")
        self.requests.append(request)

    def at_once(self, request: Request) -> None:
        self.begun(request)
        self.head_read(request)
        self.whole(request)

    def upgrading(self) -> Request | None:
        return None


def read(*reads: bytes) -> tuple[Told, RequestReader]:
    """What a reader has told of these reads, up to its failure."""
    told = Told()
    reader = RequestReader(told, LIMITS, lambda: 7.0)
    for data in reads:
        if data and reader.failure is None:
            assert reader.feed(data) is reader.failure
    return told, reader


def summary(request: Request) -> tuple[object, ...]:
    """All that was read of a request."""
    kept = (request.method, request.target, request.path, request.body, request.length, request.given_id)
    flags = (request.http10, request.keep_alive, request.expects_continue, request.body_size)
    return (*kept, *flags, request.lines, request.fields)


def test_a_request_is_read() -> None:
    told, reader = read(GET)
    (request,) = told.requests
    assert told.log == ["begun", "head", "whole"]
    assert (request.method, request.path, request.target) == (b"GET", b"/v1/models", b"/v1/models?a=b")
    assert (request.given_id, request.received_at, request.lines) == (b"1", 7.0, [b"x-a: b\r\n"])
    assert (reader.request, reader.in_head, reader.failure) == (None, False, None)


@pytest.mark.parametrize(
    "data",
    [
        *(GET, POST, CHUNKED, OLD, GET + POST + CHUNKED + GET, *UPGRADES, CLOSES),
        b"".join(UPGRADES) + GET + UPGRADES[0],
    ],
)
def test_requests_are_the_same_wherever_they_are_cut_in_two(data: bytes) -> None:
    whole = [summary(request) for request in read(data)[0].requests]
    assert whole
    for at in range(len(data)):
        told, reader = read(data[:at], data[at:])
        assert [summary(request) for request in told.requests] == whole
        assert reader.failure is None
    told, reader = read(*(data[at : at + 1] for at in range(len(data))))
    assert [summary(request) for request in told.requests] == whole
    assert reader.failure is None


@pytest.mark.parametrize(("data", "asked"), [(UPGRADES[0], GET), (UPGRADES[1], POST), (UPGRADES[2], CHUNKED)])
def test_a_request_is_the_same_without_an_upgrade_that_is_ignored(data: bytes, asked: bytes) -> None:
    (upgrading,), (plain,) = read(data)[0].requests, read(asked)[0].requests
    assert upgrading.lines == plain.lines
    assert [field for field in upgrading.fields if field not in plain.fields] == [
        (b"connection", b"Upgrade, HTTP2-Settings"),
        (b"upgrade", b"h2c"),
    ]
    assert summary(upgrading)[:-2] == summary(plain)[:-2]


def test_no_parser_reads_a_large_body_behind_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    fed, told, body = list[int](), Told(), b" RTSP/ \r\n\r\n" * 4000

    class Counting(httptools.HttpRequestParser):
        def feed_data(self, data: Any) -> None:
            fed.append(len(data))
            super().feed_data(data)

    monkeypatch.setattr(httptools, "HttpRequestParser", Counting)
    reader = RequestReader(told, Limits(), lambda: 7.0)
    head = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    reader.feed(head + body + GET)
    while reader.unread:
        reader.go_on()
    assert [request.body for request in told.requests] == [body, b""]
    assert fed == [len(head), len(GET)]


def test_many_upgrades_in_one_read_are_as_many_requests() -> None:
    assert len(read(UPGRADES[0] * 100)[0].requests) == 100


def test_the_phases_of_a_body_are_told() -> None:
    assert read(POST)[0].log == ["begun", "head", "whole"]
    assert read(POST[:-1], POST[-1:])[0].log == ["begun", "head", "body", "whole"]
    assert read(CHUNKED[:-5], CHUNKED[-5:])[0].log == ["begun", "head", "body", "whole"]
    told, reader = read(POST[:-1])
    assert (told.log, reader.in_head) == (["begun", "head", "body"], False)
    assert reader.request is not None
    assert reader.request.body_size == 2


FAILURES = {
    "malformed": (b"GET / HTTP/1.1\r\nHost a\r\n\r\n", FailureKind.BAD_REQUEST),
    "no method": (b"\x16\x03\x01", FailureKind.BAD_REQUEST),
    "malformed target": (b"GET /\xff HTTP/1.1\r\n", FailureKind.BAD_REQUEST),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", FailureKind.BAD_REQUEST),
    "head too large": (GET[:-2] + b"X-B: " + b"b" * 500 + b"\r\n\r\n", FailureKind.HEAD_TOO_LARGE),
    "head too large and unfinished": (GET[:-2] + b"X-B: " + b"b" * 500, FailureKind.HEAD_TOO_LARGE),
    "length too large": (POST.replace(b": 3", b": 101"), FailureKind.BODY_TOO_LARGE),
    "chunks too large": (CHUNKED[: -len(LAST_CHUNK) - 8] + chunk(b"x" * 98), FailureKind.BODY_TOO_LARGE),
    "bad chunk": (CHUNKED.replace(b"\r\n1\r\n", b"\r\nx\r\n"), FailureKind.BAD_REQUEST),
}


@pytest.mark.parametrize(("data", "kind"), FAILURES.values(), ids=FAILURES)
def test_a_failure_ends_the_reading_and_spares_what_came_before(data: bytes, kind: FailureKind) -> None:
    told, reader = read(POST + data + POST)
    assert reader.failure is not None
    assert reader.failure.kind is kind
    assert len(told.requests) == 1
    forgotten = reader.forget()
    assert (reader.request, reader.in_head) == (None, False)
    assert forgotten is None or forgotten is not told.requests[0]


def test_an_unknown_method_is_told_from_garbage_where_its_beginning_is_known() -> None:
    brew = b"BREW / HTTP/1.1\r\n"
    for reads, kind in (
        ([brew], FailureKind.METHOD_NOT_SUPPORTED),
        ([POST, brew], FailureKind.METHOD_NOT_SUPPORTED),
        ([POST + brew], FailureKind.BAD_REQUEST),
        ([b"brew\r\n"], FailureKind.BAD_REQUEST),
    ):
        failure = read(*reads)[1].failure
        assert failure is not None
        assert failure.kind is kind


def test_a_defect_of_our_own_is_not_told_as_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Told, "whole", None)
    with pytest.raises(TypeError):
        read(GET)


@pytest.mark.parametrize("first", [b"GET /v1/models RTSP/1.0", b"OPTIONS * RTSP/1.1", b"SOURCE / ICE/1.0"])
def test_another_protocol_is_none_wherever_its_name_is_cut(first: bytes) -> None:
    data = GET + first + b"\r\nHost: a\r\n\r\n"
    for at in range(len(GET), len(data)):
        told, reader = read(data[:at], data[at:])
        assert reader.failure is not None
        assert (reader.failure.kind, len(told.requests)) == (FailureKind.BAD_REQUEST, 1)
    told, reader = read(*(data[at : at + 1] for at in range(len(data))))
    assert reader.failure is not None
    assert len(told.requests) == 1


def test_the_name_of_another_protocol_may_stand_anywhere_else() -> None:
    head = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nX-A: GET / RTSP/1.0\r\nContent-Length: 21\r\n\r\n"
    data = head + b'{"a":\n "x RTSP/1.0" }'
    for at in range(len(data)):
        told, reader = read(data[:at], data[at:])
        assert (len(told.requests), reader.failure) == (1, None), data[:at]


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://a/v1/models", b"/v1/models"),
        (b"HTTPS://a.b-c:8000/v1/models?x=y", b"/v1/models"),
        (b"http://[::1]:80/v1/models", b"/v1/models"),
        (b"http://a", b"/"),
    ],
)
def test_a_target_with_its_authority_names_the_path_behind_it(target: bytes, path: bytes) -> None:
    told, _ = read(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % target)
    assert [request.path for request in told.requests] == [path]
