"""What load tools share: how they wait, look on, and print."""

import asyncio
import signal
import socket
import subprocess
import sys
import time

import pytest

from loadtests.kit import processes, progress
from loadtests.kit.report import columns, run_parts
from loadtests.kit.waiting import repeated, until, wait_until

PATIENCE_S = 5.0


def test_waiting_ends_with_what_was_found() -> None:
    found = iter(["", "", "here"])
    assert wait_until(lambda: next(found), PATIENCE_S, 0.001) == "here"
    found = iter(["", "", "here"])
    assert asyncio.run(until(lambda: next(found), PATIENCE_S, 0.001)) == "here"


def test_waiting_ends_with_patience() -> None:
    assert wait_until(lambda: 0, 0.01, 0.001) == 0
    assert asyncio.run(until(lambda: None, 0.01, 0.001)) is None


def test_a_thread_looks_on_until_it_is_left() -> None:
    looks: list[float] = []
    with repeated(lambda: looks.append(time.monotonic()), 0.001):
        assert wait_until(lambda: len(looks) > 2, PATIENCE_S, 0.001)
    seen = len(looks)
    time.sleep(0.01)
    assert len(looks) == seen


def test_columns_are_as_wide_as_they_must_be() -> None:
    rows = [("", "DOWN"), ("kill", "1"), ("freeze it", "12")]
    assert columns(rows).splitlines() == ["           DOWN", "kill       1", "freeze it  12"]
    numbers = ["           DOWN", "kill          1", "freeze it    12"]
    assert columns(rows, numbers=True).splitlines() == numbers


def test_a_part_that_does_not_hold_makes_the_run_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_parts({"one": list, "two": lambda: ["too slow"]}) == 1
    assert capsys.readouterr().out == "one: passed\ntwo: FAILED\n  ! too slow\n"
    assert run_parts({"one": list}) == 0


def test_a_long_command_tells_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.01)
    told: list[str] = []

    @progress.shown("drill")
    def main() -> int:
        progress.phase("round 2 of 5", lambda: "310 answers")
        wait_until(has_told, PATIENCE_S, 0.001)
        return 7

    def has_told() -> bool:
        told.append(capsys.readouterr().err)
        return "310" in told[-1]

    assert main() == 7
    assert "drill 0:00  round 2 of 5  310 answers\n" in "".join(told)
    assert capsys.readouterr().out == ""


def test_figures_that_cannot_be_told_now_are_left_out() -> None:
    with progress.shown("drill"):
        progress.phase("ends", lambda: str(1 / 0))
        assert progress.line() == "drill 0:00  ends"


def test_a_port_that_is_taken_is_replaced_by_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert processes.usual_or_free(port) not in (0, port)
    assert processes.usual_or_free(port) == port


def test_what_a_command_has_started_is_ended_with_it() -> None:
    code = (
        "import subprocess, time\nfrom loadtests.kit import processes, progress\n"
        "@progress.shown('drill')\ndef main():\n"
        "    child = subprocess.Popen(['sleep', '60'])\n    try:\n"
        "        print(child.pid, flush=True)\n        time.sleep(60)\n"
        "    finally:\n        processes.stop(child)\nmain()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        child = int(command.stdout.readline())
        command.terminate()
        assert command.wait() == 128 + signal.SIGTERM
    assert not processes.is_running(child)
