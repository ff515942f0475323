"""Probes of nodes: HTTP, TCP and gRPC without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cellgate.probes.base import FetchError, Reply, Trouble
from cellgate.probes.grpc_health import HealthCall
from cellgate.probes.nodes import HttpProbe, NodeReport, NodeState, TcpProbe, page_name, split_url
from cellgate.router.nouns import Evidence, Node, Role, Sign, Strength
from tests.patient import Answer, FakePatient, look, reply

NODE = Node("n1", Role.FOLLOWER)
BAD_TWICE = [Strength.STRONG, Strength.FATAL, Strength.FATAL]


@pytest.mark.parametrize(
    ("answer", "sign"),
    [
        *((reply(status), Sign.GOOD) for status in (200, 204)),
        *((reply(status), Sign.BAD) for status in (301, 404, 503)),
        (reply(429), Sign.NEUTRAL),
        (Trouble.REFUSED, Sign.BAD),
    ],
)
def test_the_status_says_how_the_node_is(answer: Answer, sign: Sign) -> None:
    """A bad one is fatal when it comes again. A server that refuses is the node's own word."""
    probe, context = HttpProbe("http://n1:8080/health?full=1"), FakePatient(lambda _: answer, node=NODE)
    found = [
        evidence for _ in range(3) for evidence in look(probe, context) if isinstance(evidence, Evidence)
    ]
    weak = [Strength.WEAK] * 3
    assert [evidence.sign for evidence in found] == [sign] * 3
    assert [evidence.strength for evidence in found] == (BAD_TWICE if sign is Sign.BAD else weak)
    assert {(evidence.source, evidence.node) for evidence in found} == {("http n1:8080/health", "n1")}
    assert isinstance(answer, Trouble) or str(answer.status) in found[0].reason
    assert {(one.method, one.target) for one in context.asked} == {("GET", "http://n1:8080/health?full=1")}


def test_a_redirect_tells_where_it_leads_and_what_to_do() -> None:
    answer = Reply(302, {"location": "http://elsewhere/\x1b[2J" + "x" * 500}, b"")
    (evidence,) = look(HttpProbe("http://n1/"), FakePatient(lambda _: answer, node=NODE))
    assert isinstance(evidence, Evidence)
    assert evidence.sign is Sign.BAD
    assert evidence.reason.startswith("HTTP 302 redirects to http://elsewhere/?[2Jxx")
    assert evidence.reason.endswith("which is not followed; configure the final URL")


def test_a_refused_connection_is_the_nodes_own_word() -> None:
    (evidence,) = look(TcpProbe("n1:29500"), FakePatient(lambda _: reply(200), node=NODE))
    assert isinstance(evidence, Evidence)
    assert (evidence.sign, evidence.strength) == (Sign.BAD, Strength.STRONG)
    assert (evidence.source, evidence.reason) == ("tcp n1:29500", "connection refused by n1:29500")


@pytest.mark.parametrize(
    ("url", "root", "target", "name"),
    [
        ("http://n:1/health", "http://n:1", "/health", "n:1/health"),
        ("https://[::1]:2/", "https://[::1]:2", "/", "[::1]:2/"),
        ("http://n/a/b?c=/d", "http://n", "/a/b?c=/d", "n/a/b"),
    ],
)
def test_a_url_is_taken_apart(url: str, root: str, target: str, name: str) -> None:
    assert split_url(url) == (root, target)
    assert page_name(url) == name


# The gRPC health probe without a network: a server's HTTP/2 is fed to one call, whole, cut and damaged.

fuzz = settings(derandomize=True, deadline=None, max_examples=100)
SERVING, NOT_SERVING = b"\0\0\0\0\2\x08\1", b"\0\0\0\0\2\x08\2"
HEAD = {":status": "200", "content-type": "application/grpc+proto"}


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closing = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closing


class Server:
    """The other end of one call."""

    def __init__(self, service: str = "") -> None:
        self.call = HealthCall("n1:9000", service)
        self.wire = Wire()
        self.call.connection_made(self.wire)
        self.http2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self.http2.initiate_connection()
        self.asked = self.http2.receive_data(self.wire.written)

    def answer(self, body: bytes | None, head: Mapping[str, str] = HEAD, **trailers: str) -> bytes:
        """The bytes of an answer; without a body there is one block of headers only."""
        fields = {name.replace("_", "-"): value for name, value in trailers.items()}
        if body is None:
            self.http2.send_headers(1, [*head.items(), *fields.items()], end_stream=True)
        else:
            self.http2.send_headers(1, list(head.items()))
            self.http2.send_data(1, body)
            self.http2.send_headers(1, list(fields.items()), end_stream=True)
        return self.http2.data_to_send()


def heard(body: bytes | None, **trailers: str) -> NodeReport:
    server = Server()
    server.call.data_received(server.answer(body, HEAD, **trailers))
    assert server.call.ended.is_set()
    return server.call.said()


@pytest.mark.parametrize(
    ("service", "size"),
    [("", b"\0\0\0\0\0"), ("a.B", b"\0\0\0\0\5\x0a\3"), ("s" * 200, b"\0\0\0\0\xcb\x0a\xc8\1")],
    ids=["none", "short", "long"],
)
def test_the_call_is_what_grpc_servers_expect(service: str, size: bytes) -> None:
    """The service is named whatever its length."""
    asked = Server(service).asked
    (request,) = [event for event in asked if isinstance(event, RequestReceived)]
    assert {str(name): str(value) for name, value in request.headers} == {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/grpc.health.v1.Health/Check",
        ":authority": "n1:9000",
        "te": "trailers",
        "content-type": "application/grpc",
        "user-agent": "cellgate",
    }
    (message,) = [event.data for event in asked if isinstance(event, DataReceived)]
    assert message == size + service.encode()


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (SERVING, NodeState.GOOD),
        (NOT_SERVING, NodeState.BAD),
        (b"\0\0\0\0\0", NodeState.NOTHING),
        (b"\0\0\0\0\2\x08\0", NodeState.NOTHING),
        (b"\0\0\0\0\2\x08\3", NodeState.NOTHING),
    ],
    ids=["serving", "not serving", "unknown", "unknown in full", "service unknown"],
)
def test_the_health_service_says_how_the_node_is(body: bytes, word: NodeState) -> None:
    assert heard(body, grpc_status="0").state is word


@pytest.mark.parametrize(
    ("status", "word", "said"),
    [
        ("5", NodeState.NOTHING, "NOT_FOUND: name a service that the health service knows as `service`"),
        ("12", NodeState.NOTHING, "UNIMPLEMENTED: the server has no health service; use another probe"),
        ("16", NodeState.NOTHING, "UNAUTHENTICATED"),
        ("8", NodeState.NOTHING, "RESOURCE_EXHAUSTED"),
        ("14", NodeState.DOUBT, "the call failed"),
        ("", NodeState.DOUBT, "the call failed"),
    ],
)
def test_a_call_that_fails_says_nothing_or_little(status: str, word: NodeState, said: str) -> None:
    trailers = {"grpc_status": status} if status else {"x": "y"}
    for body in (None, b""):
        heard_of_it = heard(body, **trailers, grpc_message="going%20down")
        assert heard_of_it.state is word
        assert heard_of_it.reason.startswith(said)
        assert heard_of_it.reason.endswith(f"(grpc-status {status or 'missing'} going down)")


@fuzz
@given(st.lists(st.integers(1, 30), max_size=20))
def test_it_does_not_matter_how_the_answer_is_cut(sizes: list[int]) -> None:
    server = Server()
    data = server.answer(SERVING, grpc_status="0")
    for size in [*sizes, len(data)]:
        server.call.data_received(data[:size])
        data = data[size:]
    assert server.call.said().state is NodeState.GOOD


@fuzz
@given(st.binary(max_size=300), st.integers(0, 200), st.integers(0, 50))
@example(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n", 0, 999)
@example(b"\0" * 100_000, 0, 0)
def test_garbage_ends_in_an_answer_or_a_trouble(noise: bytes, at: int, lost: int) -> None:
    server = Server()
    data = server.answer(SERVING, grpc_status="0")
    server.call.data_received(data[:at] + noise + data[at + lost :])
    server.call.data_received(noise)
    server.call.connection_lost(None)
    assert server.call.ended.is_set()
    try:
        said = server.call.said()
    except FetchError as error:
        assert str(error)  # noqa: PT017
    else:
        assert said.reason


@pytest.mark.parametrize(
    ("body", "head", "said"),
    [
        (b"\0\0\0\0\2\x08\7", HEAD, "its answer is not a HealthCheckResponse"),
        (b"\1\0\0\0\2\x08\1", HEAD, "its answer is not a HealthCheckResponse"),
        (SERVING * 2, HEAD, "its answer is not a HealthCheckResponse"),
        (b"", HEAD, "its answer is not a HealthCheckResponse"),
        (b"<html>", {":status": "404", "content-type": "text/html"}, "HTTP 404 is not a gRPC answer"),
    ],
)
def test_what_is_no_answer_is_a_trouble(body: bytes, head: dict[str, str], said: str) -> None:
    server = Server()
    server.call.data_received(server.answer(body, head, grpc_status="0"))
    with pytest.raises(FetchError, match=said):
        server.call.said()


def test_a_server_that_breaks_off_is_a_trouble() -> None:
    hung_up, reset, gone, chatty = Server(), Server(), Server(), Server()
    hung_up.call.connection_lost(None)
    reset.http2.reset_stream(1, 2)
    gone.http2.close_connection(11)
    for _ in range(6000):
        chatty.http2.ping(b"12345678")
    for server, said in (
        (hung_up, "it closed the connection before it answered"),
        (reset, r"it reset the call \(HTTP/2 error 2\)"),
        (gone, r"it reset the call \(HTTP/2 error 11\)"),
        (chatty, "its reply is larger than 65536 bytes"),
    ):
        server.call.data_received(server.http2.data_to_send())
        with pytest.raises(FetchError, match=f"^{said}$"):
            server.call.said()


def test_an_answer_that_was_complete_stays_valid() -> None:
    server = Server()
    server.call.data_received(server.answer(NOT_SERVING, grpc_status="0"))
    server.http2.close_connection()
    server.call.data_received(server.http2.data_to_send())
    server.call.connection_lost(None)
    assert server.call.said() == NodeReport(NodeState.BAD, "NOT_SERVING")
