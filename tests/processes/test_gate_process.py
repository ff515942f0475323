"""The gate as a process: how it stops, and how it reads its configuration again, with streams in flight."""

from __future__ import annotations

import http.client
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.simunit.process import SimUnit
from tests.wire.process import GateProcess, Stream, eventually

STEP_MS = 4
LONG = 20
"""Tokens of a stream that is held, and ends soon after its unit is told to release it."""

DELAY_S = 2.0
"""Enough for three requests, on a machine that is busy with other things."""


@pytest.fixture(scope="module")
def long_lived() -> Iterator[dict[str, SimUnit]]:
    started = SimUnit.start_all(["a", "b"], followers=0, step_ms=STEP_MS)
    yield {unit.name: unit for unit in started}
    for unit in started:
        unit.stop()


@pytest.fixture
def units(long_lived: dict[str, SimUnit]) -> Iterator[dict[str, SimUnit]]:
    """Units whose streams end when they are told to release them."""
    for unit in long_lived.values():
        unit.hold()
    yield long_lived
    for unit in long_lived.values():
        unit.release()


def models(gate: GateProcess) -> http.client.HTTPResponse:
    """The answer to a short request on a connection of its own. Raises ConnectionRefusedError."""
    connection = gate.connect()
    try:
        connection.request("GET", "/v1/models")
        reply = connection.getresponse()
        reply.read()
        return reply
    finally:
        connection.close()


def is_refusing(gate: GateProcess) -> bool:
    """Whether it takes no connection any more."""
    try:
        models(gate)
    except ConnectionRefusedError:
        return True
    except ConnectionError:
        # It was in the queue of the listener at the moment in which that was closed.
        return False
    return False


def test_sigterm_lets_streams_finish_and_says_not_ready_meanwhile(
    units: dict[str, SimUnit], tmp_path: Path
) -> None:
    timeouts = {"drain_delay_s": DELAY_S, "drain_s": 60}
    with GateProcess(tmp_path, {"a": units["a"].url}, timeouts=timeouts) as gate:
        gate.until_up("a")
        assert gate.admin("GET", "/readyz")[0] == 200
        stream = Stream(gate, LONG)
        idle = gate.connect()
        idle.connect()
        gate.signal(signal.SIGTERM)
        assert eventually(lambda: gate.admin("GET", "/readyz")[0] == 503)
        # For a while whoever has not noticed yet is still served, and told to go elsewhere.
        reply = models(gate)
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert eventually(lambda: is_refusing(gate))
        assert gate.process.poll() is None
        assert gate.admin("GET", "/readyz")[0] == 503
        units["a"].release()
        assert stream.is_whole()
        assert gate.exit_code() == 0
        assert "Traceback" not in gate.log
        idle.close()


def test_sighup_takes_units_in_and_out_without_dropping_a_stream(
    units: dict[str, SimUnit], tmp_path: Path
) -> None:
    with GateProcess(tmp_path, {"a": units["a"].url}) as gate:
        gate.until_up("a")
        streams = [Stream(gate, LONG) for _ in range(4)]
        gate.configure({"b": units["b"].url})
        gate.signal(signal.SIGHUP)
        gate.until_up("b")
        after = Stream(gate, tokens=2)
        assert (after.unit, after.is_whole()) == ("b", True)
        assert {stream.unit for stream in streams} == {"a"}
        units["a"].release()
        assert all(stream.is_whole() for stream in streams)
        assert eventually(lambda: "+b, 1 no longer configured is kept" in gate.log)
        assert eventually(lambda: "unit a is kept no longer" in gate.log)
