"""Which processes the agent needs, on a /proc of plain files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cellgate.probes import agent
from cellgate.probes.agent import PATIENCE_S, SETTLE_S, Pattern, PidFile, Port, Proc, ProcessWatch
from tests.unit.probes.machine import SETTLED_S, Machine, pids


def test_before_anything_matches_nothing_is_gone(machine: Machine) -> None:
    """Waiting for an engine to start is no failure of it."""
    status = machine.run(machine.watch(Pattern("engine")), 60.0)
    assert status[:3] == ("absent", "no process matches 'engine'", "")


def test_what_matches_is_needed_once_no_more_has_come_for_a_while(machine: Machine) -> None:
    watch = machine.watch(Pattern("worker"))
    first = machine.spawn("engine worker 0")
    machine.run(watch, 2.5)
    second = machine.spawn("engine worker 1")
    status = machine.run(watch, SETTLE_S - 0.2)
    assert status.state == "absent"
    assert status.reason == "the processes asked for run; waiting until no new one has started for 3 s"
    status = machine.run(watch, 2.0)
    assert status.state == "ok"
    assert pids(status) == [first, second]
    assert len(status.epoch) == 12


def test_each_thing_asked_for_must_be_there(machine: Machine) -> None:
    """An engine starts its parts one after the other."""
    watch = machine.watch(Pattern("api"), Pattern("worker"))
    api = machine.spawn("engine api")
    assert machine.run(watch, 30.0).reason == "no process matches 'worker'"
    worker = machine.spawn("engine worker")
    assert pids(machine.run(watch, SETTLED_S)) == [api, worker]


def test_helpers_that_come_and_go_change_nothing(machine: Machine) -> None:
    watch = machine.watch(Pattern("engine"))
    engine = machine.spawn("engine")
    before = machine.run(watch, SETTLED_S)
    for number in range(20):
        helper = machine.spawn(f"engine helper {number}", parent=engine)
        assert machine.run(watch, 3.0)[:3] == before[:3]
        machine.end(helper)
        assert machine.run(watch, 3.0)[:3] == before[:3]


def test_helpers_that_never_stop_coming_do_not_put_it_off_for_ever(machine: Machine) -> None:
    engine = machine.spawn("engine")
    helpers: list[int] = []

    def churn() -> None:
        helpers.append(machine.spawn(f"engine helper {len(helpers)}", parent=engine))
        if len(helpers) > 8:
            machine.end(helpers[-9])

    status = machine.run(machine.watch(Pattern("engine")), PATIENCE_S + 2.0, churn)
    assert status.state == "ok"
    assert pids(status) == [engine]


@pytest.mark.parametrize(
    "command",
    [
        "/bin/bash -c engine --serve",
        "-sh engine.sh",
        "/usr/bin/tini -- engine",
        "python3 agent.py --match engine",
        "honcho run agent --match=engine",
        "/opt/engine/bin/python -c from multiprocessing.resource_tracker import main",
        "/opt/engine/bin/python torch/_inductor/compile_worker/__main__.py",
    ],
)
def test_wrappers_agents_and_known_helpers_are_not_needed(machine: Machine, command: str) -> None:
    machine.spawn(command)
    engine = machine.spawn("engine --serve")
    assert pids(machine.run(machine.watch(Pattern("engine")), SETTLED_S)) == [engine]


def test_a_fork_with_its_parents_command_line_is_not_needed(machine: Machine) -> None:
    """A pool of helpers looks like that; its own title makes a worker of it."""
    engine = machine.spawn("engine --serve")
    machine.spawn("engine --serve", parent=engine)
    worker = machine.spawn("engine worker", parent=engine)
    assert pids(machine.run(machine.watch(Pattern("engine")), SETTLED_S)) == [engine, worker]


def test_the_agent_does_not_need_itself(machine: Machine) -> None:
    machine.spawn("engine", pid=os.getpid())
    assert machine.run(machine.watch(Pattern("engine")), SETTLED_S).state == "absent"


def test_a_pattern_that_matches_the_world_is_refused(machine: Machine) -> None:
    for number in range(agent.NEEDED_MAX + 1):
        machine.spawn(f"engine {number}")
    status = machine.run(machine.watch(Pattern("engine")), SETTLED_S)
    assert status.reason == "257 processes match, which is too many: use a narrower pattern"


def test_an_agent_that_sees_nobody_says_what_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    status = ProcessWatch([Pattern("engine")], Proc(str(tmp_path / "proc")), lambda: 1.0).look()
    assert status.reason.endswith("(it sees almost no processes: is the process namespace shared?)")


def test_a_pid_file_names_the_needed_process(machine: Machine, tmp_path: Path) -> None:
    """Also a shell, and at once: who writes it down means it."""
    path = tmp_path / "engine.pid"
    watch = machine.watch(PidFile(str(path)))
    assert machine.run(watch, 1.0).reason == f"no process runs under the number in {path}"
    for text in ("", "x", "-1", "99999999"):
        path.write_text(text)
        assert machine.run(watch, 3.0).state == "absent"
    engine = machine.spawn("bash run.sh")
    path.write_text(f"{engine}\n")
    assert pids(machine.run(watch, 1.0)) == [engine]


def test_a_pid_file_is_followed_whoever_it_names(machine: Machine, tmp_path: Path) -> None:
    """Also to a process that was there before the loss."""
    path = tmp_path / "engine.pid"
    old, new = machine.spawn("engine old"), machine.spawn("engine new")
    path.write_text(str(old))
    watch = machine.watch(PidFile(str(path)))
    before = machine.run(watch, SETTLED_S)
    machine.end(old)
    assert machine.run(watch, SETTLED_S).state == "gone"
    path.write_text(str(new))
    after = machine.run(watch, SETTLED_S)
    assert pids(after) == [new]
    assert after.epoch != before.epoch


def test_a_port_names_who_listens_on_it(machine: Machine) -> None:
    """Not its children, who inherited the socket, nor who is connected to it."""
    (machine.root / "net").mkdir()
    (machine.root / "net/tcp").write_text(
        "  sl  local_address rem_address   st tx rx tr tm->when retrnsmt uid timeout inode\n"
        "   0: 0100007F:1F40 00000000:0000 0A 0:0 00:0 0 0 0 777 1\n"
        "   1: 0100007F:1F40 0100007F:9999 01 0:0 00:0 0 0 0 778 1\n"
    )
    server = machine.spawn("engine --port 8000")
    child = machine.spawn("helper", parent=server)
    other = machine.spawn("connected")
    machine.open(server, "/dev/null", "socket:[777]", "socket:[778]")
    machine.open(child, "socket:[777]")
    machine.open(other, "socket:[778]")
    assert pids(machine.run(machine.watch(Port(8000)), SETTLED_S)) == [server]
    nobody = machine.run(machine.watch(Port(8001)), SETTLED_S)
    assert nobody.reason == "no process that this agent may inspect listens on port 8001"
