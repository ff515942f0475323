"""Agents' clients run loops of ten turns while a unit is killed in every second turn: they notice nothing.

They have a venv of their own: they bring some 40 packages, which nothing else here needs.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtests.simunit.process import SimUnit
from tests.processes.test_continued import MODEL
from tests.processes.test_continued import units as units
from tests.real.programs import python_of
from tests.wire.process import GateProcess, eventually, metrics

pytestmark = pytest.mark.nightly

SCRIPTS = {"langchain": "langchain_agent.py"}
"""Those of a venv of their own; the others are in agents_client.py."""
KINDS = {"anthropic": "messages", "langchain": "tools"}
TURNS, TOKENS = 10, 60


@pytest.fixture
def gate(units: list[SimUnit], tmp_path: Path) -> Iterator[GateProcess]:
    # Of a unit that has just come back, its build is not known yet.
    served = {unit.name: unit.url for unit in units}
    with GateProcess(tmp_path, served, continue_across_builds=True) as process:
        process.until_up("a", "b")
        yield process


@pytest.mark.parametrize("sdk", ["anthropic", "openai", "agents", "langchain"])
def test_a_loop_with_a_tool_notices_nothing(sdk: str, gate: GateProcess, units: list[SimUnit]) -> None:
    whole = [said for said, _ in loop(sdk, units[1].url, None, [])]
    told = loop(sdk, gate.url, gate, units)
    assert [said for said, _ in told] == whole
    assert len(whole) == TURNS
    assert [bool(said["calls"]) for said in whole] == [True] * (TURNS - 1) + [False]
    killed = sum(was_killed for _, was_killed in told)
    continued = f'cellgate_continuations_total{{kind="{KINDS.get(sdk, "responses")}",result="continued"}} '
    lines = [line for line in metrics(gate).splitlines() if line.startswith(continued)]
    assert [float(line.removeprefix(continued)) for line in lines] == [killed] == [TURNS // 2]


def loop(sdk: str, url: str, gate: GateProcess | None, units: list[SimUnit]) -> list[tuple[Any, bool]]:
    """What each turn said, and whether its unit was killed in the middle of it."""
    script = Path(__file__).with_name(SCRIPTS.get(sdk, "agents_client.py"))
    venv = python_of(sdk if sdk in SCRIPTS else "agents")
    command = [venv, str(script), sdk, url, MODEL, str(TOKENS)]
    pipes: Any = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    with subprocess.Popen(command, **pipes) as client:
        try:
            told = [turn(client, number, gate, units) for number in range(TURNS)]
            assert client.wait(timeout=30.0) == 0
        finally:
            client.kill()
    return told


def turn(client: Any, number: int, gate: GateProcess | None, units: list[SimUnit]) -> tuple[Any, bool]:
    """In every second turn its unit is killed, and then started again."""
    client.stdin.write("go\n")
    client.stdin.flush()
    assert client.stdout.readline() == "begun\n", client.stderr.read()
    broken = kill_the_one_that_answers(gate, units) if gate is not None and number % 2 else None
    line = client.stdout.readline()
    assert line, client.stderr.read()
    if gate is not None and broken is not None:
        broken.restart()
        gate.until_up(*(unit.name for unit in units))
    return json.loads(line), broken is not None


def kill_the_one_that_answers(gate: GateProcess, units: list[SimUnit]) -> SimUnit:
    """There is one request."""
    assert eventually(lambda: any(unit["in_flight"] for unit in gate.units().values()))
    name = next(name for name, unit in gate.units().items() if unit["in_flight"])
    broken = next(unit for unit in units if unit.name == name)
    broken.kill()
    return broken
