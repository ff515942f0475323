"""Successors that are none: whatever they do, they are gone, and the gate is told why."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from cellgate.proxy.handover import HandoverError, hand_over
from loadtests.kit.processes import is_running
from tests.wire.stage import live

IMPORTS = "import os, socket, sys, time; s = socket.socket(fileno=int(os.environ['CELLGATE_HANDOVER'])); "


def successor(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Path:
    """Have this script started as the successor; where it leaves its process id."""
    note = folder / "pid"
    leave = f"open({str(note)!r}, 'w').write(str(os.getpid())); "
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", IMPORTS + leave + script])
    return note


async def attempt(tell: Any = dict, limit_s: float = 10.0) -> str:
    with pytest.raises(HandoverError) as caught:
        await hand_over({}, tell, list, limit_s)
    return str(caught.value)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("sys.exit(3)", "it ended with 3 before it was ready; its output is in the log above"),
        ("s.send(b'h'); sys.exit(0)", "it ended with 0 before it was ready; its output is in the log above"),
        ("s.send(b'GET'); time.sleep(60)", "it was killed, because its sockets could not be passed to it: "),
        ("s.close(); time.sleep(60)", "it was killed, because its sockets could not be passed to it: "),
        ("s.send(b'h'); time.sleep(60)", "it was not ready within 5 s and was killed"),
    ],
)
def test_what_is_no_gate_is_gone(
    script: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = successor(monkeypatch, tmp_path, script)

    @live
    async def test() -> None:
        assert (await attempt(limit_s=5.0)).startswith(why)

    test()
    assert not is_running(int(note.read_text()))


def test_a_fault_of_the_gates_own_ends_the_successor_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = successor(monkeypatch, tmp_path, "s.send(b'h'); time.sleep(60)")

    @live
    async def test() -> None:
        def bug() -> None:
            raise KeyError("bug")

        assert "KeyError('bug')" in await attempt(tell=bug)

    test()
    assert not is_running(int(note.read_text()))


def test_a_program_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")

    @live
    async def test() -> None:
        assert "it could not be started: " in await attempt()

    test()


def test_a_hand_over_that_is_cancelled_ends_the_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = successor(monkeypatch, tmp_path, "s.send(b'h'); time.sleep(60)")

    @live
    async def test() -> None:
        handing_over = asyncio.create_task(hand_over({}, dict, list, 10.0))
        while not note.exists() or not note.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        handing_over.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handing_over

    before = len(os.listdir("/proc/self/fd"))
    test()
    assert not is_running(int(note.read_text()))
    assert len(os.listdir("/proc/self/fd")) == before
