"""What the drill of alerts runs: four gates with their units, a Redis, Prometheus and Alertmanager.

The rules are those that are shipped, sped up; Alertmanager has the inhibition rules that are shipped. What
must stay true: nothing outlives the context.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from loadtests.kit import processes
from loadtests.kit.agents import Agents
from loadtests.kit.gate import GateProcess
from loadtests.kit.redis_server import RedisServer
from loadtests.simunit.process import SimUnit, sim_units
from loadtests.up.alerts import MONITORING, RULES, Prometheus, sped_up
from loadtests.wire.blocking import fetch

SCRAPE_S = 1
FILES = 80
"""Descriptors of the gate that is to run short of them."""
_TIMING: dict[str, object] = {"step_ms": 20, "prefill_tokens_per_s": 20_000}


@dataclass(frozen=True, slots=True)
class Scene:
    """One gate and what is behind it."""

    gate: GateProcess
    units: Sequence[SimUnit]
    agents: Agents | None = None
    units_file: Path | None = None
    redis: RedisServer | None = None

    @property
    def instance(self) -> str:
        """What Prometheus calls it."""
        return f"127.0.0.1:{self.gate.admin_port}"


class Alertmanager:
    """One that listens on a port of this machine."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v2/alerts"

    def inhibited(self, instance: str) -> set[str]:
        """The alerts about a gate that it does not pass on, because another one says more."""
        found: list[dict[str, Any]] = json.loads(fetch(self._url).body)
        return {
            alert["labels"]["alertname"]
            for alert in found
            if alert["labels"].get("instance") == instance and alert["status"]["inhibitedBy"]
        }


@dataclass(frozen=True, slots=True)
class World:
    """All of it. `shared`: three units; `alone`: one unit with agents, which recovery cannot restart;
    `crowded`: one unit with one place, few descriptors, a Redis; `poisoned`: units that die of a prompt,
    listed in a file.
    """

    shared: Scene
    alone: Scene
    crowded: Scene
    poisoned: Scene
    prometheus: Prometheus
    alertmanager: Alertmanager

    def scenes(self) -> tuple[Scene, ...]:
        """Each gate."""
        return self.shared, self.alone, self.crowded, self.poisoned


@contextmanager
def world(folder: Path, *, faster: int) -> Iterator[World]:
    """Inside, everything is up, and each gate has been scraped."""
    with ExitStack() as stack:
        scenes = (
            _shared(stack),
            _alone(stack, folder),
            _crowded(stack, folder),
            _poisoned(stack, folder),
        )
        manager = stack.enter_context(_alertmanager(folder))
        prometheus = stack.enter_context(_prometheus(folder, scenes, manager, faster))
        yield World(*scenes, Prometheus(prometheus), Alertmanager(manager))


def _shared(stack: ExitStack) -> Scene:
    units = stack.enter_context(sim_units(["a1", "a2", "a3"], followers=1, **_TIMING))
    return Scene(stack.enter_context(GateProcess(units, cell=lambda _: "shared")), units)


def _alone(stack: ExitStack, folder: Path) -> Scene:
    units = stack.enter_context(sim_units(["b1"], followers=1, **_TIMING))
    agents = stack.enter_context(Agents(units))
    recovery = {
        "cell": "alone",
        "command": ["false"],
        "audit": str(folder / "recovery.jsonl"),
        "after_s": 1,
        "backoff_s": 1,
        "attempts": 1,
    }
    nodes = agents.nodes("b1")
    listed = {"name": "b1", "url": units[0].url, "nodes": nodes}
    settings = {"cells": [{"name": "alone", "units": [listed]}]}
    operator = {"recovery": [recovery]}
    gate = stack.enter_context(GateProcess(units, settings=settings, operator=operator))
    return Scene(gate, units, agents=agents)


def _crowded(stack: ExitStack, folder: Path) -> Scene:
    units = stack.enter_context(sim_units(["c1"], **_TIMING))
    redis_folder = folder / "redis"
    redis_folder.mkdir()
    redis = stack.enter_context(RedisServer(redis_folder))
    settings = {"redis": redis.url}
    gate = GateProcess(units, cell=lambda _: "crowded", max_in_flight=1, files=FILES, settings=settings)
    return Scene(stack.enter_context(gate), units, redis=redis)


def _poisoned(stack: ExitStack, folder: Path) -> Scene:
    units = stack.enter_context(sim_units(["d1", "d2", "d3", "d4"], poison="crash", **_TIMING))
    file = folder / "units.yaml"
    write_units(file, units)
    cells = [{"name": "poisoned", "discover": {"from": "file", "path": str(file)}}]
    gate = stack.enter_context(GateProcess(units, settings={"cells": cells}))
    return Scene(gate, units, units_file=file)


def write_units(file: Path, units: Sequence[SimUnit]) -> None:
    """The file that a cell discovers its units from."""
    file.write_text(yaml.safe_dump({"units": [{"name": unit.name, "url": unit.url} for unit in units]}))


@contextmanager
def _alertmanager(folder: Path) -> Iterator[int]:
    port = processes.free_port()
    command = [
        "prometheus-alertmanager",
        f"--config.file={MONITORING / 'alertmanager.yaml'}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    with processes.serving(command, port, "/-/ready", folder / "alertmanager.log"):
        yield port


@contextmanager
def _prometheus(folder: Path, scenes: Sequence[Scene], manager: int, faster: int) -> Iterator[int]:
    port = processes.free_port()
    (folder / "rules.yaml").write_text(sped_up(RULES.read_text(), faster))
    targets = [scene.instance for scene in scenes]
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(folder / "rules.yaml")],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{manager}"]}]}]},
        "scrape_configs": [{"job_name": "cellgate", "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with processes.serving(command, port, "/-/ready", folder / "prometheus.log"):
        yield port
