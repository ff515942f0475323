"""What the agent reads of its node: needed processes, their states and restarts, ranks, and software."""

from __future__ import annotations

import ast
import errno
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cellgate.extras import agent
from cellgate.extras.agent import (
    COUNTERS_MAX,
    DISTRUST_S,
    IMAGE_VARIABLE,
    PATIENCE_S,
    RANKS_MAX,
    SAID_MAX,
    SECRET,
    SETTLE_S,
    Pattern,
    PidFile,
    Port,
    Proc,
    ProcessWatch,
    Status,
    counters_of,
    flags_of,
    ranks_of,
    stack_of,
)
from cellgate.probes import agent_stream, agents
from tests.ras import communicator, missing, rank, ras, status

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


def pids(status: Status) -> list[int]:
    """Which processes are needed."""
    return [needed.pid for needed in status.needed]


API, WORKER_0, WORKER_1 = FIRST + 5, FIRST + 6, FIRST + 7


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


def test_what_matches_is_needed_once_all_is_there_and_no_more_has_come_for_a_while(machine: Machine) -> None:
    """Waiting for an engine to start, which starts its parts one after the other, is no failure of it."""
    watch = machine.watch(Pattern("api"), Pattern("worker"))
    assert machine.run(watch, 60.0)[:3] == ("absent", "no process matches 'api'", "")
    api = machine.spawn("engine api")
    assert machine.run(watch, 5.0).reason == "no process matches 'worker'"
    first = machine.spawn("engine worker 0")
    machine.run(watch, 2.5)
    second = machine.spawn("engine worker 1")
    status = machine.run(watch, SETTLE_S - 0.2)
    assert status.state == "absent"
    assert status.reason == "the processes asked for run; waiting until no new one has started for 3 s"
    status = machine.run(watch, 2.0)
    assert (status.state, pids(status), len(status.epoch)) == ("ok", [api, first, second], 12)


def test_helpers_that_come_and_go_change_nothing(machine: Machine) -> None:
    watch = machine.watch(Pattern("engine"))
    engine = machine.spawn("engine")
    before = machine.run(watch, SETTLED_S)
    for number in range(5):
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


def test_wrappers_agents_known_helpers_and_forks_are_not_needed(machine: Machine) -> None:
    """A pool of helpers has its parent's command line; a title of its own makes a worker."""
    for command in (
        "/bin/bash -c engine --serve",
        "-sh engine.sh",
        "/usr/bin/tini -- engine",
        "python3 agent.py --match engine",
        "honcho run agent --match=engine",
        "/opt/engine/bin/python -c from multiprocessing.resource_tracker import main",
        "/opt/engine/bin/python torch/_inductor/compile_worker/__main__.py",
    ):
        machine.spawn(command)
    machine.spawn("engine", pid=os.getpid())
    assert machine.run(machine.watch(Pattern("engine")), SETTLED_S).state == "absent"
    engine = machine.spawn("engine --serve")
    machine.spawn("engine --serve", parent=engine)
    worker = machine.spawn("engine worker", parent=engine)
    assert pids(machine.run(machine.watch(Pattern("engine")), SETTLED_S)) == [engine, worker]


@pytest.mark.parametrize("name", ["BEAT_S", "LOOK_S", "PRESSURE", "TOKEN_VARIABLE"])
def test_gates_know_what_an_agent_does(name: str) -> None:
    """Its file imports nothing of theirs."""
    assert getattr(agents, name) == getattr(agent, name)
    assert agent_stream.HEARTBEAT == agent.HEARTBEAT


def test_a_line_of_many_processes_fits_what_gates_accept_and_a_pattern_for_all_is_refused(
    machine: Machine,
) -> None:
    for number in range(agent.NEEDED_MAX):
        machine.spawn(f"engine {number}", name="é" * 15)
    status = machine.run(machine.watch(Pattern("engine")), SETTLED_S)
    assert len(status.needed) == agent.NEEDED_MAX
    assert len(status.line()) < 16 * 1024
    machine.spawn("engine more")
    status = machine.run(machine.watch(Pattern("engine")), SETTLED_S)
    assert status.reason == "257 processes match, which is too many: use a narrower pattern"


def test_an_agent_that_sees_nobody_says_what_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    status = ProcessWatch([Pattern("engine")], Proc(str(tmp_path / "proc")), lambda: 1.0).look()
    assert status.reason.endswith("(it sees almost no processes: is the process namespace shared?)")


def test_a_pid_file_names_the_needed_process(machine: Machine, tmp_path: Path) -> None:
    """Also a shell, and at once: who writes it down means it; and one that was there before the loss."""
    path = tmp_path / "engine.pid"
    watch = machine.watch(PidFile(str(path)))
    assert machine.run(watch, 1.0).reason == f"no process runs under the number in {path}"
    for text in ("", "x", "-1", "99999999"):
        path.write_text(text)
        assert machine.run(watch, 3.0).state == "absent"
    old, new = machine.spawn("bash run.sh"), machine.spawn("engine new")
    path.write_text(f"{old}\n")
    before = machine.run(watch, 1.0)
    machine.end(old)
    assert machine.run(watch, SETTLED_S).state == "gone"
    path.write_text(str(new))
    after = machine.run(watch, SETTLED_S)
    assert (pids(before), pids(after)) == ([old], [new])
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


# How the needed processes do: gone, dead, stopped or blocked; and the line the agent sends.


def test_a_process_that_is_gone_is_seen_at_the_next_look(machine: Machine, watch: ProcessWatch) -> None:
    """The worst is told first. A number taken over by another process is not the same."""
    machine.set(API, "T")
    machine.set(WORKER_1, "Z")
    assert machine.run(watch, 0.1).state == "zombie"
    machine.end(WORKER_0)
    status = machine.run(watch, 0.1)
    assert (status.state, status.reason) == ("gone", f"gone: process {WORKER_0} (python)")
    machine.end(API, WORKER_1)
    assert machine.run(watch, 0.1).reason.count("process") == 3
    for number in (API, WORKER_0, WORKER_1):
        machine.spawn("cron", pid=number)
    assert machine.run(watch, 5.0).state == "gone"


@pytest.mark.parametrize(("state", "word"), [("Z", "zombie"), ("T", "stopped"), ("X", "gone")])
def test_the_dead_and_the_stopped_are_seen_at_the_next_look(
    machine: Machine, watch: ProcessWatch, state: str, word: str
) -> None:
    """A stopped one that goes on is well again."""
    before = watch.look()
    machine.set(WORKER_1, state)
    assert machine.run(watch, 0.1).state == word
    if word == "stopped":
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


def test_the_file_runs_on_python_3_8_with_nothing_installed() -> None:
    assert agent.__file__ is not None
    tree = ast.parse(Path(agent.__file__).read_text(encoding="utf-8"), feature_version=(3, 8))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.partition(".")[0] for module in modules} <= sys.stdlib_module_names
    assert all(node.level == 0 for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))


# What the agent makes of processes that are replaced: epochs.


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


@pytest.mark.parametrize("is_zombie", [True, False])
def test_one_worker_started_anew_is_a_new_epoch(
    machine: Machine, watch: ProcessWatch, *, is_zombie: bool
) -> None:
    before = watch.look()
    machine.set(WORKER_0, "Z") if is_zombie else machine.end(WORKER_0)
    machine.run(watch, 1.0)
    fresh = machine.spawn("engine worker 0")
    status = machine.run(watch, SETTLED_S)
    assert pids(status) == [API, WORKER_1, fresh]
    assert status.epoch != before.epoch


@pytest.mark.parametrize(
    "stands_by", [True, False], ids=["a helper that matched all the while", "nobody else"]
)
def test_what_the_others_do_without_for_a_minute_was_a_helper(
    machine: Machine, watch: ProcessWatch, *, stands_by: bool
) -> None:
    """Until then neither those left nor who stood by make up for it. Else a unit that works would be out for
    ever; the new epoch makes canaries decide.
    """
    if stands_by:
        machine.spawn("worker helper")
        machine.run(watch, 5.0)
    before = watch.look()
    machine.end(WORKER_0)
    assert machine.run(watch, DISTRUST_S - 1.0).state == "gone"
    status = machine.run(watch, 1.0 + SETTLED_S)
    assert (status.state, pids(status)) == ("ok", [API, WORKER_1])
    assert status.epoch != before.epoch
    machine.end(API)
    assert machine.run(watch, 2 * DISTRUST_S).state == "gone"


def test_an_agent_started_anew_tells_the_same_epoch(machine: Machine, watch: ProcessWatch) -> None:
    """Which is why it is made of who they are, and of nothing else."""
    again = machine.watch(Pattern("api"), Pattern("worker"))
    assert machine.run(again, SETTLED_S).epoch == watch.look().epoch
    (machine.root / "sys/kernel/random/boot_id").write_text("boot-2\n")
    other = machine.watch(Pattern("api"), Pattern("worker"))
    assert machine.run(other, SETTLED_S).epoch != watch.look().epoch


# What the agent reads of NCCL's RAS service and of sysfs: bounded, and nothing where there is nothing.

EIGHT = [rank(n, f"10.0.0.{n // 4}", 1001) for n in range(8)]
STUCK = [rank(n, f"10.0.0.{n // 4}", 1001 - (n == 5)) for n in range(8)]
STATUS = status(communicator(STUCK))


def test_the_rank_that_has_not_entered_a_collective_is_told() -> None:
    """As are ranks that do not answer and those with errors; a report of any job is bounded."""
    with ras(status(communicator(EIGHT[:2], name="0x9"), communicator(STUCK))) as server:
        whole, part = ranks_of(server.address)
    assert server.commands == ["client protocol 2", "timeout 2", "set format json", "status"]
    assert whole["behind"] == [[5, "10.0.0.1", 1005, "AllReduce", 1000, 1001]]
    assert (whole["size"], whole["behind_count"]) == (8, 1)
    assert whole["launched"] == 8 * (1001 + 4 * 3) - 1
    assert part["behind"] == part["missing"] == part["failed"] == []
    ranks = [*EIGHT[:5], rank(5, "10.0.0.1", 1001, error=6), rank(6, "10.0.0.1", 1001, error=7)]
    with ras(status(communicator(ranks, [missing(7, "10.0.0.1", is_dead=True)]))) as server:
        (told,) = ranks_of(server.address)
    assert told["missing"] == [[7, "10.0.0.1", 1007, True]]
    assert told["failed"] == [[5, "10.0.0.1", 1005, 6]]
    many = [rank(n, "h" * 999, n) for n in range(100)]
    comms = [communicator(many, name=f"0x{n}") for n in range(20)]
    with ras(status(*comms)) as server:
        report = ranks_of(server.address)
    assert len(report) == agent.COMMUNICATORS_MAX
    assert {len(comm["behind"]) for comm in report} == {RANKS_MAX}
    assert report[0]["behind_count"] == 99
    assert len(json.dumps(report)) < 64 << 10


NONSENSE = [b"", b"{", b"[]", b'{"communicators": [{}]}', b"null", b"[" * 100_000]


@pytest.mark.parametrize(("said", "has_json"), [*((said, True) for said in NONSENSE), (STATUS, False)])
def test_nonsense_a_service_without_json_and_a_closed_port_are_nothing(
    said: bytes, *, has_json: bool
) -> None:
    with ras(said, has_json=has_json) as server:
        assert ranks_of(server.address) == []
    assert ranks_of(server.address) == []


@pytest.mark.alone
def test_a_service_that_says_too_much_or_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "RAS_S", 0.3)
    with ras(b"x" * (agent.RAS_BYTES + 1)) as server:
        assert ranks_of(server.address) == []
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert ranks_of(("127.0.0.1", silent.getsockname()[1])) == []
    assert time.monotonic() - began < 2.0


def test_error_counters_of_links_and_devices_are_read_and_bounded(tmp_path: Path) -> None:
    files = {
        "infiniband/mlx5_0/ports/1/counters/link_downed": "2\n",
        "infiniband/mlx5_0/ports/1/counters/port_xmit_data": "123456\n",
        "infiniband/rdmap0s6/ports/1/hw_counters/unresponsive_remote_events": "7\n",
        "infiniband/rdmap0s6/ports/1/hw_counters/rx_drops": "N/A (no PMA)\n",
        "neuron_device/neuron3/stats/hardware/sram_ecc_uncorrected": "1\n",
        "neuron_device/neuron3/neuron_core1/stats/status/timeout/total": "4\n",
        "neuron_device/neuron3/neuron_core1/stats/status/success/total": "99\n",
    }
    many = {f"infiniband/ib{n}/ports/1/counters/symbol_error": "1\n" for n in range(100)}

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / ("class" if name.startswith("inf") else "devices/virtual") / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    write(files)
    assert counters_of(str(tmp_path)) == {
        "mlx5_0/1 link_downed": 2,
        "rdmap0s6/1 unresponsive_remote_events": 7,
        "neuron3 sram_ecc_uncorrected": 1,
        "neuron3/neuron_core1 timeout": 4,
    }
    assert counters_of("/nowhere") == {}
    write(many)
    assert 0 < len(counters_of(str(tmp_path))) <= COUNTERS_MAX


def test_addresses_are_those_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/fib_trie").write_text(
        "Main:\n        |-- 10.0.0.5\n           /32 host LOCAL\n        |-- 10.0.0.255\n"
        "           /32 link BROADCAST\n        |-- 127.0.0.1\n           /32 host LOCAL\n"
    )
    (tmp_path / "net/if_inet6").write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fd000000000000000000000000000007 02 40 00 80     eth0\n"
    )
    assert Proc(str(tmp_path)).addresses() == ["10.0.0.5", "fd00::7"]


# What the agent tells of a node's software: what can be compared, and nothing that is secret.

KEY = b"the token of all agents"
ONE = "vllm serve m --tp 8 --gpu-memory-utilization=0.9 --x -1 --eager --api-key 1"
SAME = "/opt/bin/vllm serve m --api-key 2 --x -1 --eager --gpu-memory-utilization 0.9 --tp=8"
SECRETS = (
    "--api-key sk-live-1234 sk-live-5678",
    "--api-key=sk-live-1234",
    "--apiKey 123456",
    "--hf-token hf_abcdef",
    "--hf_token=hf_abcdef",
    "--admin-api-key 0815",
    "--ssl-keyfile-password hunter2",
    "--db.password hunter2",
    "--api-tokens 4711",
    "--auth-tokens=4711",
    "--kv-transfer-config {'url':'redis://me:hunter2@cache'}",
    "--model https://me:hunter2@mirror/model",
    "OPENAI_API_KEY=sk-live-1234",
    "--middleware Bearer sk-live-1234",
    "sk-live-1234",
)


@pytest.mark.parametrize("given", SECRETS)
def test_no_word_that_may_be_a_secret_is_in_what_is_told(given: str) -> None:
    told = json.dumps(flags_of(["vllm", "serve", *given.split(" "), "--seed", "7"], KEY)).replace(
        "OPENAI_API_KEY=", ""
    )
    name, *values = given.replace("=", " ", 1).split(" ")
    for word in values or [name]:
        assert word not in told
    assert "hunter2" not in told
    assert '"flag --seed": "7"' in told


def test_numbers_are_told_words_are_hashed_and_secrets_are_left_out() -> None:
    """A hash depends on the word and on the key."""
    told = flags_of(ONE.split(" "), KEY)
    assert told["program"] == "vllm"
    assert (told["flag --tp"], told["flag --x"], told["flag --eager"]) == ("8", "-1", "")
    assert told["flag --gpu-memory-utilization"] == "0.9"
    assert told["flag --api-key"] == SECRET
    assert told["argument 1"].startswith("#")
    assert told == flags_of(SAME.split(" "), KEY)
    words = ((word, key) for word in ("half", "float") for key in (b"", KEY))
    assert len({flags_of(["e", "--dtype", word], key)["flag --dtype"] for word, key in words}) == 4


def test_a_command_line_of_any_length_gives_a_bounded_report() -> None:
    told = flags_of(["e", *(f"--{'x' * 200}{n}={n}" for n in range(10_000)), "--y", "z" * 10**6], KEY)
    assert len(told) <= 140
    assert max(map(len, told)) <= SAID_MAX + len("flag ")


def test_the_command_is_that_of_the_process_that_started_the_workers(machine: Machine) -> None:
    shell = machine.spawn("sh -c vllm", parent=0)
    front = machine.spawn("/venv/bin/python /venv/bin/vllm serve m --tp 2", parent=shell)
    core = machine.spawn("VLLM::EngineCore", parent=front)
    spawned = machine.spawn("python -c from_multiprocessing_spawn --multiprocessing-fork", parent=core)
    lonely = machine.spawn("VLLM::Worker", parent=0)
    told, nothing = (stack_of(Proc(str(machine.root)), "/nowhere", [pid], b"") for pid in (spawned, lonely))
    assert (told["program"], told["flag --tp"]) == ("vllm", "2")
    assert "program" not in nothing


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("python3.12 -m sglang.launch_server --tp 2", "sglang.launch_server"),
        ("/venv/bin/python /venv/bin/ray start --block", "ray"),
        ("/opt/vllm serve --tp 2", "vllm"),
        ("python -u", "python"),
        ("python -m", "python"),
        ("python", "python"),
    ],
)
def test_the_program_is_what_the_interpreter_runs(command: str, program: str) -> None:
    told = flags_of(command.split(" "), KEY)
    assert told["program"] == program
    assert "flag -m" not in told or program == "python"
    ways = ("/venv/bin/vllm serve m --tp 2", "python /venv/bin/vllm serve m --tp 2")
    assert flags_of(ways[0].split(" "), KEY) == flags_of(ways[1].split(" "), KEY)


def test_packages_drivers_and_the_image_are_told(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(IMAGE_VARIABLE, "sha256:abc")
    pid = machine.spawn("engine --tp 2")
    packages = machine.root / str(pid) / "root/venv/lib/python3.12/site-packages"
    for name in ("vllm-0.11.0", "torch-2.8.0", "nvidia_nccl_cu12-2.28.7", "requests-2.0"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
    (machine.root / str(pid) / "maps").write_text(
        "7f00-7f01 r-xp 0 fe:00 12 /venv/lib/python3.12/site-packages/torch/lib/libtorch.so\n"
    )
    (machine.root / "driver/nvidia").mkdir(parents=True)
    (machine.root / "driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    )
    (tmp_path / "sys/module/efa").mkdir(parents=True)
    (tmp_path / "sys/module/efa/version").write_text("2.13.0g\n")
    told = stack_of(Proc(str(machine.root)), str(tmp_path / "sys"), [pid], b"")
    del told["program"], told["flag --tp"]
    assert told == {
        "package vllm": "0.11.0",
        "package torch": "2.8.0",
        "package nvidia_nccl_cu12": "2.28.7",
        "driver nvidia": "570.86.15",
        "driver efa": "2.13.0g",
        "image": "sha256:abc",
    }
