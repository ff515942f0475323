"""Successors that are none: whatever they do, they are gone, and the gate is told why."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from cellgate.proxy.handover import HandoverError, hand_over
from loadtests.kit.processes import children
from tests.wire.stage import live

IMPORTS = "import os, socket, sys, time; s = socket.socket(fileno=int(os.environ['CELLGATE_HANDOVER'])); "
WAITS = "s.send(b'h'); time.sleep(60)"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process that a test has started."""
    before = children(os.getpid())
    yield
    assert children(os.getpid()) == before


def successor(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have this script started as the successor."""
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", IMPORTS + script])


async def attempt(tell: Any = dict, limit_s: float = 60.0) -> str:
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
    ],
)
@live
async def test_what_is_no_gate_is_gone(script: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    successor(monkeypatch, script)
    assert (await attempt()).startswith(why)


@live
async def test_what_does_not_get_ready_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    successor(monkeypatch, WAITS)
    assert (await attempt(limit_s=0.5)).startswith("it was not ready within 0.5 s and was killed")


@live
async def test_a_fault_of_the_gates_own_ends_the_successor_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug() -> None:
        raise KeyError("bug")

    successor(monkeypatch, WAITS)
    assert "KeyError('bug')" in await attempt(tell=bug)


@live
async def test_a_program_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert "it could not be started: " in await attempt()


@live
async def test_a_hand_over_that_is_cancelled_ends_the_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    successor(monkeypatch, WAITS)
    is_told = asyncio.Event()

    def tell() -> dict[str, object]:
        is_told.set()
        return {}

    before = len(os.listdir("/proc/self/fd"))
    handing_over = asyncio.create_task(hand_over({}, tell, list, 60.0))
    await is_told.wait()
    handing_over.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handing_over
    assert len(os.listdir("/proc/self/fd")) == before
