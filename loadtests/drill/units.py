"""Units that a drill can hurt: simulated ones, and real vLLM on this machine's CPU.

What must stay true: each is known to faults by the names of its nodes alone.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from loadtests.simunit.process import SimUnit
from loadtests.vllm import processes as groups
from loadtests.vllm import unit as vllm
from loadtests.vllm.install import set_up

_START_PATIENCE_S = 600.0
_CUT = "ip rule {} pref 50 from {} blackhole"
"""In the drill's own network: nothing that the address answers finds its way."""
_NODES = {"leader": "leader", "leader_engine": "engine", "follower_worker": "follower-1"}
"""What `loadtests.vllm` calls the processes of a unit, and what a drill does, where it has a
word of its own."""


class SimDrillUnit:
    """A simulated unit."""

    def __init__(self, unit: SimUnit) -> None:
        self._unit = unit
        self.name, self.url, self.host = unit.name, unit.url, unit.host

    def node_pids(self) -> dict[str, int]:
        """The process of each node, the leader's first."""
        return self._unit.node_pids()

    def signal(self, node: str, number: signal.Signals) -> None:
        """A signal to one process; the engine, which is a part of the leader's, can stand still and go on."""
        if node == "leader":
            self._unit.signal_leader(number)
        elif node == "engine":
            self.command("freeze_engine" if number is signal.SIGSTOP else "heal")
        else:
            self._unit.signal_follower(number, int(node.partition("-")[2]))

    def command(self, fault: str, **parameters: float) -> None:
        """A fault by the name that the simulated unit knows it by."""
        self._unit.fault(fault, **parameters)

    def restart(self) -> None:
        """New processes on the same port."""
        self._unit.restart()

    def cut_off(self, *, undo: bool = False) -> None:
        """Nothing that its address answers reaches anyone."""
        subprocess.run(_CUT.format("del" if undo else "add", self.host).split(), check=True)

    def hurt_link(self, prefiller: str, fault: str, factor: float = 1.0) -> None:
        """What becomes of KV blocks that it fetches from a prefiller."""
        self._unit.link(prefiller, fault, factor)

    def failures(self) -> dict[str, list[tuple[float, float]]]:
        """Transfers to it that did not arrive, by prefiller."""
        return {prefiller: link["failures"] for prefiller, link in self._unit.state()["links"].items()}

    def held(self) -> int:
        """Prompts whose KV blocks it holds for others."""
        return int(self._unit.state()["moved"]["held"])

    def stop(self) -> None:
        """End it."""
        self._unit.stop()


class UnitProcesses(Protocol):
    """What a real unit consists of."""

    def start(self) -> None:
        """Start them, on the port that they had before."""

    def wait_ready(self) -> None:
        """Return when it takes requests. Raises RuntimeError."""

    def pids(self) -> dict[str, int]:
        """The process of each node."""

    def stop(self) -> None:
        """End every one, whatever state it is in."""


class RealDrillUnit:
    """A unit of an engine that nobody can ask to hurt itself."""

    host = vllm.HOST

    def __init__(self, name: str, url: str, started: UnitProcesses) -> None:
        self.name, self.url = name, url
        self._processes = started
        started.start()

    def node_pids(self) -> dict[str, int]:
        """A node for each process: they share a process table here."""
        return {f"{self.name}-{node}": pid for node, pid in self._processes.pids().items()}

    def signal(self, node: str, number: signal.Signals) -> None:
        """A signal to one process. A follower's is its worker, which computes."""
        pids = self._processes.pids()
        if node not in pids:
            raise RuntimeError(f"{self.name} has no {node}; it has {', '.join(pids)}")
        os.kill(pids[node], number)

    def command(self, fault: str, **_: float) -> None:
        """Nobody can ask it for a fault."""
        raise RuntimeError(f"{self.name} is a real unit: {fault} cannot be commanded")

    def restart(self) -> None:
        """New processes on the same port; returns when they have answered."""
        self.stop()
        self._processes.start()
        self.wait_ready()

    def cut_off(self, *, undo: bool = False) -> None:
        """All real units have one address."""
        raise RuntimeError(f"{self.name} cannot be cut off{' or back on' if undo else ''}")

    def hurt_link(self, prefiller: str, fault: str, factor: float = 1.0) -> None:
        """Nobody can ask it for a fault."""
        raise RuntimeError(f"the link from {prefiller} to {self.name} cannot be hurt: {fault}, {factor}")

    def failures(self) -> dict[str, list[tuple[float, float]]]:
        """It tells of none."""
        return {}

    def held(self) -> int:
        """It tells of none."""
        return 0

    def wait_ready(self) -> None:
        """Return when it takes requests. Raises RuntimeError."""
        self._processes.wait_ready()

    def stop(self) -> None:
        """End every process of it."""
        self._processes.stop()


class VllmProcesses:
    """A leader with its engine and worker, a headless follower with its own."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._unit: vllm.Unit
        self._pids: dict[str, int] = {}

    def start(self) -> None:
        """Start both."""
        self._unit = vllm.start(self._port)

    def wait_ready(self) -> None:
        """Return when it has answered. Raises RuntimeError."""
        give_up_at = time.monotonic() + _START_PATIENCE_S
        while not (self._unit.healthy() and self._unit.warmed_up()):
            if self._unit.lost() or time.monotonic() > give_up_at:
                log = vllm.log_of(self._port, "leader")
                raise RuntimeError(f"{self._unit.name} did not start; the end of {log} says why")
            time.sleep(0.5)
        self._pids = {_NODES.get(role, role): pid for role, pid in self._unit.pids().items()}

    def pids(self) -> dict[str, int]:
        """Those that were there when it was ready: a dead one keeps its place."""
        return self._pids

    def stop(self) -> None:
        """End all."""
        groups.stop({self._unit.leader, self._unit.follower})


DrillUnit = SimDrillUnit | RealDrillUnit


def start_simulated(
    names: Sequence[str], *, followers: int, hosts: bool, timing: Mapping[str, float]
) -> list[DrillUnit]:
    """All of them at the same time; with `hosts`, each on an address of its own."""
    own = [f"127.0.11.{number}" for number in range(1, len(names) + 1)] if hosts else []
    return [SimDrillUnit(unit) for unit in SimUnit.start_all(names, own, followers=followers, **timing)]


def start_vllm(names: Sequence[str], base_port: int) -> list[DrillUnit]:
    """Real units, which takes over a minute."""
    set_up()
    ports = enumerate(names, start=base_port)
    return start_real({name: (f"http://{vllm.HOST}:{port}", VllmProcesses(port)) for port, name in ports})


def start_real(started: Mapping[str, tuple[str, UnitProcesses]]) -> list[DrillUnit]:
    """Units with these names, URLs and processes, all at the same time."""
    units: list[RealDrillUnit] = []
    try:
        units += [RealDrillUnit(name, *each) for name, each in started.items()]
        for unit in units:
            unit.wait_ready()
    except BaseException:
        for unit in units:
            unit.stop()
        raise
    return list(units)
