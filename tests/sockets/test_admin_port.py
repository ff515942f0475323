"""The whole admin port, the health process included, on both kinds of event loop."""

from __future__ import annotations

import asyncio
import errno
import http.client
import os
import re
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from email.utils import parsedate
from http import HTTPStatus
from typing import Any

import pytest
import uvloop
from aiohttp import web

from cellgate.proxy.admin import health_process
from cellgate.proxy.admin.health_process import HealthProcess, SharedStatus
from cellgate.proxy.admin.http import AdminServer, Stream, refusal, reply
from cellgate.proxy.admin.pages import BACKLOG, AdminPort, AdminView
from cellgate.proxy.config.settings import Address, Peers
from cellgate.proxy.observe.counters import Metrics
from cellgate.proxy.observe.events import EventLog
from cellgate.proxy.observe.exposition import Exposition
from cellgate.proxy.process.listeners import listen
from cellgate.router.board import Board
from cellgate.router.nouns import Rules
from tests.sockets.admin_stage import NOBODY, RELAYED, admin_port
from tests.wire.stage import run_live

on_both_loops = pytest.mark.parametrize("play", [run_live, asyncio.run], indirect=True)


@asynccontextmanager
async def gate_port(host: str = "127.0.0.1") -> AsyncIterator[AdminPort]:
    """The port of a gate."""
    shared_status = SharedStatus()
    port = AdminPort(_view(), shared_status)
    try:
        await port.open(await listen(Address(host, 0), BACKLOG))
        shared_status.publish(True, b"ready\n")
        yield port
    finally:
        await port.close()


def get(port: AdminPort, *paths: str) -> list[tuple[int, bytes]]:
    """Status and body of each path, on one connection."""
    connection = http.client.HTTPConnection(*port.address, timeout=10)
    answers = []
    for path in paths:
        connection.request("GET", path)
        reply = connection.getresponse()
        answers.append((reply.status, reply.read()))
    connection.close()
    return answers


@on_both_loops
async def test_one_connection_may_ask_for_everything() -> None:
    async with gate_port() as port:
        answers = await asyncio.to_thread(
            get, port, "/livez", "/readyz", "/metrics", "/livez", "/units", "/no"
        )
        assert [status for status, _ in answers] == [200, 200, 200, 200, 200, 404]
        assert answers[:2] == [(200, b"ok\n"), (200, b"ready\n")]
        assert answers[3] == (200, b"ok\n")


@on_both_loops
async def test_bytes_that_came_with_a_connection_that_is_handed_over_are_not_lost() -> None:
    async with gate_port() as port:
        reader, writer = await asyncio.open_connection(*port.address)
        line = b"GET %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
        writer.write(
            line % (b"/livez", b"") + line % (b"/units", b"") + line % (b"/livez", b"Connection: close\r\n")
        )
        data = await reader.read()
        assert [part[:3] for part in data.split(b"HTTP/1.1 ")[1:]] == [b"200"] * 3
        assert data.endswith(b"ok\n")
        writer.close()
        await writer.wait_closed()


@pytest.mark.alone
async def test_health_is_told_while_the_loop_stands_still() -> None:
    async with gate_port() as port:
        await asyncio.to_thread(get, port, "/livez")

        def ask() -> float:
            asked_at = time.monotonic()
            assert get(port, "/livez", "/readyz") == [(200, b"ok\n"), (200, b"ready\n")]
            return time.monotonic() - asked_at

        with ThreadPoolExecutor(1) as asker:
            answer = asker.submit(ask)
            # The loop stands still, but not the thread that asks.
            time.sleep(0.3)  # noqa: ASYNC251
            assert answer.done()
            assert answer.result() < 0.1


async def test_a_health_process_that_dies_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cellgate.proxy.admin.pages.RESTART_S", 0.01)

    async with gate_port() as port:
        await asyncio.to_thread(get, port, "/livez")
        os.kill(port.health_pid, signal.SIGKILL)
        assert await asyncio.to_thread(get, port, "/readyz") == [(200, b"ready\n")]
    assert "admin port: its process ended with -9; another is started" in caplog.text


async def test_a_health_process_that_cannot_be_replaced_is_once_it_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cellgate.proxy.admin.pages.RESTART_S", 0.01)

    async with gate_port() as port:
        start, refusals = port._start_health_process, iter(range(3))

        async def short_of_descriptors() -> asyncio.subprocess.Process:
            if next(refusals, None) is not None:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return await start()

        monkeypatch.setattr(port, "_start_health_process", short_of_descriptors)
        await asyncio.to_thread(get, port, "/livez")
        os.kill(port.health_pid, signal.SIGKILL)
        assert await asyncio.to_thread(get, port, "/readyz") == [(200, b"ready\n")]
    assert caplog.text.count("no process can be started: Too many open files; it is retried") == 3


async def test_nothing_is_left_of_a_port_that_was_closed() -> None:
    seen: list[tuple[int, tuple[str, int]]] = []

    async with gate_port() as port:
        seen.append((port.health_pid, port.address))
    ((pid, address),) = seen
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 1.0)


async def test_it_listens_on_ipv6() -> None:
    async with gate_port(host="::1") as port:
        assert port.address[0] == "::1"
        answers = await asyncio.to_thread(get, port, "/livez", "/units")
        assert [status for status, _ in answers] == [200, 200]


async def test_an_address_in_use_is_an_error() -> None:
    async with gate_port() as port:
        with pytest.raises(OSError, match="in use"):
            await listen(Address(*port.address), BACKLOG)


@on_both_loops
async def test_one_that_retires_answers_who_is_there_and_leaves_the_rest_to_its_successor() -> None:
    async with gate_port() as port:
        mine = [socket.socket(fileno=os.dup(each.fileno())) for each in port._listeners]
        connection = http.client.HTTPConnection(*port.address, timeout=10)
        await asyncio.to_thread(_ask, connection, "/readyz")
        port.retire()
        await asyncio.sleep(0.2)
        reply = await asyncio.to_thread(_ask, connection, "/readyz")
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        successor = AdminPort(_view(), SharedStatus())
        await successor.open(mine)
        try:
            for _ in range(20):
                assert await asyncio.to_thread(get, successor, "/readyz", "/units") == [
                    (503, b'{"ready": false, "reason": "the gate is starting"}\n'),
                    (200, b"[]\n"),
                ]
        finally:
            await successor.close()


def _ask(connection: http.client.HTTPConnection, path: str) -> http.client.HTTPResponse:
    connection.request("GET", path)
    reply = connection.getresponse()
    reply.read()
    return reply


def _view() -> AdminView:
    board, events = Board(Rules()), EventLog(lambda: 0.0, 2, lambda *_: None)
    metrics = Metrics(board)
    metrics.include(Exposition(metrics, waiting=lambda: 0, connections=dict))
    return AdminView(
        board,
        events,
        metrics,
        lambda: 0.0,
        lambda: False,
        lambda *_: False,
        lambda: None,
        Peers(),
        lambda *_: {},
    )


# HTTP of the admin port: what ends a response, what a connection may ask, what is too much.

GET = b"GET %b HTTP/1.%d\r\nHost: gate\r\n\r\n"


async def _answer(request: web.BaseRequest) -> web.StreamResponse:
    if request.path == "/defect":
        raise ZeroDivisionError("boom")
    if request.path == "/stream":
        return Stream(_parts(), "text/plain")
    body = f"{request.method} {request.path} {dict(request.query)}".encode()
    return reply(body, content_type="text/plain")


async def _parts() -> AsyncGenerator[bytes, None]:
    for part in (b"one", b"two"):
        await asyncio.sleep(0)
        yield part


def talk(*sent: bytes, tick_at_s: float | None = None) -> bytes:
    """All that comes back on one connection, until the server ends it."""

    async def main() -> bytes:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        server = AdminServer(_answer)
        listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        for data in sent:
            writer.write(data)
            await asyncio.sleep(0.01)
        if tick_at_s is not None:
            server.tick(server.now() + tick_at_s)
        answer = await asyncio.wait_for(reader.read(), 5.0)
        writer.close()
        listening.close()
        await server.close()
        assert not server.clients
        return answer

    return uvloop.run(main())


def plain(answer: bytes) -> bytes:
    """The same bytes, but for what may differ: the order of the lines of a head, the case of their names, and
    the two lines that are in every head.
    """
    parts = []
    for part in re.split(rb"(?=HTTP/1\.[01] \d)", answer)[1:]:
        head, _, body = part.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        fields = dict(line.split(b": ", 1) for line in lines)
        assert fields.pop(b"Server") == b"cellgate"
        assert parsedate(fields.pop(b"Date").decode())
        named = sorted(b"%b: %b\r\n" % (name.lower(), value) for name, value in fields.items())
        parts.append(first + b"\r\n" + b"".join(named) + b"\r\n" + body)
    return b"".join(parts)


def test_requests_of_one_connection_are_answered_in_order() -> None:
    answer = talk(GET % (b"/a%20b?x=1", 1) + GET % (b"/stream", 1), GET % (b"/last", 0))
    assert plain(answer) == (
        b"HTTP/1.1 200 OK\r\ncontent-length: 19\r\ncontent-type: text/plain\r\n\r\nGET /a b {'x': '1'}"
        b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"
        b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
        b"HTTP/1.0 200 OK\r\nconnection: close\r\ncontent-length: 12\r\ncontent-type: text/plain\r\n\r\n"
        b"GET /last {}"
    )


def test_a_handler_that_fails_leaves_nobody_without_an_answer() -> None:
    answer = talk(GET % (b"/defect", 1))
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b'"code":"internal"' in answer


def test_a_stream_to_an_old_client_ends_with_its_connection() -> None:
    assert plain(talk(GET % (b"/stream", 0))) == (
        b"HTTP/1.0 200 OK\r\nconnection: close\r\ncontent-type: text/plain\r\n\r\nonetwo"
    )


def test_a_head_has_the_length_of_what_it_does_not_carry() -> None:
    assert plain(talk(b"HEAD /a HTTP/1.1\r\nHost: gate\r\nConnection: close\r\n\r\n")) == (
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 10\r\ncontent-type: text/plain\r\n\r\n"
    )


def test_what_is_too_large_or_no_request_is_refused_and_the_connection_ends() -> None:
    large = b"POST /a HTTP/1.1\r\nHost: gate\r\nContent-Length: 1048577\r\n\r\n"
    for sent, status in ((large, b"413"), (b"nonsense\r\n\r\n", b"400"), (b"GET / HTTP/1.1\r\n\r\n", b"400")):
        assert re.match(rb"HTTP/1\.[01] " + status, talk(sent))


def test_who_is_silent_for_too_long_is_sent_away() -> None:
    assert talk(tick_at_s=76.0) == b""
    assert talk(b"GET / HT", tick_at_s=11.0).startswith(b"HTTP/1.1 408")


def test_what_a_handler_streams_is_closed_when_its_client_leaves() -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"more"
                await asyncio.sleep(0.001)
        finally:
            closed.set()

    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return Stream(endless(), "text/plain")

    async def main() -> None:
        server = AdminServer(answer)
        listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        writer.write(GET % (b"/", 1))
        await reader.readuntil(b"more")
        writer.close()
        await asyncio.wait_for(closed.wait(), 5.0)
        listening.close()
        await server.close()

    uvloop.run(main())


# Who may ask what of the admin port.


async def test_a_relayed_caller_sees_only_what_is_for_everyone() -> None:
    async with admin_port() as port:
        for path, status in (("/livez", 200), ("/readyz", 503), ("/metrics", 200), ("/metrics/engine", 200)):
            async with port.client.get(port.url + path, headers=RELAYED) as reply:
                assert reply.status == status
        for path in ("/units", "/units/a1", "/events", "/healthz/unit/a1", "/nowhere"):
            status, body = await port.get(path, RELAYED)
            assert (status, body["error"]["code"]) == (403, "forbidden")
        assert (await port.post("/units/a1/drain", RELAYED))[0] == 403
        assert not port.board.units["a1"].drained


async def test_with_a_token_a_relayed_caller_may_do_everything_and_without_it_nothing() -> None:
    async with admin_port(token="secret") as port:
        for wrong in ({}, {"Authorization": "Bearer secret2"}, {"Authorization": "Basic secret"}):
            async with port.client.get(port.url + "/units", headers=RELAYED | wrong) as reply:
                assert (reply.status, reply.headers["WWW-Authenticate"]) == (401, "Bearer")
                assert "secret" not in await reply.text()
        assert (await port.post("/units/a1/drain", RELAYED | {"Authorization": "Bearer secret"}))[0] == 200
        assert (await port.get("/units"))[0] == 200


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:192.0.2.1", False),
        ("192.0.2.1", False),
        ("fe80::1%eth0", False),
        ("", False),
        (None, False),
        ("localhost", False),
    ],
)
def test_who_counts_as_this_machine(peer: str | None, local: bool) -> None:
    assert (refusal("GET", "/units", peer, {}, None, NOBODY) is None) is local
    assert (refusal("POST", "/units/a1/drain", peer, {}, "token", NOBODY) is None) is local


def test_only_reading_is_for_everyone() -> None:
    for path in ("/livez", "/readyz", "/metrics"):
        assert refusal("GET", path, "192.0.2.1", {}, None, NOBODY) is None
        assert refusal("HEAD", path, "192.0.2.1", {}, None, NOBODY) is None
        assert refusal("POST", path, "192.0.2.1", {}, None, NOBODY) is not None


@pytest.mark.parametrize(
    "path", ["/units", "/units/a1", "/events", "/status", "/healthz/unit/a1", "/livez/", "//livez", "/x"]
)
def test_all_else_is_for_trusted_networks_and_for_who_has_the_token(path: str) -> None:
    peers = Peers(["10.0.0.0/8"])
    assert refusal("GET", path, "10.1.2.3", {}, None, peers) is None
    assert refusal("GET", path, "::ffff:10.1.2.3", {}, None, peers) is None
    assert refused("GET", path, "11.1.2.3", {}, None, peers) is HTTPStatus.FORBIDDEN
    assert refused("GET", path, "11.1.2.3", {}, "right", peers) is HTTPStatus.UNAUTHORIZED
    assert refused("GET", path, "10.1.2.3", RELAYED, None, peers) is HTTPStatus.FORBIDDEN
    for given in ("Bearer right", "bearer  right"):
        assert refusal("GET", path, "11.1.2.3", {"Authorization": given}, "right", peers) is None
    for given in ("Bearer wrong", "Bearer righ", "Basic right", "right", "Bearer \udcff", "Bearer "):
        headers = {"Authorization": given}
        assert refused("GET", path, "11.1.2.3", headers, "right", peers) is HTTPStatus.UNAUTHORIZED


@pytest.mark.parametrize("peer", ["127.0.0.1", "10.1.2.3", "192.0.2.1"])
@pytest.mark.parametrize("token", [None, "right"])
@pytest.mark.parametrize("given", ["Bearer wrong", "bearer  righ", "Bearer ", "Bearer"])
def test_a_token_that_is_shown_and_wrong_is_refused_from_anywhere(
    peer: str, token: str | None, given: str
) -> None:
    asked = ("POST", "/units/a1/drain", peer, {"Authorization": given}, token, Peers(["10.0.0.0/8"]))
    assert refused(*asked) is HTTPStatus.UNAUTHORIZED
    right = {"Authorization": "Bearer right"}
    assert (refusal("POST", "/units/a1/drain", peer, right, token, NOBODY) is None) is (token == "right")


def test_what_is_for_everyone_needs_no_right_token() -> None:
    wrong = {"Authorization": "Bearer of another"}
    assert refusal("GET", "/metrics", "192.0.2.1", wrong, "right", NOBODY) is None
    # Another scheme is no token of ours: a proxy or a browser has put it there.
    assert refusal("GET", "/units", "127.0.0.1", {"Authorization": "Basic x"}, "right", NOBODY) is None


def refused(*asked: Any) -> HTTPStatus:
    """The status of a refusal."""
    no = refusal(*asked)
    assert no is not None
    return no[0]


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(given: bytes, right: bytes) -> bool:
        compared.append((given, right))
        return False

    monkeypatch.setattr("hmac.compare_digest", compare)
    refusal("GET", "/units", "192.0.2.1", {"Authorization": "Bearer wrong"}, "right", NOBODY)
    assert compared == [(b"wrong", b"right")]


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        ("127.0.0.1:9901", True),
        ("localhost:9901", True),
        ("[::1]:9901", True),
        ("10.0.0.1:9901", True),
        ("evil.example:9901", False),
        ("127.0.0.1.evil.example", False),
    ],
)
def test_a_name_made_to_point_at_this_machine_opens_nothing(host: str, is_here: bool) -> None:
    asked = "GET", "/units", "127.0.0.1", {"Host": host}, "token", NOBODY
    assert (refusal(*asked) is None) is is_here


def test_callers_of_trusted_networks_may_use_names() -> None:
    peers = Peers(("10.0.0.0/8",))
    assert refusal("GET", "/units", "10.1.2.3", {"Host": "gate.cells.svc:9901"}, "token", peers) is None


async def test_who_may_not_drain_may_not_see_or_clear_refused_prompts() -> None:
    async with admin_port(token="t0ken") as port:
        assert (await port.get("/poison", RELAYED))[0] == 401
        assert (await port.post("/poison/clear", RELAYED))[0] == 401


# The health process at its door, over real sockets: what it answers, leaves to the gate, and bounds.

LIVEZ = b"GET /livez HTTP/1.1\r\nHost: gate\r\n\r\n"
READYZ = b"GET /readyz HTTP/1.1\r\nHost: gate\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nHost: gate\r\n\r\n"


class Door:
    """A health process on a thread, with a clock of ours, and the gate's end of what it hands over."""

    def __init__(self) -> None:
        self.now = 100.0
        self.shared_status = SharedStatus(clock=lambda: 100.0)
        self.shared_status.publish(True, b'{"ready": true}\n')
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        self.address = listener.getsockname()
        self.gate, other = socket.socketpair()
        self.gate.settimeout(5.0)
        shared = SharedStatus(os.dup(self.shared_status.fd))
        self._health_process = HealthProcess([listener], other, shared, clock=lambda: self.now)
        self.thread = threading.Thread(target=self._health_process.run)
        self.thread.start()

    def visit(self) -> socket.socket:
        """A new connection."""
        return socket.create_connection(self.address, 5.0)

    def handed_over(self) -> socket.socket:
        """What the gate is given next."""
        _, fds, _, _ = socket.recv_fds(self.gate, 1, 1)
        taken = socket.socket(fileno=fds[0])
        taken.settimeout(5.0)
        return taken

    def close(self) -> None:
        """As when the gate ends."""
        self.gate.close()
        self.thread.join(5.0)
        self.shared_status.close()


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    monkeypatch.setattr(health_process, "SWEEP_S", 0.005)
    door = Door()
    yield door
    door.close()
    assert not door.thread.is_alive()


def read(sock: socket.socket, answers: int = 1) -> list[tuple[int, bytes]]:
    """Status and body of each answer; none has a body that looks like a head."""
    data = b""
    found: list[tuple[int, bytes]] = []
    while len(found) < answers:
        part = sock.recv(1_000_000)
        assert part, "closed too early"
        data += part
        while b"\r\n\r\n" in data:
            head, _, rest = data.partition(b"\r\n\r\n")
            length = int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0])
            if len(rest) < length:
                break
            found.append((int(head.split()[1]), rest[:length]))
            data = rest[length:]
    assert data == b""
    return found


def test_one_connection_may_ask_many_times_and_all_at_once(door: Door) -> None:
    with door.visit() as sock:
        sock.sendall(LIVEZ)
        assert read(sock) == [(200, b"ok\n")]
        sock.sendall(READYZ + LIVEZ + READYZ)
        ready = (200, b'{"ready": true}\n')
        assert read(sock, 3) == [ready, (200, b"ok\n"), ready]


def test_head_gets_a_head_and_whoever_wants_it_a_close(door: Door) -> None:
    with door.visit() as sock:
        sock.sendall(b"HEAD /readyz HTTP/1.1\r\nConnection: close\r\n\r\n")
        data = b"".join(iter(lambda: sock.recv(4096), b""))
        assert data.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\nContent-Length: 16\r\n" in data
        assert data.endswith(b"\r\nConnection: close\r\n\r\n")


def test_a_gate_that_is_not_ready_says_what_it_published(door: Door) -> None:
    door.shared_status.publish(False, b"no\n")
    with door.visit() as sock:
        sock.sendall(READYZ)
        assert read(sock) == [(503, b"no\n")]


def test_a_loop_that_stands_still_is_not_ready_and_after_a_while_not_alive(door: Door) -> None:
    still = b"the gate's event loop has been blocked for "
    with door.visit() as sock:
        door.now = 102.3
        sock.sendall(READYZ + LIVEZ)
        assert read(sock, 2) == [
            (503, b'{"ready": false, "reason": "' + still + b'2.3 s"}\n'),
            (200, b"ok\n"),
        ]
        door.now = 112.0
        sock.sendall(LIVEZ)
        assert read(sock) == [(503, still + b"12.0 s; restart the gate\n")]


@pytest.mark.parametrize("data", [METRICS, b"GET /li", b"\x16\x03\x01garbage\r\n\r\n", LIVEZ[:-2]])
def test_all_else_is_handed_over_unread(door: Door, data: bytes) -> None:
    with door.visit() as sock:
        sock.sendall(data)
        with door.handed_over() as taken:
            assert taken.getpeername() == sock.getsockname()
            assert taken.recv(4096) == data
            taken.sendall(b"mine")
            assert sock.recv(4096) == b"mine"


def test_a_connection_that_asks_for_more_than_health_is_handed_over_behind_its_answer(door: Door) -> None:
    with door.visit() as sock:
        sock.sendall(LIVEZ + METRICS + READYZ)
        assert read(sock) == [(200, b"ok\n")]
        with door.handed_over() as taken:
            assert taken.recv(4096) == METRICS + READYZ


def test_an_answer_waits_for_a_slow_reader(door: Door) -> None:
    body = b"x" * 1_000_000
    door.shared_status.publish(True, body)
    with door.visit() as sock:
        sock.sendall((READYZ * 8) + LIVEZ)
        with door.visit() as other:
            other.sendall(LIVEZ)
            assert read(other) == [(200, b"ok\n")]
        assert read(sock, 9) == [(200, body)] * 8 + [(200, b"ok\n")]


def test_silence_is_bounded(door: Door) -> None:
    with door.visit() as sock:
        sock.sendall(LIVEZ)
        read(sock)
        with door.visit() as other:
            # Its answer comes when the health process is done with the first.
            other.sendall(LIVEZ)
            read(other)
        door.now = 100.0 + health_process.IDLE_S
        assert sock.recv(1) == b""


def test_who_has_been_quiet_longest_makes_room(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_process, "HELD_MAX", 2)
    with door.visit() as first, door.visit() as second:
        for sock in (first, second, first):
            sock.sendall(LIVEZ)
            read(sock)
        with door.visit() as third:
            third.sendall(LIVEZ)
            assert read(third) == [(200, b"ok\n")]
            assert second.recv(1) == b""
            first.sendall(LIVEZ)
            assert read(first) == [(200, b"ok\n")]


def test_it_ends_with_the_gate_and_takes_its_connections_along(door: Door) -> None:
    with door.visit() as sock:
        sock.sendall(LIVEZ)
        read(sock)
        door.gate.close()
        assert sock.recv(1) == b""
    door.thread.join(5.0)
    with pytest.raises(ConnectionRefusedError):
        door.visit()
