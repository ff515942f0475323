"""Which requests the health process answers itself."""

from __future__ import annotations

import pytest

from cellgate.proxy.admin.health_process import HealthRequest, parse_health_request


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"GET /livez HTTP/1.1\r\nHost: g\r\n\r\n", ("livez", False, True)),
        (b"GET /readyz HTTP/1.1\r\n\r\n", ("readyz", False, True)),
        (b"HEAD /readyz?verbose=1 HTTP/1.1\r\nHost: g\r\n\r\n", ("readyz", True, True)),
        (b"GET /livez HTTP/1.0\r\n\r\n", ("livez", False, False)),
        (b"GET /livez HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n", ("livez", False, True)),
        (b"GET /livez HTTP/1.1\r\nHost: g\r\nconnection: a, Close\r\nB: c\r\n\r\n", ("livez", False, False)),
        (b"GET /livez HTTP/1.1\r\nX-Connection: close\r\n\r\n", ("livez", False, True)),
    ],
)  # fmt: skip
def test_plain_questions_are_understood(head: bytes, expected: tuple[str, bool, bool]) -> None:
    assert parse_health_request(head) == HealthRequest(*expected, size=len(head))
    # What follows is not part of it.
    assert parse_health_request(head + b"GET /metrics HTTP/1.1\r\n\r\n") == HealthRequest(
        *expected, size=len(head)
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET /livez HTTP/1.1\r\nHost: g\r\n",
        b"GET /metrics HTTP/1.1\r\n\r\n",
        b"GET /livezz HTTP/1.1\r\n\r\n",
        b"GET /livez/ HTTP/1.1\r\n\r\n",
        b"GET http://g/livez HTTP/1.1\r\n\r\n",
        b"POST /livez HTTP/1.1\r\n\r\n",
        b"get /livez HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/2.0\r\n\r\n",
        b"GET /livez HTTP/1.1\n\n",
        b"\r\nGET /livez HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
        b"GET /livez HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nexpect: 100-continue\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nUpgrade: h2c\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nA: b\r\n folded\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nName : value\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nA: \0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
    ],
)
def test_all_else_is_left_to_a_whole_server(data: bytes) -> None:
    assert parse_health_request(data) is None
