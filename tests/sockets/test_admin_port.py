"""The whole admin port, the health process included, on both kinds of event loop."""

from __future__ import annotations

import asyncio
import errno
import http.client
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvloop

from cellgate.proxy.admin.health_process import SharedStatus
from cellgate.proxy.admin.pages import BACKLOG, AdminPort, AdminView
from cellgate.proxy.config.settings import Address, Peers
from cellgate.proxy.observe.counters import Metrics
from cellgate.proxy.observe.events import EventLog
from cellgate.proxy.observe.exposition import Exposition
from cellgate.proxy.process.listeners import listen
from cellgate.router.board import Board
from cellgate.router.nouns import Rules

LOOPS = [uvloop.new_event_loop, asyncio.new_event_loop]
Test = Callable[[AdminPort, SharedStatus], Awaitable[None]]


def run(
    test: Test, loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop, host: str = "127.0.0.1"
) -> None:
    """Run a test against a port of its own."""

    async def main() -> None:
        shared_status = SharedStatus()
        port = AdminPort(_view(), shared_status)
        try:
            await port.open(await listen(Address(host, 0), BACKLOG))
            shared_status.publish(True, b"ready\n")
            await test(port, shared_status)
        finally:
            await port.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


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


@pytest.mark.parametrize("loop", LOOPS)
def test_one_connection_may_ask_for_everything(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def check(port: AdminPort, shared_status: SharedStatus) -> None:
        answers = await asyncio.to_thread(
            get, port, "/livez", "/readyz", "/metrics", "/livez", "/units", "/no"
        )
        assert [status for status, _ in answers] == [200, 200, 200, 200, 200, 404]
        assert answers[:2] == [(200, b"ok\n"), (200, b"ready\n")]
        assert answers[3] == (200, b"ok\n")

    run(check, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_bytes_that_came_with_a_connection_that_is_handed_over_are_not_lost(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def check(port: AdminPort, shared_status: SharedStatus) -> None:
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

    run(check, loop)


@pytest.mark.alone
def test_health_is_told_while_the_loop_stands_still() -> None:
    async def check(port: AdminPort, shared_status: SharedStatus) -> None:
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

    run(check)


def test_a_health_process_that_dies_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cellgate.proxy.admin.pages.RESTART_S", 0.01)

    async def check(port: AdminPort, shared_status: SharedStatus) -> None:
        await asyncio.to_thread(get, port, "/livez")
        os.kill(port.health_pid, signal.SIGKILL)
        assert await asyncio.to_thread(get, port, "/readyz") == [(200, b"ready\n")]

    run(check)
    assert "admin port: its process ended with -9; another is started" in caplog.text


def test_a_health_process_that_cannot_be_replaced_is_once_it_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cellgate.proxy.admin.pages.RESTART_S", 0.01)

    async def check(port: AdminPort, shared_status: SharedStatus) -> None:
        start, refusals = port._start_health_process, iter(range(3))

        async def short_of_descriptors() -> asyncio.subprocess.Process:
            if next(refusals, None) is not None:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return await start()

        monkeypatch.setattr(port, "_start_health_process", short_of_descriptors)
        await asyncio.to_thread(get, port, "/livez")
        os.kill(port.health_pid, signal.SIGKILL)
        assert await asyncio.to_thread(get, port, "/readyz") == [(200, b"ready\n")]

    run(check)
    assert caplog.text.count("no process can be started: Too many open files; it is retried") == 3


def test_nothing_is_left_of_a_port_that_was_closed() -> None:
    seen: list[tuple[int, tuple[str, int]]] = []

    async def check(port: AdminPort, shared_status: SharedStatus) -> None:
        seen.append((port.health_pid, port.address))

    run(check)
    ((pid, address),) = seen
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 1.0)


def test_it_listens_on_ipv6() -> None:
    async def check(port: AdminPort, shared_status: SharedStatus) -> None:
        assert port.address[0] == "::1"
        answers = await asyncio.to_thread(get, port, "/livez", "/units")
        assert [status for status, _ in answers] == [200, 200]

    run(check, host="::1")


def test_an_address_in_use_is_an_error() -> None:
    async def check(port: AdminPort, shared_status: SharedStatus) -> None:
        with pytest.raises(OSError, match="in use"):
            await listen(Address(*port.address), BACKLOG)

    run(check)


@pytest.mark.parametrize("loop", LOOPS)
def test_one_that_retires_answers_who_is_there_and_leaves_the_rest_to_its_successor(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def check(port: AdminPort, shared_status: SharedStatus) -> None:
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

    run(check, loop)


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
