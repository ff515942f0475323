"""Simulated units as processes, for tests, drills and `make run`: start one, hurt it, stop it.

What must stay true: after `stop()`, or the death of the process that started it, nothing of a unit is left.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from loadtests.kit import processes
from loadtests.wire.blocking import fetch

_ROOT = Path(__file__).resolve().parents[2]
HELD_OVER_TOKENS = 8
"""Tokens: what asks for no more than a probe, or a test that wants an answer at once, is not held."""
_STOP_TIMEOUT_S = _CONTROL_TIMEOUT_S = 5.0


class SimUnitError(Exception):
    """A simulated unit did not start, or refused a command."""


class SimUnit:
    """One running unit. Also a context manager that stops it."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", options: Mapping[str, object]) -> None:
        self.name = name
        self.pid = process.pid
        self.host = str(options.get("host", "127.0.0.1"))
        self.port = 0
        self.follower_pids: list[int] = []
        self._control_port = 0
        self._process = process
        self._options = dict(options)

    @classmethod
    def start(cls, name: str = "sim", **options: object) -> Self:
        """Start a unit and wait until it listens. `options` are the leader's flags: followers=2, step_ms=5.

        Raises SimUnitError if it ends instead; its reason is on stderr.
        """
        return cls.launch(name, **options).wait_ready()

    @classmethod
    def start_all(cls, names: Sequence[str], hosts: Sequence[str] = (), /, **options: object) -> list[Self]:
        """Start several at the same time, alike but for their names and, where given, their addresses.

        Raises SimUnitError if one does not start; then none is left running.
        """
        own = [{"host": host} for host in hosts] or [{}] * len(names)
        units = [cls.launch(name, **options | each) for name, each in zip(names, own, strict=True)]
        try:
            return [unit.wait_ready() for unit in units]
        except BaseException:
            for unit in units:
                unit.stop()
            raise

    @classmethod
    def launch(cls, name: str, **options: object) -> Self:
        """Start the leader process and return at once; `wait_ready` must follow."""
        return cls(name, _start_leader(name, options), options)

    def wait_ready(self) -> Self:
        """Wait for the line that says where the unit listens."""
        ready = _read_line(self._process)
        if ready is None:
            self.stop()
            raise SimUnitError(f"unit {self.name} did not start, exit status {self._process.returncode}")
        self.port, self._control_port = ready["port"], ready["control_port"]
        self.follower_pids = [follower["pid"] for follower in ready["followers"]]
        return self

    @property
    def url(self) -> str:
        """Where the unit's API is."""
        return f"http://{self.host}:{self.port}"

    def node_pids(self) -> dict[str, int]:
        """The process of each node, the leader's first."""
        followers = {f"{self.name}-{rank}": pid for rank, pid in enumerate(self.follower_pids, start=1)}
        return {f"{self.name}-0": self.pid} | followers

    def fault(self, fault: str, **parameters: float | str) -> dict[str, Any]:
        """Command a fault, such as fault("slow", factor=2) or fault("heal"); return the state after it."""
        return self._control("/sim/fault", {"fault": fault, **parameters})

    def hold(self, over_tokens: int = HELD_OVER_TOKENS) -> dict[str, Any]:
        """Let no answer end that was asked for more tokens than these: each goes on until `release`.

        What is shorter, a canary above all, ends as ever. Return the state after it.
        """
        return self._control("/sim/hold", {"over_tokens": over_tokens})

    def release(self) -> dict[str, Any]:
        """Let answers end: what is past its length ends with its next token. Return the state after it."""
        return self._control("/sim/release", {})

    def link(self, prefiller: str, fault: str, factor: float = 1.0) -> dict[str, Any]:
        """Hurt or heal the link from a prefiller: link("p1", "cut"); return all links after it."""
        return self._control("/sim/link", {"prefiller": prefiller, "fault": fault, "factor": factor})

    def state(self) -> dict[str, Any]:
        """How the unit is: queues, counts, faults."""
        return self._control("/sim/state")

    def signal_follower(self, number: signal.Signals, rank: int = 1) -> None:
        """Send a signal to a follower: SIGSTOP wedges the unit, SIGCONT heals it, SIGKILL breaks it."""
        os.kill(self.follower_pids[rank - 1], number)

    def is_running(self) -> bool:
        """Whether the leader's process runs."""
        return self._process.poll() is None

    def signal_leader(self, number: signal.Signals) -> None:
        """Send a signal to the leader's process alone."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the leader as a lost machine does; the followers die with it."""
        self._process.kill()
        self._process.wait()

    def restart(self) -> float:
        """New processes take the place of the old ones, dead or alive, on the same port: the leader is killed
        only once its successor waits for the port, so nobody listens for a few milliseconds alone.
        Returns the seconds from then until it listened.
        """
        successor = _start_leader(self.name, self._options | {"port": self.port}, "--await-port")
        if _read_line(successor) is None:
            raise SimUnitError(f"the successor of {self.name} ended, exit status {successor.wait()}")
        began_s = time.monotonic()
        if self._process.poll() is None:
            self.kill()
        self._close_pipes()
        self._process, self.pid = successor, successor.pid
        self.wait_ready()
        return time.monotonic() - began_s

    def wait(self, timeout_s: float) -> int:
        """Wait for the leader to end by itself; return its exit status. Raises TimeoutError."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"unit {self.name} still runs after {timeout_s} s") from error

    def stop(self) -> None:
        """End the unit, whatever state it is in, and wait until each of its processes is gone."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._close_pipes()
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        while any(processes.is_running(pid) for pid in self.follower_pids):
            if time.monotonic() > deadline_s:
                raise SimUnitError(f"a follower of {self.name} outlived it: one of {self.follower_pids}")
            time.sleep(0.005)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _control(self, path: str, command: object = None) -> dict[str, Any]:
        body = None if command is None else json.dumps(command).encode()
        reply = fetch(f"http://127.0.0.1:{self._control_port}{path}", body, silence_s=_CONTROL_TIMEOUT_S)
        answer: dict[str, Any] = json.loads(reply.body)
        if reply.status != 200:
            raise SimUnitError(f"unit {self.name} refused {command}: {answer['error']['message']}")
        return answer


@contextmanager
def sim_units(
    names: Sequence[str], hosts: Sequence[str] = (), /, **options: object
) -> Iterator[list[SimUnit]]:
    """Inside, the units of `SimUnit.start_all` run."""
    with ExitStack() as stack:
        yield [stack.enter_context(unit) for unit in SimUnit.start_all(names, hosts, **options)]


def _start_leader(name: str, options: Mapping[str, object], *switches: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "loadtests.simunit", "--name", name, "--until-stdin-ends"]
    command += [*switches, *(f"--{key.replace('_', '-')}={value}" for key, value in options.items())]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=_ROOT, stdin=pipe, stdout=pipe, start_new_session=True)


def _read_line(process: "subprocess.Popen[bytes]") -> dict[str, Any] | None:
    """The next line of JSON that a leader prints; None when it ends instead."""
    assert process.stdout is not None
    line = process.stdout.readline()
    return json.loads(line) if line else None
