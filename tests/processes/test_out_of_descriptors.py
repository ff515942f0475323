"""A gate that runs out of descriptors: who comes gets 503, who is served is served on, one line says so."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from loadtests.simunit.process import SimUnit
from tests.extras import ONE_OR_TWO_WORKERS
from tests.wire.process import PATIENCE_S, GateProcess, Stream, eventually, metrics

ALLOWED = 80
CLIENTS = 60
SILENT = 90
LONG, STEP_MS = 20, 50
"""Tokens of a stream that is held, and ends soon after the unit is told to release it. On a full machine all
of them take half a minute to come, and nobody reads meanwhile: faster ones would be behind by too much."""


@pytest.fixture(scope="module")
def long_lived() -> Iterator[SimUnit]:
    (started,) = SimUnit.start_all(["a"], followers=0, step_ms=STEP_MS)
    yield started
    started.stop()


@pytest.fixture
def unit(long_lived: SimUnit) -> Iterator[SimUnit]:
    """A unit that holds nothing, before a test and after it."""
    yield long_lived
    long_lived.release()


@contextmanager
def allowed(most: int) -> Iterator[None]:
    """What is started inside may have so many descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def crowd(port: int, count: int, said: bytes = b"") -> Iterator[None]:
    """So many connections that say this, and no more."""
    with ExitStack() as stack:
        for _ in range(count):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
            sock.send(said)
        yield


def asked(gate: GateProcess) -> Stream:
    """A stream. Who took a tenth of a second to ask passes for silent, and comes again."""
    while True:
        with suppress(ConnectionResetError):
            return Stream(gate, LONG)


def is_no_room(stream: Stream) -> bool:
    """Whether that is all it says, and when to come again."""
    stream.reply.close()
    stream.connection.close()
    return stream.reply.headers["retry-after"] == "1" and b'"code":"no_resources"' in stream.lines[0]


@pytest.mark.parametrize("workers", ONE_OR_TWO_WORKERS)
def test_who_finds_no_room_gets_503_and_silent_connections_make_way_for_those_who_ask(
    workers: int, unit: SimUnit, tmp_path: Path
) -> None:
    gate = GateProcess(tmp_path, {"a": unit.url}, workers=workers)
    with allowed(ALLOWED):
        gate.__enter__()
    try:
        gate.until_up("a")
        clients = CLIENTS * workers
        unit.hold()
        with ThreadPoolExecutor(clients) as pool:
            coming = [pool.submit(asked, gate) for _ in range(clients)]
            # The unit answers nobody yet: nobody waits for that to hear that there is no room.
            streams = [each.result(PATIENCE_S) for each in coming]
            unit.release()
        refused = [stream for stream in streams if stream.reply.status == 503]
        assert 10 * workers <= len(refused) <= clients - 10 * workers
        assert all(is_no_room(stream) for stream in refused)
        others = [stream for stream in streams if stream not in refused]
        assert [(each.reply.status, each.lines[-2:]) for each in others if not each.is_whole()] == []
        assert eventually(lambda: asked(gate).is_whole()), "who left makes room"
        assert "descriptors are in use" in gate.log
        assert "cellgate_gate_faults_total 0.0" not in metrics(gate)
        # Workers that run short at about the same time are told of once.
        assert gate.log.count("descriptors are in use") == 1
        assert eventually(lambda: "are enough for about" in gate.log)

        unit.hold()
        running = Stream(gate, LONG)
        with crowd(gate.port, SILENT * workers):
            for _ in range(5):
                assert Stream(gate, 2).is_whole()
            unit.release()
            assert running.is_whole()
            assert gate.admin("GET", "/readyz")[0] == 200
        assert eventually(lambda: "connections without a request are closed" in gate.log)
        assert 'cellgate_limits_total{limit="idle_connections"} 0.0' not in metrics(gate)

        if workers == 1:
            # Half of each request is there: nobody of these is idle.
            begun = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{"
            with crowd(gate.port, CLIENTS, begun):
                assert eventually(lambda: gate.admin("GET", "/readyz")[0] == 503)
                assert gate.admin("GET", "/readyz")[1]["full"] is True
            assert eventually(lambda: gate.admin("GET", "/readyz")[0] == 200)
        assert "Traceback" not in gate.log
    finally:
        gate.__exit__(None, None, None)
