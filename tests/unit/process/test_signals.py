"""What signals mean to a gate."""

from __future__ import annotations

import asyncio
import configparser
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from cellgate.proxy.config.settings import Timeouts
from cellgate.proxy.process.signals import Signals, notify


class Gate:
    """What was done to it, in order. It ends at once, but for what is `endless`."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.endless = False
        self.announced_before: list[str] | None = None

    def announce_stop(self) -> None:
        self.announced_before = list(self.done)

    async def stop(self, *, delay_s: float, drain_s: float) -> None:
        self.done.append(f"stop {delay_s:g} {drain_s:g}")
        if self.endless and drain_s:
            await asyncio.sleep(60.0)

    async def leave_to_successor(self, *, drain_s: float) -> None:
        self.done.append(f"leave {drain_s:g}")
        if self.endless:
            await asyncio.sleep(60.0)


async def _yes() -> bool:
    return True


def live(gate: Gate, *signals: signal.Signals, hand_over: Callable[[], Awaitable[bool]] = _yes) -> None:
    """The life of a gate that gets these signals, one after the other."""

    async def main() -> None:
        life = Signals(
            gate, Timeouts(drain_delay_s=1.0, drain_s=2.0), lambda: gate.done.append("reload"), hand_over
        )
        running = asyncio.create_task(life.run())
        for number in signals:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.02)
        async with asyncio.timeout(5.0):
            await running

    uvloop.run(main())


TERM, INT, HUP, USR2 = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2


@pytest.mark.parametrize(
    ("signals", "endless", "done"),
    [
        ([TERM], False, ["stop 1 2"]),
        ([INT], False, ["stop 0 0"]),
        ([HUP, HUP, TERM], False, ["reload", "reload", "stop 1 2"]),
        ([TERM, TERM], True, ["stop 1 2", "stop 0 0"]),
        ([TERM, INT], True, ["stop 1 2", "stop 0 0"]),
        ([USR2], False, ["leave 2"]),
        ([USR2, INT], True, ["leave 2", "stop 0 0"]),
        ([USR2, TERM, TERM], True, ["leave 2", "stop 0 0"]),
    ],
)
def test_what_signals_do(signals: list[signal.Signals], endless: bool, done: list[str]) -> None:
    gate = Gate()
    gate.endless = endless
    live(gate, *signals)
    assert gate.done == done


@pytest.mark.parametrize(
    ("signals", "before"),
    [([TERM], []), ([TERM, TERM], []), ([HUP, TERM], ["reload"]), ([INT], None), ([USR2, TERM], None)],
)
def test_a_stop_is_announced_in_the_turn_of_its_signal(
    signals: list[signal.Signals], before: list[str] | None
) -> None:
    gate = Gate()
    gate.endless = True
    live(gate, *signals, INT)
    assert gate.announced_before == before


def test_without_a_successor_it_goes_on() -> None:
    asked = 0

    async def refuse() -> bool:
        nonlocal asked
        asked += 1
        return False

    gate = Gate()
    live(gate, USR2, USR2, HUP, TERM, hand_over=refuse)
    assert (asked, gate.done) == (2, ["reload", "stop 1 2"])


def test_there_is_one_hand_over_at_a_time_and_a_stop_ends_it() -> None:
    events: list[str] = []

    async def slow() -> bool:
        events.append("begun")
        try:
            await asyncio.sleep(60.0)
        finally:
            events.append("ended")
        return True

    gate = Gate()
    live(gate, USR2, USR2, TERM, hand_over=slow)
    assert events == ["begun", "ended"]
    assert gate.done == ["stop 1 2"]


def test_process_1_of_a_container_hands_nothing_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    real = os.getpid()
    kill = os.kill
    monkeypatch.setattr("cellgate.proxy.process.signals.os.getpid", lambda: 1)
    monkeypatch.setattr("os.kill", lambda _, number: kill(real, number))
    live(gate, USR2, TERM)
    assert gate.done == ["stop 1 2"]
    assert "no hand-over: this is process 1" in caplog.text


# systemd.


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_gets_one_datagram(tmp_path: Path, abstract: bool) -> None:
    name = f"cellgate-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + name if abstract else name)
        notify("MAINPID=7", "READY=1", environ={"NOTIFY_SOCKET": f"@{name}" if abstract else name})
        assert systemd.recv(100) == b"MAINPID=7\nREADY=1"


def test_where_nobody_listens_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notify("READY=1", environ={})
    assert caplog.text == ""
    notify("READY=1", environ={"NOTIFY_SOCKET": str(tmp_path / "nobody")})
    assert "systemd could not be notified of READY=1" in caplog.text


def test_the_example_of_a_service_reloads_by_handing_over() -> None:
    service = configparser.ConfigParser(strict=False, interpolation=None)
    service.optionxform = str  # type: ignore[assignment, method-assign]
    service.read(Path(__file__).parents[3] / "deploy" / "systemd" / "cellgate.service")
    assert service["Service"]["Type"] == "notify"
    assert service["Service"]["ExecReload"] == "/bin/kill -USR2 $MAINPID"
    given = Timeouts()
    assert float(service["Service"]["TimeoutStopSec"]) > given.drain_delay_s + given.drain_s
