"""Agents beside the nodes of simulated units: one process each, as on a machine of its own.

What must stay true: each is told a pid file and nothing else, and it is the file that follows a restart.
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import Popen
from typing import Protocol, Self

from loadtests.kit import processes

AGENT = Path(__file__).resolve().parents[2] / "cellgate" / "extras" / "agent.py"
IMAGE = "sha256:one"
"""The image that nodes say they run."""


class Watched(Protocol):
    """A unit whose processes are watched."""

    @property
    def name(self) -> str: ...
    @property
    def host(self) -> str:
        """The address that its nodes have."""
        ...

    def node_pids(self) -> Mapping[str, int]:
        """The process to watch on each node, by the node's name; the leader's first."""
        ...


class Agents:
    """A context manager: inside, there is an agent for each node of `units`."""

    def __init__(self, units: Sequence[Watched]) -> None:
        self._units = units
        self._folder = tempfile.TemporaryDirectory(prefix="agents-")
        self._addresses: dict[str, dict[str, str]] = {}
        self._processes: dict[str, Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            for unit in self._units:
                self.follow(unit)
                self._addresses[unit.name] = {node: self._start(node, unit.host) for node in unit.node_pids()}
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def follow(self, unit: Watched) -> None:
        """Write the unit's pid files again, as its nodes do when they start."""
        for node, pid in unit.node_pids().items():
            draft = self._pid_file(node).with_suffix(".draft")
            draft.write_text(f"{pid}\n")
            draft.replace(self._pid_file(node))

    def pid(self, node: str) -> int:
        """The process of the agent of a node."""
        return self._processes[node].pid

    def restart(self, node: str, image: str) -> None:
        """Start the agent of a node again, where it was; `image` is the digest that it tells."""
        processes.stop(self._processes[node])
        address = next(unit[node] for unit in self._addresses.values() if node in unit)
        self._run(node, address, image)

    def nodes(self, unit: str) -> list[dict[str, object]]:
        """The unit's `nodes` for the gate's file."""
        return [
            {"name": node, "role": "follower" if number else "leader", "agent": address}
            for number, (node, address) in enumerate(self._addresses[unit].items())
        ]

    def _start(self, node: str, host: str) -> str:
        address = f"{host}:{processes.free_port()}"
        self._run(node, address, IMAGE)
        return address

    def _run(self, node: str, address: str, image: str) -> None:
        command = ["env", f"CELLGATE_IMAGE_DIGEST={image}", sys.executable, str(AGENT)]
        command += ["--pid-file", str(self._pid_file(node)), "--listen", address]
        self._processes[node] = processes.start(command, Path(self._folder.name) / f"{node}.log")

    def _pid_file(self, node: str) -> Path:
        return Path(self._folder.name) / f"{node}.pid"

    def _stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            processes.stop(process)
        self._folder.cleanup()
