"""What the agent makes of processes, on a /proc of plain files and a clock set by hand."""

from __future__ import annotations

import ast
import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cellgate.probes import agent
from cellgate.probes.agent import (
    DOUBT_S,
    PATIENCE_S,
    SETTLE_S,
    Pattern,
    PidFile,
    Port,
    Proc,
    ProcessWatch,
    Status,
)

SETTLED_S = SETTLE_S + 1.5
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
FIRST = 50_000_000  # No process of this machine has such a number.


class Machine:
    """A /proc that tests write, and the time since boot."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now_s = 1000.0
        self._next = FIRST
        (root / "sys/kernel/random").mkdir(parents=True)
        (root / "sys/kernel/random/boot_id").write_text("boot-1\n")
        for _ in range(5):
            self.spawn("idle daemon")

    def watch(self, *targets: Any) -> ProcessWatch:
        return ProcessWatch(targets, Proc(str(self.root)), lambda: self.now_s)

    def spawn(self, command: str, parent: int = 1, name: str = "python", pid: int = 0) -> int:
        """Start a process; the words of `command` are its arguments."""
        pid = pid or self._next
        self._next = max(self._next, pid) + 1
        directory = self.root / str(pid)
        (directory / "fd").mkdir(parents=True, exist_ok=True)
        (directory / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")
        (directory / "limits").write_text(
            "Max open files            10                   20             files\n"
        )
        (directory / "start").write_text(str(int(self.now_s * TICKS_PER_S)))
        (directory / "parent").write_text(str(parent))
        self.set(pid, name=name)
        return pid

    def set(self, pid: int, state: str = "S", cpu_ticks: int = 0, name: str = "python") -> None:
        """Let a process be in another state."""
        directory = self.root / str(pid)
        parent, start = ((directory / part).read_text() for part in ("parent", "start"))
        numbers = f"{parent} 0 0 0 0 0 0 0 0 0 {cpu_ticks} 0 0 0 20 0 1 0 {start} 0 0"
        (directory / "stat").write_text(f"{pid} ({name}) {state} {numbers}\n")
        if state == "Z":
            (directory / "cmdline").write_bytes(b"")

    def end(self, *pids: int) -> None:
        """Let processes be gone."""
        for pid in pids:
            (self.root / str(pid)).rename(self.root / f"ended-{pid}-{self._next}")
            self._next += 1

    def open(self, pid: int, *links: str) -> None:
        """Let a process hold these files open, and no others."""
        directory = self.root / str(pid) / "fd"
        for old in directory.iterdir():
            old.unlink()
        for number, link in enumerate(links):
            (directory / str(number)).symlink_to(link)

    def run(
        self, watch: ProcessWatch, for_s: float, meanwhile: Callable[[], object] = lambda: None
    ) -> Status:
        """Look ten times a second; what was seen last."""
        for _ in range(round(for_s * 10)):
            self.now_s += 0.1
            meanwhile()
            status = watch.look()
        return status


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def pids(status: Status) -> list[int]:
    """Which processes are needed."""
    return [needed.pid for needed in status.needed]


# which processes are needed


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
    assert status.reason == "what was asked for runs; waiting until no more of it has come for 3 s"
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
    assert status.reason == "257 processes match, too many to be meant: narrow the pattern"


def test_an_agent_that_sees_nobody_says_what_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    status = ProcessWatch([Pattern("engine")], Proc(str(tmp_path / "proc")), lambda: 1.0).look()
    assert status.reason.endswith("(it sees next to no process: is the process namespace shared?)")


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
    assert nobody.reason == "no process that this agent may look into listens on port 8001"


# how they do


@pytest.fixture
def watch(machine: Machine) -> ProcessWatch:
    """A watch on an api process and two workers, all well."""
    watch = machine.watch(Pattern("api"), Pattern("worker"))
    for command in ("engine api", "engine worker 0", "engine worker 1"):
        machine.spawn(command)
    assert machine.run(watch, SETTLED_S).state == "ok"
    return watch


API, WORKER_0, WORKER_1 = FIRST + 5, FIRST + 6, FIRST + 7


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


# restarts


def test_a_restart_is_a_new_epoch(machine: Machine, watch: ProcessWatch) -> None:
    """Once all is there again and has settled; until then it is gone."""
    before = watch.look()
    machine.end(API, WORKER_0, WORKER_1)
    machine.run(watch, 5.0)
    machine.spawn("engine api")
    assert machine.run(watch, 5.0).state == "gone"
    machine.spawn("engine worker 0")
    assert machine.run(watch, 1.0).state == "gone"
    status = machine.run(watch, SETTLED_S)
    assert status.state == "ok"
    assert status.epoch != before.epoch


def test_one_worker_started_anew_is_a_new_epoch(machine: Machine, watch: ProcessWatch) -> None:
    before = watch.look()
    machine.end(WORKER_0)
    anew = machine.spawn("engine worker 0")
    status = machine.run(watch, SETTLED_S)
    assert pids(status) == [API, WORKER_1, anew]
    assert status.epoch != before.epoch


def test_those_left_do_not_make_up_for_one_that_is_lost(machine: Machine, watch: ProcessWatch) -> None:
    machine.end(WORKER_0)
    assert machine.run(watch, DOUBT_S - 1.0).state == "gone"


def test_what_the_others_do_without_for_a_minute_was_a_helper(machine: Machine, watch: ProcessWatch) -> None:
    """Else a unit that works would be out for ever; the new epoch makes canaries decide."""
    before = watch.look()
    machine.end(WORKER_0)
    status = machine.run(watch, DOUBT_S + SETTLED_S)
    assert (status.state, pids(status)) == ("ok", [API, WORKER_1])
    assert status.epoch != before.epoch
    machine.end(API)
    assert machine.run(watch, 10 * DOUBT_S).state == "gone"


def test_who_stood_by_does_not_take_the_place_of_one_that_is_lost(
    machine: Machine, watch: ProcessWatch
) -> None:
    """A helper that matched all the while."""
    machine.spawn("worker helper")
    machine.run(watch, 5.0)
    machine.end(WORKER_0)
    assert machine.run(watch, DOUBT_S - 1.0).state == "gone"


def test_a_zombie_is_replaced_as_one_that_is_gone(machine: Machine, watch: ProcessWatch) -> None:
    machine.set(WORKER_0, "Z")
    machine.run(watch, 1.0)
    anew = machine.spawn("engine worker 0")
    assert pids(machine.run(watch, SETTLED_S)) == [API, WORKER_1, anew]


def test_an_agent_started_anew_tells_the_same_epoch(machine: Machine, watch: ProcessWatch) -> None:
    """Which is why it is made of who they are, and of nothing else."""
    again = machine.watch(Pattern("api"), Pattern("worker"))
    assert machine.run(again, SETTLED_S).epoch == watch.look().epoch
    (machine.root / "sys/kernel/random/boot_id").write_text("boot-2\n")
    other = machine.watch(Pattern("api"), Pattern("worker"))
    assert machine.run(other, SETTLED_S).epoch != watch.look().epoch


# the line, and the file


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
