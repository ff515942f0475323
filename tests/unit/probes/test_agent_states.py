"""How the needed processes do: gone, dead, stopped or blocked; and the line the agent sends."""

from __future__ import annotations

import ast
import errno
import json
import os
import sys
from pathlib import Path

import pytest

from cellgate.probes import agent
from cellgate.probes.agent import Pattern, ProcessWatch
from tests.unit.probes.machine import API, SETTLED_S, TICKS_PER_S, WORKER_0, WORKER_1, Machine


def test_a_process_that_is_gone_is_seen_at_the_next_look(machine: Machine, watch: ProcessWatch) -> None:
    machine.end(WORKER_0)
    status = machine.run(watch, 0.1)
    assert (status.state, status.reason) == ("gone", f"gone: process {WORKER_0} (python)")
    machine.end(API, WORKER_1)
    assert machine.run(watch, 0.1).reason.count("process") == 3


@pytest.mark.parametrize(("state", "word"), [("Z", "zombie"), ("T", "stopped"), ("X", "gone")])
def test_the_dead_and_the_stopped_are_seen_at_the_next_look(
    machine: Machine, watch: ProcessWatch, state: str, word: str
) -> None:
    machine.set(WORKER_1, state)
    assert machine.run(watch, 0.1).state == word


def test_a_stopped_process_that_goes_on_is_well_again(machine: Machine, watch: ProcessWatch) -> None:
    before = watch.look()
    machine.set(WORKER_1, "T")
    machine.run(watch, 5.0)
    machine.set(WORKER_1, "R")
    assert machine.run(watch, 0.1)[:3] == before[:3]


def test_a_profiler_that_stops_a_process_for_moments_does_no_harm(
    machine: Machine, watch: ProcessWatch
) -> None:
    for _ in range(20):
        machine.set(API, "t")
        assert machine.run(watch, 0.3).state == "ok"
        machine.set(API, "S")
        assert machine.run(watch, 0.1).state == "ok"
    machine.set(API, "t")
    assert machine.run(watch, 1.0).state == "stopped"


def test_waiting_in_the_kernel_counts_when_it_lasts_without_any_cpu(
    machine: Machine, watch: ProcessWatch
) -> None:
    """A process that loads weights waits as well, but gets on."""
    for second in range(20):
        machine.set(WORKER_0, "D", cpu_ticks=second)
        assert machine.run(watch, 1.0).state == "ok"
    status = machine.run(watch, 5.0)
    assert status.state == "blocked"
    assert status.reason.startswith("waiting in the kernel for 5 s without using any CPU: process")


def test_the_worst_is_told_first(machine: Machine, watch: ProcessWatch) -> None:
    machine.set(API, "T")
    machine.set(WORKER_0, "Z")
    assert machine.run(watch, 0.1).state == "zombie"
    machine.end(WORKER_1)
    assert machine.run(watch, 0.1).state == "gone"


def test_a_number_taken_over_by_another_process_is_not_the_same(
    machine: Machine, watch: ProcessWatch
) -> None:
    machine.end(WORKER_0)
    machine.spawn("cron", pid=WORKER_0)
    assert machine.run(watch, 5.0).state == "gone"


def test_what_cannot_be_read_is_not_gone(
    machine: Machine, watch: ProcessWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's own want of descriptors is no death of a process."""

    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", fail)
    assert machine.run(watch, 10.0).state == "ok"


@pytest.mark.parametrize("name", ["a b", "a) R 1 (b", "((", "))", "x\ny"])
def test_names_may_hold_anything(machine: Machine, watch: ProcessWatch, name: str) -> None:
    machine.set(API, "S", name=name)
    machine.set(API, "T", name=name)
    status = machine.run(watch, 0.1)
    assert (status.state, status.needed[0].name) == ("stopped", name.replace("\n", "?"))


def test_open_files_are_told_as_a_share_of_the_limit(machine: Machine, watch: ProcessWatch) -> None:
    machine.open(WORKER_1, *["/dev/null"] * 9)
    status = machine.run(watch, 6.0)
    count = os.stat(machine.root / str(WORKER_1) / "fd").st_size or 9
    assert status.open_files == pytest.approx(count / 10)
    assert status.state == "ok"


def test_the_line_holds_numbers_and_names_but_no_command_line(machine: Machine) -> None:
    engine = machine.spawn("engine --api-key s3cret", name="engine")
    machine.set(engine, cpu_ticks=150, name="engine")
    line = machine.run(machine.watch(Pattern("engine")), SETTLED_S).line()
    assert b"s3cret" not in line
    said = json.loads(line)
    assert said.pop("open_files") is not None
    assert said.pop("epoch")
    assert said == {
        "cellgate_agent": 1,
        "state": "ok",
        "reason": f"running: process {engine} (engine)",
        "processes": [{"pid": engine, "name": "engine", "state": "S", "cpu_s": 150 / TICKS_PER_S}],
    }


def test_a_line_of_many_processes_fits_what_gates_accept(machine: Machine) -> None:
    for number in range(agent.NEEDED_MAX):
        machine.spawn(f"engine {number}", name="é" * 15)
    status = machine.run(machine.watch(Pattern("engine")), SETTLED_S)
    assert len(status.needed) == agent.NEEDED_MAX
    assert len(status.line()) < 16 * 1024


def test_the_file_runs_on_python_3_8_with_nothing_installed() -> None:
    assert agent.__file__ is not None
    tree = ast.parse(Path(agent.__file__).read_text(encoding="utf-8"), feature_version=(3, 8))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.partition(".")[0] for module in modules} <= sys.stdlib_module_names
    assert all(node.level == 0 for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
