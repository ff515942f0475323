"""What pages of other sites are told."""

from __future__ import annotations

import pytest

from cellgate.proxy.config.settings import Cors
from cellgate.proxy.http.request import Request
from cellgate.proxy.request.routes import CorsRules

APP = b"https://app.example"
RULES = CorsRules(Cors((APP.decode(),)))


def asked(method: bytes = b"POST", **fields: bytes) -> Request:
    request = Request(0.0, [], [], [])
    request.method = method
    request.routing = [(name.replace("_", "-").encode(), value) for name, value in fields.items()]
    request.lines = [b"%b: %b\r\n" % line for line in request.routing] + [b"accept: */*\r\n"]
    return request


def told(rules: CorsRules, request: Request) -> dict[str, str]:
    lines = rules.lines(request).decode().split("\r\n")[:-1]
    return dict(line.split(": ", 1) for line in lines)


def test_a_page_that_is_listed_may_read_the_answer() -> None:
    request = asked(origin=APP)
    lines = told(RULES, request)
    assert (lines["access-control-allow-origin"], lines["vary"]) == (APP.decode(), "origin")
    assert "x-request-id" in lines["access-control-expose-headers"]
    assert request.lines == [b"accept: */*\r\n"]


def test_others_may_not() -> None:
    assert told(RULES, asked(origin=b"https://evil.example")) == {"vary": "origin"}
    assert told(RULES, asked()) == {"vary": "origin"}
    assert told(CorsRules(Cors(("*",))), asked()) == {}


def test_any_page_may_where_all_are_listed() -> None:
    assert told(CorsRules(Cors(("*",))), asked(origin=APP))["access-control-allow-origin"] == "*"


def test_a_preflight_is_told_methods_and_headers() -> None:
    preflight = asked(
        b"OPTIONS",
        origin=APP,
        access_control_request_method=b"POST",
        access_control_request_headers=b"authorization,content-type, x-stainless-os",
    )
    lines = told(RULES, preflight)
    assert lines["access-control-allow-headers"] == "authorization,content-type, x-stainless-os"
    assert "POST" in lines["access-control-allow-methods"]
    assert lines["access-control-max-age"] == "600"


@pytest.mark.parametrize("names", [b"", b"a b", b"x" + b",x" * 100, b'"x"'])
def test_names_that_are_none_are_not_repeated(names: bytes) -> None:
    preflight = asked(
        b"OPTIONS", origin=APP, access_control_request_method=b"POST", access_control_request_headers=names
    )
    assert "access-control-allow-headers" not in told(RULES, preflight)
