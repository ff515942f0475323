"""What header lines say of how a request is to be routed."""

from __future__ import annotations

from math import inf

import pytest

from cellgate.proxy.config.settings import HeaderNames
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.request.routes import NAME_CHARS, RoutingHeaders
from cellgate.router.nouns import Ask

NOW = 100.0


def heed(*lines: tuple[str, str], ask: Ask = Ask("m"), headers: HeaderNames = HeaderNames()) -> Ask:  # noqa: B008
    """The ask with what these lines say."""
    heeded = RoutingHeaders(headers).apply(
        ask, [(name.encode(), value.encode("latin-1")) for name, value in lines], NOW
    )
    assert isinstance(heeded, Ask), heeded
    return heeded


def test_lines_that_say_nothing_of_routing_change_nothing() -> None:
    assert heed(("host", "gate"), ("accept", "*/*"), ("content-type", "application/json")) == Ask("m")


def test_session_tenant_and_priority_are_read() -> None:
    ask = heed(("x-session-id", "s-1"), ("x-gateway-inference-fairness-id", "team"), ("x-priority", "-3"))
    assert (ask.session, ask.tenant, ask.priority) == ("s-1", "team", -3)


def test_a_line_comes_before_what_the_body_says() -> None:
    body = Ask("m", session="user", priority=7)
    ask = heed(("x-session-id", "s-1"), ("x-priority", "1"), ask=body)
    assert (ask.session, ask.priority) == ("s-1", 1)
    assert heed(ask=body) == body


def test_the_names_are_configurable() -> None:
    ask = heed(("x-chat", "c-9"), ("x-session-id", "s-1"), headers=HeaderNames(session="x-chat"))
    assert ask.session == "c-9"


def test_who_shows_the_same_credentials_is_the_same_tenant_unless_a_line_says_otherwise() -> None:
    one, same, other = (heed(("authorization", f"Bearer {key}")).tenant for key in ("a", "a", "b"))
    assert one == same != other
    assert "Bearer" not in one
    named = ("x-gateway-inference-fairness-id", "team")
    assert (
        heed(("authorization", "Bearer a"), named).tenant
        == heed(named, ("authorization", "x")).tenant
        == "team"
    )


def test_the_nearest_deadline_counts() -> None:
    assert heed(("x-slo-ttft-ms", "1500")).deadline_at == NOW + 1.5
    both = heed(("x-slo-ttft-ms", "1500"), ("x-envoy-expected-rq-timeout-ms", "500"))
    assert both.deadline_at == NOW + 0.5
    assert heed().deadline_at == inf


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-priority", "high"),
        ("x-priority", ""),
        ("x-priority", "1.5"),
        ("x-priority", "99999999999"),
        ("x-slo-ttft-ms", "soon"),
        ("x-slo-ttft-ms", "-1"),
        ("x-slo-ttft-ms", "0"),
        ("x-slo-ttft-ms", "nan"),
        ("x-slo-ttft-ms", "inf"),
        ("x-session-id", ""),
        ("x-session-id", "s" * (NAME_CHARS + 1)),
        ("x-gateway-inference-fairness-id", ""),
    ],
)
def test_a_line_that_makes_no_sense_is_named(name: str, value: str) -> None:
    failure = RoutingHeaders(HeaderNames()).apply(Ask("m"), [(name.encode(), value.encode())], NOW)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.param) == (FailureKind.BAD_HEADER, name)
    assert failure.message.startswith(f"{name}: expected ")
    assert len(failure.message) < 200


def test_what_another_system_says_wrongly_is_ignored() -> None:
    routing_headers = RoutingHeaders(HeaderNames())
    for value in (b"", b"none", b"0", b"-5"):
        assert routing_headers.apply(Ask("m"), [(b"x-envoy-expected-rq-timeout-ms", value)], NOW) == Ask("m")
