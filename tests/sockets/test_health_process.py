"""The health process at its door, over real sockets: what it answers, leaves to the gate, and bounds."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from cellgate.proxy.admin import health_process
from cellgate.proxy.admin.health_process import HealthProcess, SharedStatus

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
