"""The whole admin port, the health process included, on both kinds of event loop."""

from __future__ import annotations

import asyncio
import errno
import http.client
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from hashlib import sha256
from http import HTTPStatus

import pytest

from cellgate.proxy.admin import health_process
from cellgate.proxy.admin.health_process import HealthProcess, SharedStatus
from cellgate.proxy.admin.http import refusal
from cellgate.proxy.admin.pages import AdminPort, AdminView
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
        await port.open(await listen(Address(host, 0), 128))
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


async def test_a_health_process_that_dies_is_replaced_once_it_can(
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
    assert "admin port: its process ended with -9; another is started" in caplog.text
    assert caplog.text.count("no process can be started: Too many open files; it is retried") == 3


async def test_it_listens_on_ipv6_and_nothing_is_left_of_a_port_that_was_closed() -> None:
    async with gate_port(host="::1") as port:
        pid, address = port.health_pid, port.address
        assert address[0] == "::1"
        with pytest.raises(OSError, match="in use"):
            await listen(Address(*address), 128)
        answers = await asyncio.to_thread(get, port, "/livez", "/units")
        assert [status for status, _ in answers] == [200, 200]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 1.0)


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
            for _ in range(5):
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
    metrics.include(Exposition(metrics, waiting=lambda: 0, connections=dict).collect)
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


# Who may ask what of the admin port.


async def test_a_relayed_caller_sees_only_what_is_for_everyone_without_a_token() -> None:
    async with admin_port() as port:
        for path, status in (("/livez", 200), ("/readyz", 503), ("/metrics", 200), ("/metrics/engine", 200)):
            async with port.client.get(port.url + path, headers=RELAYED) as reply:
                assert reply.status == status
        for path in ("/units", "/units/a1", "/events", "/healthz/unit/a1", "/nowhere"):
            status, body = await port.get(path, RELAYED)
            assert (status, body["error"]["code"]) == (403, "forbidden")
        assert (await port.post("/units/a1/drain", RELAYED))[0] == 403
        assert not port.board.units["a1"].drained
    async with admin_port(token="secret") as port:
        for wrong in ({}, {"Authorization": "Bearer secret2"}, {"Authorization": "Basic secret"}):
            async with port.client.get(port.url + "/units", headers=RELAYED | wrong) as reply:
                assert (reply.status, reply.headers["WWW-Authenticate"]) == (401, "Bearer")
                assert "secret" not in await reply.text()
        for ask, path in ((port.get, "/poison"), (port.post, "/poison/clear")):
            assert (await ask(path, RELAYED))[0] == 401
        assert (await port.post("/units/a1/drain", RELAYED | {"Authorization": "Bearer secret"}))[0] == 200
        assert (await port.get("/units"))[0] == 200


FORBIDDEN, UNAUTHORIZED = HTTPStatus.FORBIDDEN, HTTPStatus.UNAUTHORIZED
HERE = ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"]
ELSEWHERE = ["::ffff:192.0.2.1", "192.0.2.1", "fe80::1%eth0", "", None, "localhost"]
NEAR, FAR = ["10.1.2.3", "::ffff:10.1.2.3"], ["11.1.2.3"]
TRUSTED = Peers(["10.0.0.0/8"])
OPEN = ["/livez", "/readyz", "/metrics"]
CLOSED = ["/units", "/units/a1", "/events", "/status", "/healthz/unit/a1", "/livez/", "//livez", "/x"]
WRONG = ["Bearer wrong", "Bearer righ", "bearer  righ", "Bearer ", "Bearer", "Bearer \udcff"]
HERE_HOSTS = ["127.0.0.1:9901", "localhost:9901", "[::1]:9901", "10.0.0.1:9901"]


def bearing(*given: str) -> list[dict[str, str]]:
    return [{"Authorization": each} for each in given]


@pytest.mark.parametrize(
    ("status", "methods", "paths", "peers", "headers", "token", "trusted"),
    [
        # Who counts as this machine.
        (None, ["GET", "POST"], ["/units"], HERE, [{}], None, NOBODY),
        (FORBIDDEN, ["GET", "POST"], ["/units"], ELSEWHERE, [{}], None, NOBODY),
        (UNAUTHORIZED, ["GET", "POST"], ["/units"], ELSEWHERE, [{}], "token", NOBODY),
        # Only reading is for everyone, and needs no right token.
        (None, ["GET", "HEAD"], OPEN, ELSEWHERE, [{}], None, NOBODY),
        (None, ["GET"], OPEN, FAR, bearing("Bearer of another"), "right", NOBODY),
        (FORBIDDEN, ["POST"], OPEN, ELSEWHERE, [{}], None, NOBODY),
        # All else is for trusted networks and for who has the token.
        (None, ["GET"], CLOSED, NEAR, [{}], None, TRUSTED),
        (FORBIDDEN, ["GET"], CLOSED, FAR, [{}], None, TRUSTED),
        (UNAUTHORIZED, ["GET"], CLOSED, FAR, [{}], "right", TRUSTED),
        (FORBIDDEN, ["GET"], CLOSED, NEAR, [RELAYED], None, TRUSTED),
        (
            None,
            ["GET", "POST"],
            CLOSED,
            FAR + NEAR + HERE,
            bearing("Bearer right", "bearer  right"),
            "right",
            TRUSTED,
        ),
        (UNAUTHORIZED, ["GET"], CLOSED, FAR, bearing("Basic right", "right"), "right", TRUSTED),
        # A token that is shown and wrong is refused from anywhere; another scheme is no token of ours.
        *(
            (UNAUTHORIZED, ["GET", "POST"], ["/units"], FAR + NEAR + HERE, bearing(*wrong), token, TRUSTED)
            for wrong in [
                ("Bearer wrong", "Bearer righ", "bearer  righ", "Bearer ", "Bearer", "Bearer \udcff")
            ]
            for token in (None, "right")
        ),
        (UNAUTHORIZED, ["POST"], ["/units"], HERE, bearing("Bearer right"), None, NOBODY),
        (None, ["GET"], ["/units"], HERE, bearing("Basic x"), "right", NOBODY),
        # A name made to point at this machine opens nothing; callers of trusted networks may use names.
        (None, ["GET"], ["/units"], HERE, [{"Host": host} for host in HERE_HOSTS], "token", NOBODY),
        (UNAUTHORIZED, ["GET"], ["/units"], HERE, [{"Host": "evil.example:9901"}], "token", NOBODY),
        (UNAUTHORIZED, ["GET"], ["/units"], HERE, [{"Host": "127.0.0.1.evil.example"}], "token", NOBODY),
        (None, ["GET"], ["/units"], NEAR, [{"Host": "gate.cells.svc:9901"}], "token", TRUSTED),
    ],
)
def test_who_may_ask_for_what(
    status: HTTPStatus | None,
    methods: list[str],
    paths: list[str],
    peers: list[str | None],
    headers: list[dict[str, str]],
    token: str | None,
    trusted: Peers,
) -> None:
    for method, path, peer, head in itertools.product(methods, paths, peers, headers):
        no = refusal(method, path, peer, head, token, trusted)
        assert (no and no[0]) == status, (method, path, peer, head)


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(given: bytes, right: bytes) -> bool:
        compared.append((given, right))
        return False

    monkeypatch.setattr("hmac.compare_digest", compare)
    refusal("GET", "/units", "192.0.2.1", {"Authorization": "Bearer wrong"}, "right", NOBODY)
    # Their hashes, for a gate may have no more than that.
    assert compared == [tuple(sha256(each).hexdigest().encode() for each in (b"wrong", b"right"))]


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
        door.now = 100.0 + health_process.HEALTH_IDLE_S
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
