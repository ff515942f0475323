"""A gate that hands over to a new process, and one that stops: nobody who connects is lost."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from loadtests.kit.processes import children, end_all, free_port, is_running, send
from loadtests.simunit.process import SimUnit
from tests.processes.test_gate_process import LONG, is_refusing, models
from tests.processes.test_gate_process import long_lived as long_lived
from tests.processes.test_gate_process import units as units
from tests.wire.process import PATIENCE_S, GateProcess, Stream, eventually

TIMEOUTS = {"drain_delay_s": 0, "drain_s": 60}
NOT_READY_S = 1


def less_patient(when: Path) -> str:
    """What a gate runs first: while the file is there, it waits so long for a successor that is not ready."""
    return f"""
from pathlib import Path
from cellgate.proxy import app
hand_over, when = app.hand_over, Path({str(when)!r})
app.hand_over = lambda *known: hand_over(*known[:3], {NOT_READY_S} if when.exists() else known[3])
"""


_SUCCESSOR = re.compile(r"process (\d+) accepts clients")


class Line(GateProcess):
    """A gate and its successors, the last of which is `pid`."""

    @property
    def pids(self) -> list[int]:
        return [self.process.pid, *map(int, _SUCCESSOR.findall(self.log))]

    @property
    def pid(self) -> int:
        return self.pids[-1]

    def hand_over(self) -> None:
        """Replace the last gate, until only its successor accepts. Fails when that gate says there is no
        successor, or nothing for long.
        """
        old, before, refusals = self.pid, len(self.pids), self.log.count("no hand-over")
        send(self.pid, signal.SIGUSR2)
        assert eventually(lambda: len(self.pids) > before or self.log.count("no hand-over") > refusals), (
            self.log
        )
        assert len(self.pids) == before + 1, self.log
        # For some turns of its loop the old one may still accept beside it.
        assert eventually(lambda: not listens(old, self.port)), self.log

    def _end(self) -> None:
        end_all(self.pids)
        super()._end()


def listens(pid: int, port: int) -> bool:
    """Whether a process has a listener on this port."""
    inodes = {
        f"socket:[{line.split()[9]}]"
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
    }
    # It may have ended, or closed one meanwhile.
    with suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(fd) in inodes:
                    return True
    return False


def test_a_successor_takes_over_and_streams_go_on(units: dict[str, SimUnit], tmp_path: Path) -> None:
    """With all that the gate listens on, the port of agent checks too; and those who have a connection."""
    place = "127.0.0.1", free_port()

    def word() -> bytes:
        with socket.create_connection(place, timeout=5) as haproxy:
            haproxy.sendall(b"gate\n")
            return haproxy.recv(200)

    urls = {name: unit.url for name, unit in units.items()}
    with Line(tmp_path, urls, timeouts=TIMEOUTS, agent_check="{}:{}".format(*place)) as gate:
        gate.until_up("a", "b")
        assert gate.admin("POST", "/units/b/drain")[0] == 200
        streams = [Stream(gate, LONG) for _ in range(4)]
        kept = gate.connect()
        kept.request("GET", "/v1/models")
        assert kept.getresponse().read()
        assert b"ready" in word()
        gate.hand_over()
        old, new = gate.pids
        assert eventually(lambda: not listens(old, gate.port) and not listens(old, gate.admin_port))
        assert listens(new, gate.port)
        assert listens(new, gate.admin_port)
        # What the operator said is not forgotten, and what was known is known at once.
        known = gate.units()
        assert (known["a"]["verdict"], known["b"]["drained"]) == ("up", True)
        assert gate.admin("GET", "/readyz")[0] == 200
        assert "connection" not in models(gate).headers
        # Who kept a connection is answered on it by the old gate, and comes to the new one then.
        kept.request("GET", "/v1/models")
        reply = kept.getresponse()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        reply.read()
        kept.close()
        units["a"].release()
        assert all(stream.is_whole() for stream in streams)
        assert gate.exit_code() == 0
        assert b"ready" in word()
        after = Stream(gate, tokens=2)
        assert (after.unit, after.is_whole()) == ("a", True)
        assert "Traceback" not in gate.log


def test_several_in_a_row_while_requests_come_and_systemd_knows_the_main_process(
    units: dict[str, SimUnit], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(PATIENCE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with Line(tmp_path, {"a": units["a"].url}, timeouts=TIMEOUTS) as gate:
            gate.until_up("a")
            assert systemd.recv(100) == b"READY=1"
            for _ in range(3):
                units["a"].hold()
                stream = Stream(gate, LONG)
                gate.hand_over()
                assert systemd.recv(100) == b"MAINPID=%d\nREADY=1" % gate.pid
                assert models(gate).status == 200
                units["a"].release()
                assert stream.is_whole()
            assert eventually(lambda: [is_running(pid) for pid in gate.pids] == [False, False, False, True])
            send(gate.pid, signal.SIGTERM)
            assert systemd.recv(100) == b"STOPPING=1"
            assert eventually(lambda: not is_running(gate.pid))
            assert is_refusing(gate)


def test_a_successor_that_cannot_begin_changes_nothing_and_the_next_may_have_other_units(
    units: dict[str, SimUnit], tmp_path: Path
) -> None:
    """The first cannot read its configuration. The second does not get ready: its only unit is not there."""
    impatience = tmp_path / "impatience"
    with Line(tmp_path, {"a": units["a"].url}, timeouts=TIMEOUTS, first=less_patient(impatience)) as gate:
        gate.until_up("a")
        stream = Stream(gate, LONG)
        (tmp_path / "cellgate.yaml").write_text("cells: nonsense\n")
        gate.signal(signal.SIGUSR2)
        assert eventually(lambda: "no hand-over" in gate.log)
        assert eventually(lambda: "cells: expected a list, found 'nonsense'" in gate.log)
        assert "it ended with 2 before it was ready" in gate.log
        kinds = [event["kind"] for event in gate.admin("GET", "/events")[1]]
        assert kinds[-1] == "handover_failed"
        gate.configure({"c": "http://127.0.0.1:1"})
        impatience.touch()
        gate.signal(signal.SIGUSR2)
        killed = f"no hand-over: it was not ready within {NOT_READY_S} s and was killed"
        assert eventually(lambda: killed in gate.log)
        commands = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children(gate.pid)]
        assert [b"health_process" in command for command in commands] == [True]
        units["a"].release()
        assert stream.is_whole()
        assert models(gate).headers.get("connection") is None
        impatience.unlink()
        gate.configure({"b": units["b"].url})
        gate.hand_over()
        after = Stream(gate, tokens=2)
        assert (after.unit, after.is_whole()) == ("b", True)


# SIGTERM.


@pytest.mark.parametrize("behind_a_hand_over", [False, True])
def test_who_waits_to_be_accepted_when_the_gate_stops_is_answered(
    units: dict[str, SimUnit], tmp_path: Path, behind_a_hand_over: bool
) -> None:
    body = json.dumps({"prompt": "Once", "max_tokens": 3})
    with Line(tmp_path, {"a": units["a"].url}, timeouts=TIMEOUTS) as gate:
        gate.until_up("a")
        if behind_a_hand_over:
            gate.hand_over()
            assert gate.exit_code() == 0
        send(gate.pid, signal.SIGSTOP)
        waiting = [gate.connect() for _ in range(50)]
        for number, connection in enumerate(waiting):
            connection.connect()
            if number % 2:
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        send(gate.pid, signal.SIGTERM)
        send(gate.pid, signal.SIGCONT)
        time.sleep(0.05)
        # Some have yet to send their request, as they would some milliseconds after they were connected.
        for connection in waiting[::2]:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        replies = [connection.getresponse() for connection in waiting]
        assert {(reply.status, reply.headers["connection"]) for reply in replies} == {(200, "close")}
        assert all(reply.read() for reply in replies)
        assert eventually(lambda: not is_running(gate.pid))


def test_nobody_is_reset_while_the_gate_stops(units: dict[str, SimUnit], tmp_path: Path) -> None:
    """Connections one after the other, up to the first that is refused: all before it are answered."""
    timeouts = TIMEOUTS | {"drain_delay_s": 1.0}
    with Line(tmp_path, {"a": units["a"].url}, timeouts=timeouts) as gate:
        gate.until_up("a")
        gate.signal(signal.SIGTERM)
        answered = 0
        while True:
            try:
                assert models(gate).status == 200
                answered += 1
            except ConnectionRefusedError:
                break
        assert answered > 0
        assert gate.exit_code() == 0


def test_what_is_promised_and_does_not_come_is_an_error(tmp_path: Path, units: dict[str, SimUnit]) -> None:
    (tmp_path / "gate.yaml").write_text(
        yaml.safe_dump({"cells": [{"name": "c", "units": [{"name": "a", "url": units["a"].url}]}]})
    )
    command = [sys.executable, "-m", "cellgate", "serve", "-c", str(tmp_path / "gate.yaml")]
    env = {**os.environ, "CELLGATE_HANDOVER": "77"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "cellgate: CELLGATE_HANDOVER=77: nothing can be taken over" in done.stderr


def test_a_listener_with_tls_goes_along(units: dict[str, SimUnit], tmp_path: Path) -> None:
    pem = str(Path(__file__).parents[1] / "wire" / "localhost.pem")
    tls = {"cert": pem, "key": pem}
    trusting = ssl.create_default_context(cafile=pem)

    def ask(gate: Line) -> http.client.HTTPResponse:
        connection = http.client.HTTPSConnection("localhost", gate.port, timeout=10, context=trusting)
        connection.request("GET", "/v1/models")
        reply = connection.getresponse()
        reply.read()
        connection.close()
        return reply

    with Line(tmp_path, {"a": units["a"].url}, timeouts=TIMEOUTS, tls=tls) as gate:
        gate.until_up("a")
        assert ask(gate).status == 200
        gate.hand_over()
        assert gate.exit_code() == 0
        assert ask(gate).status == 200


def test_units_that_are_discovered_are_known_before_the_successor_accepts_clients(
    units: dict[str, SimUnit], tmp_path: Path
) -> None:
    found = tmp_path / "units.yaml"
    found.write_text(yaml.safe_dump({"units": [{"name": "a", "url": units["a"].url}]}))
    cells = [{"name": "c", "discover": {"from": "file", "path": str(found)}}]
    with Line(tmp_path, {}, timeouts=TIMEOUTS, cells=cells) as gate:
        gate.until_up("a")
        for _ in range(2):
            gate.hand_over()
            stream = Stream(gate, tokens=2)
            assert (stream.unit, stream.is_whole()) == ("a", True)
