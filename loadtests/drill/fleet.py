"""What a drill's topology says, as processes: units, agents, Redis, gates or another router, an ingress.

What must stay true: leaving it ends every process that it started, whatever state that is in.
"""

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from loadtests.drill import routers
from loadtests.drill.dynamo import DynamoWorker
from loadtests.drill.plan import Topology
from loadtests.drill.units import DrillUnit, start_real, start_simulated, start_vllm
from loadtests.kit.agents import Agents
from loadtests.kit.gate import GateProcess, metric_sum
from loadtests.kit.redis_server import RedisServer
from loadtests.kit.waiting import wait_until

VLLM_BASE_PORT = 8401
_DRAIN_S = 60.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Fleet:
    """A context manager: inside, everything is up and `url` is where requests go. `gates` is empty behind
    another router. `own_addresses`: units can be cut off.
    """

    def __init__(self, topology: Topology, folder: Path, *, own_addresses: bool) -> None:
        self._topology = topology
        self._folder = folder
        self._own_addresses = own_addresses
        self._units: dict[str, DrillUnit] = {}
        self._agents: Agents | None = None
        self._redis = RedisServer(folder)
        self.gates: list[GateProcess] = []
        self.url = ""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with _undisturbed():
            for number, gate in enumerate(self.gates, start=1):
                for log in gate.log.parent.glob("*.log"):
                    shutil.copy(log, self._folder / f"gate-{number}-{log.name}")
            self._stack.close()

    def unit(self, name: str) -> "Hurt":
        """A unit, for faults."""
        return Hurt(self._units[name], self._welcome)

    def decoders(self) -> list[DrillUnit]:
        """The units that fetch KV blocks."""
        roles = self._topology.unit_roles()
        return [unit for name, unit in self._units.items() if roles.get(name, "prefill") != "prefill"]

    def orphans(self) -> int:
        """Prompts whose KV blocks are held for nobody, as gates say, or at all, as units do."""
        held = sum(unit.held() for unit in self._units.values()) if self._topology.roles else 0
        return held + sum(int(metric_sum(gate.metrics(), "cellgate_split_orphans")) for gate in self.gates)

    def roll_units(self) -> None:
        """Each unit in turn: gates stop sending, what runs ends, new processes, gates send again."""
        for name in self._units:
            self._roll_unit(name)

    def _roll_unit(self, name: str) -> None:
        for gate in self.gates:
            gate.drain(name)
        wait_until(lambda: not any(_in_flight(gate, name) for gate in self.gates), _DRAIN_S)
        self.unit(name).restart()
        for gate in self.gates:
            gate.drain(name, undo=True)

    def roll_gates(self) -> None:
        """Each gate in turn, the next one when it is ready."""
        for gate in self.gates:
            gate.restart()

    def stop_redis(self) -> None:
        """As a lost machine does."""
        self._redis.kill()

    def start_redis(self) -> None:
        """Empty, where it was."""
        self._redis.start()

    def _start(self, stack: ExitStack) -> None:
        for unit in self._started_units():
            self._units[unit.name] = unit
            stack.callback(unit.stop)
        if self._topology.agents and self._topology.router == "cellgate":
            self._agents = stack.enter_context(Agents(list(self._units.values())))
        if self._topology.redis:
            stack.enter_context(self._redis)
        starter = routers.ROUTERS[self._topology.router]
        if starter is not None:
            command = starter([unit.url for unit in self._units.values()], self._folder)
            log = self._folder / f"{self._topology.router}.log"
            self.url = stack.enter_context(routers.running(command, log))
            return
        self.gates = [stack.enter_context(self._gate()) for _ in range(self._topology.gates)]
        self.url = self.gates[0].url
        if len(self.gates) > 1:
            command = routers.ingress([(gate.port, gate.admin_port) for gate in self.gates], self._folder)
            log = self._folder / "ingress.log"
            self.url = stack.enter_context(routers.running(command, log, "/v1/models"))

    def _started_units(self) -> list[DrillUnit]:
        topology = self._topology
        if topology.has_own_workers():
            workers = {name: ("", DynamoWorker(name, self._folder)) for name in topology.unit_names()}
            return start_real(workers)
        if topology.engine == "vllm":
            return start_vllm(topology.unit_names(), VLLM_BASE_PORT)
        return start_simulated(
            topology.unit_names(),
            followers=topology.followers,
            hosts=self._own_addresses,
            timing=topology.timing,
        )

    def _gate(self) -> GateProcess:
        settings = dict(self._topology.gate)
        if self._topology.redis:
            settings["redis"] = self._redis.url
        nodes: Callable[[str], list[dict[str, object]]] = self._agents.nodes if self._agents else lambda _: []
        units = list(self._units.values())
        roles = self._topology.unit_roles()
        return GateProcess(units, nodes=nodes, cell=lambda name: name[0], settings=settings, roles=roles)

    def _welcome(self, unit: DrillUnit) -> None:
        """Its processes are new: its agents are told, and the gates take it for UP again."""
        if self._agents is not None:
            self._agents.follow(unit)
        wait_until(lambda: all(_verdict(gate, unit.name) == "up" for gate in self.gates), _DRAIN_S)


class Hurt:
    """A unit whose new processes are welcomed."""

    def __init__(self, unit: DrillUnit, welcome: Callable[[DrillUnit], None]) -> None:
        self._unit = unit
        self._welcome = welcome
        self.signal, self.command, self.cut_off = unit.signal, unit.command, unit.cut_off
        self.hurt_link = unit.hurt_link

    def restart(self) -> None:
        """New processes on the same port; returns when the gates send there again."""
        self._unit.restart()
        self._welcome(self._unit)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Nothing may cut the clean-up short."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _in_flight(gate: GateProcess, unit: str) -> int:
    return int(metric_sum(gate.metrics(), "cellgate_in_flight", f'unit="{unit}"'))


def _verdict(gate: GateProcess, unit: str) -> str:
    return next(str(row["verdict"]) for row in gate.units() if row["name"] == unit)
