"""Machines that the agent watches."""

from __future__ import annotations

from pathlib import Path

import pytest

from cellgate.probes.agent import Pattern, ProcessWatch
from tests.unit.probes.machine import SETTLED_S, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def watch(machine: Machine) -> ProcessWatch:
    """A watch on an api process and two workers, all well."""
    watch = machine.watch(Pattern("api"), Pattern("worker"))
    for command in ("engine api", "engine worker 0", "engine worker 1"):
        machine.spawn(command)
    assert machine.run(watch, SETTLED_S).state == "ok"
    return watch
