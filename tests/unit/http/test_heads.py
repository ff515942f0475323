"""What crosses the gate in heads, and the failure table: complete, and true to its rules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from cellgate.proxy.config.settings import Limits
from cellgate.proxy.http.errors import TABLE, Failure, FailureKind, Fault, error_body, error_event
from cellgate.proxy.http.heads import (
    REPLY_FIELDS,
    REQUEST_FIELDS,
    Fields,
    client_head,
    connection_tokens,
    crossing,
    head_size,
    is_request_id,
    own_response,
)
from cellgate.proxy.http.request import _USUAL_FIELDS, Request, check_head
from cellgate.proxy.request.unit_head import head_for_unit
from cellgate.router.nouns import Strength
from tests.wire.client import get, post
from tests.wire.door import Door
from tests.wire.replies import replies
from tests.wire.unit import chunk

# RFC 9110, 7.6.1, and what is hop-by-hop by custom.
HOP_BY_HOP = (
    b"connection keep-alive proxy-authorization proxy-connection te trailer transfer-encoding upgrade"
)
FOR_THE_UNIT = {b"traceparent", b"authorization", b"content-type", b"user-agent", b"cookie"}


def test_no_field_that_is_for_the_next_hop_only_crosses_and_those_for_the_unit_do() -> None:
    assert {*HOP_BY_HOP.split(), b"content-length", b"x-request-id"} <= REQUEST_FIELDS & REPLY_FIELDS
    assert not REQUEST_FIELDS & FOR_THE_UNIT


def test_what_connection_names_does_not_cross() -> None:
    lines = [b"x-a: 1\r\n", b"x-ab: 2\r\n", b"x-b: 3\r\n", b"x-a: 4\r\n"]
    assert crossing(lines, []) == lines
    assert crossing(lines, [(b"connection", b"close")]) == lines
    assert crossing(lines, [(b"connection", b"keep-alive, X-A ,,")]) == [b"x-ab: 2\r\n", b"x-b: 3\r\n"]
    both: Fields = [(b"connection", b"x-a"), (b"connection", b"x-ab, x-b")]
    assert crossing(lines, both) == []


def test_tokens_of_all_connection_fields_count() -> None:
    fields = [(b"connection", b"Close, X-A"), (b"host", b"x"), (b"connection", b" upgrade ")]
    assert connection_tokens(fields) == {b"close", b"x-a", b"upgrade"}
    assert connection_tokens([]) == set()


def test_harmless_request_ids_are_kept_and_no_others() -> None:
    for value in (b"a", b"req-1_2.3:4=5+6/7@8", b"x" * 128):
        assert is_request_id(value)
    for value in (b"", b"x" * 129, b"a b", b'a"b', b"a\nb", b"\xe4", b"a,b", b"<a>", b"a\x7f"):
        assert not is_request_id(value)


def head_at_unit(
    fields: Fields, *, method: bytes = b"GET", own: bytes = b"", secure: bool = False, length: int = 0
) -> bytes:
    asked = Request(0.0, [b"a: b\r\n"], fields, [], (method, b"/x", b"/x"))
    client: Any = SimpleNamespace(peer="192.0.2.9", secure=secure)
    response: Any = SimpleNamespace(observers=(), request_id=b"1")
    return head_for_unit(asked, client, response, own, b"/y", length)


@pytest.mark.parametrize(
    ("method", "length", "told"),
    [
        (b"GET", 0, b""),
        (b"GET", 3, b"content-length: 3\r\n"),
        (b"POST", 0, b"content-length: 0\r\n"),
        (b"PUT", 0, b"content-length: 0\r\n"),
        (b"PATCH", 0, b"content-length: 0\r\n"),
    ],
)
def test_the_length_of_a_body_is_told_where_there_can_be_one(method: bytes, length: int, told: bytes) -> None:
    assert head_at_unit([], method=method, own=b"c: d\r\n", length=length) == (
        method + b" /y HTTP/1.1\r\na: b\r\nc: d\r\nx-forwarded-for: 192.0.2.9\r\nx-forwarded-proto: http\r\n"
        b"x-forwarded-host: \r\nx-request-id: 1\r\n" + told + b"\r\n"
    )


def test_no_client_says_a_line_of_the_gates_own_beside_it_and_what_is_usual_is_not_passed_on() -> None:
    """A unit would get the line twice, and could not tell who says it."""
    own = {line.partition(b":")[0] for line in head_at_unit([], length=1).splitlines()[1:] if line}
    assert own - {b"a"} <= REQUEST_FIELDS
    assert _USUAL_FIELDS <= REQUEST_FIELDS


def test_the_peer_is_appended_to_the_chain_of_forwarders() -> None:
    host = (b"host", b"api.example")
    first, second = (b"x-forwarded-for", b"192.0.2.1"), (b"x-forwarded-for", b"192.0.2.2")
    assert (
        b"\r\nx-forwarded-for: 192.0.2.1, 192.0.2.2, 192.0.2.9\r\n"
        b"x-forwarded-proto: https\r\nx-forwarded-host: api.example\r\n"
    ) in head_at_unit([host, first, second], secure=True)
    assert (
        b"\r\nx-forwarded-for: 192.0.2.9\r\nx-forwarded-proto: http\r\nx-forwarded-host: api.example\r\n"
    ) in head_at_unit([host])
    # What a proxy before us saw is kept.
    seen = [(b"x-forwarded-proto", b"https"), (b"x-forwarded-host", b"first.example"), host]
    assert (
        b"x-forwarded-for: 192.0.2.9\r\nx-forwarded-proto: https\r\nx-forwarded-host: first.example\r\n"
    ) in head_at_unit(seen)


def test_heads_and_responses_for_clients() -> None:
    assert client_head(200, [b"a: b\r\n"], own=b"c: d\r\n", close=False) == (
        b"HTTP/1.1 200 OK\r\na: b\r\nc: d\r\n\r\n"
    )
    assert client_head(299, [], own=b"", close=True) == b"HTTP/1.1 299 \r\nconnection: close\r\n\r\n"
    assert own_response(404, b"{}", own=b"a: b\r\n", close=False) == (
        b"HTTP/1.1 404 Not Found\r\na: b\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    )
    assert head_size([b"a: b\r\n"], [(b"c", b"d")]) == 12


def request(method: bytes, target: bytes, fields: Fields) -> Request:
    made = Request(0.0, [], [], [])
    made.method, made.target, made.fields = method, target, fields
    return made


HOST = (b"host", b"gate")


def test_a_good_head_is_read() -> None:
    fields = [HOST, (b"content-length", b"7 "), (b"expect", b"100-Continue"), (b"x-request-id", b"a1 ")]
    made = request(b"POST", b"/v1/x?a=b?c", fields)
    assert check_head(made, "1.1") is None
    assert (made.path, made.length, made.expects_continue) == (b"/v1/x", 7, True)
    assert (made.given_id, made.http10) == (b"a1", False)


def test_an_absolute_target_is_taken_for_its_path() -> None:
    for target, expected in {
        b"http://other/v1/models?x=1": b"/v1/models?x=1",
        b"HTTPS://a.b-c:8000/v1/models": b"/v1/models",
        b"http://[::1]:80/v1/models": b"/v1/models",
        b"HTTPS://other": b"/",
        b"/a://b": b"/a://b",
    }.items():
        made = request(b"GET", target, [HOST])
        assert check_head(made, "1.1") is None
        assert made.target == expected


def test_http_1_0_needs_no_host_and_gets_no_100() -> None:
    made = request(b"POST", b"/", [(b"expect", b"100-continue")])
    assert check_head(made, "1.0") is None
    assert (made.http10, made.expects_continue) == (True, False)


# What is refused of a request, whole, byte by byte, and behind another one.

PATH = "/v1/chat/completions"
START = f"POST {PATH} HTTP/1.1\r\nHost: gate\r\n".encode()
CHUNKED = START + b"Transfer-Encoding: chunked\r\n\r\n"
GOOD = b"GET /v1/models HTTP/1.1\r\nHost: gate\r\n\r\n"


def head(*lines: str, first: str = f"POST {PATH} HTTP/1.1", host: str = "Host: gate\r\n") -> bytes:
    """A head with whatever lines, and a body of three bytes that must not become a request."""
    fields = "".join(line + "\r\n" for line in lines)
    return f"{first}\r\n{host}{fields}\r\nabc".encode("latin-1")


LENGTHS = ["+3", "3,3", "0x3", "-1", "3.0", "18446744073709551616", "", "3 3", "\xb3"]
CODINGS = [
    *("identity", "gzip, chunked", "chunked, identity", "xchunked", ",chunked", '"chunked"', ""),
    *("\x0bchunked", "chunked\r\nTransfer-Encoding: chunked"),
]
VERSIONS = ["HTTP/0.9", "HTTP/2.0", "HTTP/1.2", "HTTQ/1.1", "RTSP/1.0", "SIP/2.0", "HTTPS/1.1", "http/1.1"]
TARGETS = [
    *("/a b", "/\x01", "/\xe4", f"{PATH}#a", "gate", "ftp://gate/", "gate:80", "*"),
    # In an authority, or in its place.
    *(f"http://gate{end}" for end in ("?/v1", "#/v1", "\\x/v1", "%2f/v1", ":1x/v1")),
    *("http:///v1/models", "http://a@gate/v1/models"),
]
LINES = [
    # Folded lines, NUL, and line ends that are none.
    *("X-A: b\r\n c", "X-A: b\r\n\tc", "X-A: b\0c", "X\0A: b", "X-A: b\rX-B: c", "X-A: b\nX-B: c"),
    *("Content-Length : 3", " Content-Length: 3", "Content Length: 3", ": 3", "Content-Length 3"),
    # Two lengths, or a length and a coding.
    *(f"Content-Length: 3\r\n{second}" for second in ("Content-Length: 3", "Content-Length: 4")),
    "Content-Length: 3\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: chunked\r\nContent-Length: 3",
    *("Host: other\r\nContent-Length: 3", "Host: gate\r\nContent-Length: 3"),
]
BODIES = [
    *(b"%b\r\nabc\r\n0\r\n\r\n" % size for size in (b"+3", b"-1", b"0x3", b"", b"3 ", b"3;\0")),
    *(b"zz\r\n", b"f" * 17 + b"\r\nabc", b"3\nabc\r\n0\r\n\r\n", b"3\r\nabcd\r\n0\r\n\r\n"),
    *(b"3\r\nabc\n0\r\n\r\n", b"3\r\nabc0\r\n\r\n", b"3;a=b\nabc\r\n0\r\n\r\n"),
    b"3\r\nabc\r\n0\r\nContent-Length: 5\r\n\r\n",
    b"3\r\nabc\r\n0\r\nX-A: b\r\n c\r\n\r\n",
]
MALFORMED = [
    *(head(f"Content-Length: {length}") for length in LENGTHS),
    *(head(f"Transfer-Encoding: {coding}") for coding in CODINGS),
    *(head(first=f"GET {PATH} {version}") for version in VERSIONS),
    *(head(first=f"GET {target} HTTP/1.1") for target in TARGETS),
    *map(head, LINES),
    *(CHUNKED + body for body in BODIES),
    head("Transfer-Encoding: chunked", first=f"POST {PATH} HTTP/1.0"),
    head("Content-Length: 3", host=""),
    head("Content-Length: 3").replace(b"\r", b""),
    START + b"\n",
    # First lines of other kinds.
    *(
        head(first=first)
        for first in (f"GET   {PATH}   RTSP/1.1", "OPTIONS * RTSP/1.0", "OPTIONS * HTTP/1.1")
    ),
    head(first=f"SOURCE {PATH} ICE/1.0"),
    *(f"GET {PATH}\r\n\r\n".encode(), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
]


HEAD_LIMIT = 2048
HEADS_TOO_LARGE = {
    "long value": get("/v1/models", f"X-A: {'b' * HEAD_LIMIT}\r\n"),
    "long name": get("/v1/models", f"{'X' * HEAD_LIMIT}: b\r\n"),
    "long target": get("/v1/models?" + "b" * HEAD_LIMIT),
    "many fields": get("/v1/models", "".join(f"X-{n}: {'b' * 32}\r\n" for n in range(HEAD_LIMIT // 32))),
    "endless": get("/v1/models", f"X-A: {'b' * HEAD_LIMIT}")[:-4],
    "endless method": b"POST" + b" " * HEAD_LIMIT,
    "endless trailer": CHUNKED + chunk(b"{}") + b"0\r\nX-A: " + b"b" * 5 * HEAD_LIMIT,
    "endless chunk extension": CHUNKED + chunk(b"{}") + b"3;a=" + b"b" * 5 * HEAD_LIMIT,
}

BODIES_TOO_LARGE = {
    "declared": post(b"x" * 3001)[:-3001],
    "declared, and to be asked for": post(b"x" * 3001, "Expect: 100-continue\r\n")[:-3001],
    "in chunks": CHUNKED + chunk(b"x" * 1500) + chunk(b"x" * 1501),
}
UNSUPPORTED = {
    "CONNECT": (b"CONNECT gate:443 HTTP/1.1\r\nHost: gate\r\n\r\n", 501),
    "CONNECT to a path": (f"CONNECT {PATH} HTTP/1.1\r\nHost: gate\r\n\r\n".encode(), 501),
    "unknown method": (b"BREW /coffee HTTP/1.1\r\nHost: gate\r\n\r\n", 501),
    "method in lower case": (b"get / HTTP/1.1\r\nHost: gate\r\n\r\n", 501),
    "unknown expectation": (post(b"{}", "Expect: 200-ok\r\n"), 417),
    "known and unknown expectation": (post(b"{}", "Expect: 100-continue, 200-ok\r\n"), 417),
}

REFUSED = (
    {repr(data): (data, 400) for data in MALFORMED}
    | {name: (data, 431) for name, data in HEADS_TOO_LARGE.items()}
    | {name: (data, 413) for name, data in BODIES_TOO_LARGE.items()}
    | UNSUPPORTED
)


@pytest.mark.parametrize(("data", "status"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_request_of_http_1_1_is_refused_however_it_arrives(data: bytes, status: int) -> None:
    limits, step = Limits(head_bytes=HEAD_LIMIT, body_bytes=3000), 1 + len(data) // 500
    for pieces in ([data], [data[at : at + step] for at in range(0, len(data), step)]):
        door = Door(limits)
        door.feed(pieces)
        (reply,) = replies(door.wire.written, ["POST"])
        assert reply.status == status or (reply.status, status, len(pieces) > 1) == (400, 501, True)
        assert (reply.get("connection"), door.wire.closed) == ("close", True)
        assert (reply.error["type"], reply.interim) == ("invalid_request_error", [])
        assert (door.requests, door.memory.used) == ([], 0)
    if status == 400:
        door = Door(limits)
        door.feed([GOOD + data])
        assert [reply.status for reply in replies(door.wire.written, ["GET"] * 2)] == [200, 400]


@pytest.mark.parametrize("named", [[], [(b"connection", b"a, Upgrade")]])
def test_an_upgrade_that_is_not_supported_is_ignored(named: Fields) -> None:
    assert check_head(request(b"GET", b"/", [HOST, *named, (b"upgrade", b"x")]), "1.1") is None


# The failure table: complete, and true to its rules.


# The table of bad input, as it stands in the documentation.
STATUSES = {
    FailureKind.BAD_REQUEST: 400,
    FailureKind.BAD_JSON: 400,
    FailureKind.DENIED: 403,
    FailureKind.UNKNOWN_PATH: 404,
    FailureKind.UNKNOWN_MODEL: 404,
    FailureKind.METHOD_NOT_ALLOWED: 405,
    FailureKind.METHOD_NOT_SUPPORTED: 501,
    FailureKind.HEAD_TIMEOUT: 408,
    FailureKind.BODY_TIMEOUT: 408,
    FailureKind.BODY_TOO_LARGE: 413,
    FailureKind.BAD_EXPECTATION: 417,
    FailureKind.HEAD_TOO_LARGE: 431,
    FailureKind.FULL: 429,
    FailureKind.NO_UNIT: 503,
    FailureKind.NO_MEMORY: 503,
    FailureKind.GARBAGE: 502,
    FailureKind.CLOSED_EARLY: 502,
    FailureKind.TRUNCATED: 502,
}


READ = {
    FailureKind.BAD_JSON,
    FailureKind.BAD_HEADER,
    FailureKind.GUARDRAIL_DENIED,
    FailureKind.GUARDRAIL_TOO_LARGE,
}
UNREAD = (400, 408, 413, 417, 431, 501)


def test_every_kind_has_a_row_and_its_status() -> None:
    assert set(TABLE) == set(FailureKind)
    assert {kind: kind.row.status for kind in STATUSES} == STATUSES


@pytest.mark.parametrize("kind", FailureKind, ids=lambda kind: kind.value)
def test_a_row_is_true_to_its_rules(kind: FailureKind) -> None:
    row = kind.row
    # Only units are held to account.
    assert row.fault is Fault.UNIT or row.strength is None
    assert row.strength is not Strength.FATAL or kind is FailureKind.REFUSED
    # What a client did wrong is not tried again, and its connection is closed where the next request could
    # not be found.
    if row.fault is Fault.CLIENT:
        assert 400 <= row.status < 500 or row.status == 501
        assert (row.retry.again, row.retry_after_s) == (False, None)
        assert row.closes is (row.status in UNREAD and kind not in READ)
    else:
        assert row.status >= 500 or row.status == 429
    # Whoever may come again is told when.
    if row.status in (429, 503) and kind is not FailureKind.CUT:
        assert row.retry_after_s == 1
    # Bodies have the shape that OpenAI's clients read.
    failure = Failure(kind, 'it said "no"\n', param="model")
    expected = {"message": 'it said "no"\n', "type": row.type, "param": "model", "code": kind.value}
    assert orjson.loads(error_body(failure)) == {"error": expected}
    event = error_event(failure)
    assert event == b"data: " + error_body(failure) + b"\n\n"
    assert event.count(b"\n") == 2
