"""Simulated units as processes, for tests, drills and `make run`: start one, hurt it, stop it.

What must stay true: after `stop()`, or the death of the process that started it, nothing of a unit is left.
"""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_ROOT = Path(__file__).resolve().parents[2]
_STOP_TIMEOUT_S = 5.0


class SimUnitError(Exception):
    """A simulated unit did not start, or refused a command."""


class SimUnit:
    """One running unit. Also a context manager that stops it."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]") -> None:
        self.name = name
        self.pid = process.pid
        self.port = 0
        self.follower_pids: list[int] = []
        self._control_port = 0
        self._process = process

    @classmethod
    def start(cls, name: str = "sim", **options: object) -> Self:
        """Start a unit and wait until it listens. `options` are the leader's flags: followers=2, step_ms=5.

        Raises SimUnitError if it ends instead; its reason is on stderr.
        """
        return cls.launch(name, **options).wait_ready()

    @classmethod
    def start_all(cls, names: Sequence[str], **options: object) -> list[Self]:
        """Start several alike at the same time. If one does not start: SimUnitError, none left running."""
        units = [cls.launch(name, **options) for name in names]
        try:
            return [unit.wait_ready() for unit in units]
        except SimUnitError:
            for unit in units:
                unit.stop()
            raise

    @classmethod
    def launch(cls, name: str, **options: object) -> Self:
        """Start the leader process and return at once; `wait_ready` must follow."""
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        command = [
            sys.executable,
            "-m",
            "loadtests.simunit",
            "leader",
            "--name",
            name,
            "--until-stdin-ends",
            *flags,
        ]
        return cls(
            name,
            subprocess.Popen(
                command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            ),
        )

    def wait_ready(self) -> Self:
        """Wait for the line that says where the unit listens."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.stop()
            raise SimUnitError(f"unit {self.name} did not start, exit status {self._process.returncode}")
        ready = json.loads(line)
        self.port, self._control_port = ready["port"], ready["control_port"]
        self.follower_pids = [follower["pid"] for follower in ready["followers"]]
        return self

    @property
    def url(self) -> str:
        """Where the unit's API is."""
        return f"http://127.0.0.1:{self.port}"

    def fault(self, fault: str, **parameters: float) -> dict[str, Any]:
        """Command a fault, such as fault("slow", factor=2) or fault("heal"); return the state after it."""
        return self._control("POST", "/sim/fault", {"fault": fault, **parameters})

    def state(self) -> dict[str, Any]:
        """How the unit is: queues, counts, faults."""
        return self._control("GET", "/sim/state", None)

    def signal_follower(self, number: signal.Signals, rank: int = 1) -> None:
        """Send a signal to a follower: SIGSTOP wedges the unit, SIGCONT heals it, SIGKILL breaks it."""
        os.kill(self.follower_pids[rank - 1], number)

    def kill(self) -> None:
        """Kill the leader as a lost machine does; the followers die with it."""
        self._process.kill()
        self._process.wait()

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
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        while any(is_running(pid) for pid in self.follower_pids):
            if time.monotonic() > deadline_s:
                raise SimUnitError(f"a follower of {self.name} outlived it: one of {self.follower_pids}")
            time.sleep(0.005)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.stop()

    def _control(self, method: str, path: str, body: object) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._control_port, timeout=5)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            answer: dict[str, Any] = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200:
            raise SimUnitError(f"unit {self.name} refused {body}: {answer['error']['message']}")
        return answer


def is_running(pid: int) -> bool:
    """Whether `pid` is a process that still executes (a zombie nobody has waited for does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
