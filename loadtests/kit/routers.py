"""What can stand between the client and the units, and how each is started.

Every router is one process before the same ports, with its own defaults, no access log, and timeouts so long
that none ends a request.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from loadtests.gym.fleets import MODEL
from loadtests.kit import processes
from loadtests.kit.gate import GateProcess, Named
from loadtests.wire.blocking import fetch

ROOT = Path(__file__).parents[2]
_READY_TIMEOUT_S = 30.0
_DURATIONS_S = {"rules": {"slow_start_s": 10.0}}
"""Durations of the gate that stand against the work of units, as they are by default."""
_HAPROXY = """\
global
  nbthread 1
defaults
  mode http
  option http-no-delay
  http-reuse always
  timeout connect 5s
  timeout client 1h
  timeout server 1h
frontend gate
  bind 127.0.0.1:{port}
  default_backend units
backend units
  balance leastconn
  option httpchk GET /health
{servers}
"""


class MissingError(Exception):
    """A router that is not installed; says what to type."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Before which ports a router is started, and what it is told.

    `gate` are keys of the gate's configuration. `speeds` are those of the units, as shares of the model's;
    what is told of them, and to whom, is in ROUTERS.
    """

    ports: Sequence[int]
    folder: Path
    gate: dict[str, Any]
    speeds: Sequence[float]
    speed_up: float


@dataclass(frozen=True, slots=True)
class Running:
    """A router that is ready: where clients go, and whose CPU counts (None: there is no router)."""

    ports: Sequence[int]
    pid: int | None = None


Router = Callable[[Setup], AbstractContextManager[Running]]


@contextmanager
def _direct(setup: Setup) -> Iterator[Running]:
    yield Running(setup.ports)


@contextmanager
def _haproxy(setup: Setup) -> Iterator[Running]:
    if shutil.which("haproxy") is None:
        raise MissingError("not installed; type:  apt-get install haproxy")
    port, config = processes.free_port(), setup.folder / "haproxy.cfg"
    servers = (f"  server unit{n} 127.0.0.1:{each} check" for n, each in enumerate(setup.ports))
    config.write_text(_HAPROXY.format(port=port, servers="\n".join(servers)))
    with started(["haproxy", "-db", "-f", str(config)], port, "/health", setup.folder) as running:
        yield running


@contextmanager
def _cellgate(setup: Setup, *, policy: str = "", told: str = "") -> Iterator[Running]:
    units = [Named(f"unit-{n}", f"http://127.0.0.1:{port}") for n, port in enumerate(setup.ports)]
    entries: list[dict[str, Any]] = [{"name": unit.name, "url": unit.url} for unit in units]
    for entry, speed in zip(entries, setup.speeds, strict=True):
        entry |= _TOLD[told](speed, setup.speed_up)
    settings = {"cells": [{"name": "replay", "units": entries}]} | _sped_up(setup.gate, setup.speed_up)
    if policy:
        settings["policy"] = policy
    with GateProcess(units, settings=settings) as gate:
        yield Running([gate.port], gate.pid)


def _sped_up(given: dict[str, Any], speed_up: float) -> dict[str, Any]:
    """The keys of the gate's file, with durations as short as all others are here; what is given wins."""
    keys = dict(given)
    if speed_up == 1.0:
        return keys
    for section, durations in _DURATIONS_S.items():
        shorter = {name: duration_s / speed_up for name, duration_s in durations.items()}
        keys[section] = shorter | dict(given.get(section, {}))
    return keys


@contextmanager
def rust(setup: Setup, package: str, policy: str) -> Iterator[Running]:
    """sglang-router, SMG or vllm-router: the others began as the first, and they take the same flags."""
    venv = package.replace("_", "-")
    folder = ROOT / f".venv-{venv}"
    if not (folder / "made").exists():
        raise MissingError(f"not installed; type:  make .venv-{venv}/made")
    port = processes.free_port()
    command = [
        str(folder / "bin" / "python"),
        "-m",
        f"{package}.launch_router",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--prometheus-port", str(processes.free_port()), "--policy", policy]
    command += ["--log-level", "error", "--worker-urls"]
    command += [f"http://127.0.0.1:{each}" for each in setup.ports]
    with started(command, port, "/readiness", setup.folder) as running:
        _wait_workers(port, len(setup.ports))
        yield running


_TOLD: dict[str, Callable[[float, float], dict[str, float]]] = {
    "": lambda _speed, _speed_up: {},
    "rate": lambda speed, speed_up: {"prefill_tokens_s": MODEL.prefill_tokens_s * speed * speed_up},
    "weight": lambda speed, _speed_up: {"weight": speed},
}
"""What the gate's file says of a unit of which it is known how fast it is."""

ROUTERS: dict[str, Router] = {
    "cellgate": _cellgate,
    "cellgate told": partial(_cellgate, told="rate"),
    "cellgate weighed": partial(_cellgate, told="weight"),
    "cellgate least_load": partial(_cellgate, policy="least_load"),
    "sglang-router cache_aware": partial(rust, package="sglang_router", policy="cache_aware"),
    "sglang-router power_of_two": partial(rust, package="sglang_router", policy="power_of_two"),
    "smg cache_aware": partial(rust, package="smg", policy="cache_aware"),
    "smg least_load": partial(rust, package="smg", policy="least_load"),
    "vllm-router cache_aware": partial(rust, package="vllm_router", policy="cache_aware"),
    "haproxy leastconn": _haproxy,
    "direct leastconn": _direct,
}


@contextmanager
def started(command: Sequence[str], port: int, path: str, folder: Path) -> Iterator[Running]:
    """A process whose output goes to `folder`, once GET `path` on `port` is a 200."""
    with processes.serving(command, port, path, folder / "router.log") as pid:
        yield Running([port], pid)


def _wait_workers(port: int, count: int) -> None:
    """Readiness is told when one worker is there: wait for all."""
    give_up_at = time.monotonic() + _READY_TIMEOUT_S
    healthy = 0
    while time.monotonic() < give_up_at:
        workers = json.loads(fetch(f"http://127.0.0.1:{port}/workers").body)["workers"]
        healthy = sum(bool(worker["is_healthy"]) for worker in workers)
        if healthy == count:
            return
        time.sleep(0.1)
    raise RuntimeError(f"the router on port {port} has {healthy} healthy workers of {count}")
