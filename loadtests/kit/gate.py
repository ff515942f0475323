"""The gate as a process of its own, for drills: started before simulated units, known from outside only.

What must stay true: all that is reported of it comes from its admin port and from /proc.
"""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import yaml

from loadtests.kit import processes
from loadtests.kit.agents import Agents
from loadtests.kit.waiting import wait_until
from loadtests.wire.blocking import fetch
from loadtests.wire.reply import Reply

TOKEN = "drill"
"""Its admin token: with it a request may name its unit, and a router its gates' units."""
_UP_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True)
class Vitals:
    """What must return to where it was: counts of the gate's own metrics, and of its process."""

    clients: int
    unit_connections: int
    in_flight: int
    waiting: int
    descriptors: int
    threads: int
    tasks: int
    rss_mb: float


class Program(NamedTuple):
    """A version of the gate: the words before `serve`, and where they are run (None: here)."""

    words: tuple[str, ...]
    folder: Path | None = None


THIS = Program((sys.executable, "-m", "cellgate"))


class Served(Protocol):
    """What the gate needs to know of a unit."""

    @property
    def name(self) -> str: ...
    @property
    def url(self) -> str: ...


class Named(NamedTuple):
    """A unit of which nothing else is known."""

    name: str
    url: str


class GateProcess:
    """`python -m cellgate serve` before `units`. A context manager: inside, every unit is up.

    `nodes` gives the `nodes` of a unit by its name, as the gate's file has them; with `agents` they are those
    that have one. `cell` gives a unit's cell; `settings` are keys of that file, and win over those made here;
    `operator` are those of the operator's file.
    Units with one of `roles` move KV blocks within their cell; `more` has other keys of units by their names.
    `files` is the most descriptors it may have; with `unread_log` what it prints goes into a pipe that nobody
    reads. `program` is what the next start runs.
    """

    def __init__(
        self,
        units: Sequence[Served],
        *,
        max_in_flight: int = 256,
        agents: Agents | None = None,
        nodes: Callable[[str], Sequence[Mapping[str, object]]] = lambda _: (),
        cell: Callable[[str], str] = lambda _: "drill",
        settings: Mapping[str, object] | None = None,
        operator: Mapping[str, object] | None = None,
        access_log: str = "off",
        files: int | None = None,
        unread_log: bool = False,
        program: Program = THIS,
        roles: Mapping[str, str] | None = None,
        more: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        self._units = units
        self._max_in_flight = max_in_flight
        self._nodes = agents.nodes if agents else nodes
        self._cell = cell
        self._settings = dict(settings or {})
        self._operator = operator
        self._roles = roles or {}
        self._more = more or {}
        self._access_log = access_log
        self._files = files
        self._unread_log = unread_log
        self.program = program
        self._folder = tempfile.TemporaryDirectory(prefix="drill-")
        self.log = Path(self._folder.name) / "gate.log"
        self.port, self.admin_port = processes.free_port(), processes.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.pid = 0

    def __enter__(self) -> Self:
        config = Path(self._folder.name) / "cellgate.yaml"
        (Path(self._folder.name) / "token").write_text(TOKEN)
        if self._operator is not None:
            operator = config.with_name("operator.yaml")
            operator.write_text(yaml.safe_dump(self._operator))
            self._settings["operator"] = str(operator)
        config.write_text(yaml.safe_dump(self._configuration()))
        limit = [] if self._files is None else ["prlimit", f"--nofile={self._files}"]
        self._limit = limit
        self._serve = ["serve", "--access-log", self._access_log, "-c", str(config)]
        if self._unread_log:
            os.mkfifo(self.log)
            self._pipe = os.open(self.log, os.O_RDWR)
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def restart(self) -> None:
        """As a rolling update does: stop in good order, then start the successor on the same ports."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(_STOP_TIMEOUT_S)
        self.log = self.log.with_name(f"{self.log.stem}-again.log")
        self._start()

    def drain(self, unit: str, *, undo: bool = False) -> None:
        """Take a unit out of rotation, or let it come back."""
        self._ask(f"/units/{unit}/{'undrain' if undo else 'drain'}", b"")

    def metrics(self) -> str:
        """The page of /metrics."""
        return self._ask("/metrics").body.decode()

    def events(self) -> list[dict[str, Any]]:
        """All flips so far, oldest first."""
        events: list[dict[str, Any]] = json.loads(self._ask("/events").body)
        return events

    def flips(self, since: float, unit: str | None = None) -> list[dict[str, Any]]:
        """The flips from the wall clock's `since` on, of one unit or of all; `at` is added to each."""
        flips = [
            event | {"at": self.at(event)}
            for event in self.events()
            if event["kind"] == "flip" and unit in (None, event["unit"])
        ]
        # Events tell whole milliseconds.
        return [flip for flip in flips if flip["at"] >= since - 0.001]

    @staticmethod
    def at(event: Mapping[str, Any]) -> float:
        """When an event was, by the wall clock."""
        return datetime.fromisoformat(event["time"]).timestamp()

    def flipped(self, unit: str, after: str, since: float) -> float | None:
        """When a unit first came to be `after` ("down", "up", …) by the wall clock; None: it has not."""
        return next((flip["at"] for flip in self.flips(since, unit) if flip["after"] == after), None)

    def units(self) -> list[dict[str, Any]]:
        """What /units shows."""
        units: list[dict[str, Any]] = json.loads(self._ask("/units").body)
        return units

    def is_ready(self) -> bool:
        """Whether /readyz is a 200."""
        return self._ask("/readyz").status == 200

    def cpu_s(self) -> float:
        """CPU time used so far."""
        return processes.cpu_s(self.pid)

    def vitals(self) -> Vitals:
        """How the gate is at this moment."""
        page, proc = self.metrics(), Path(f"/proc/{self.pid}")
        status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines())
        return Vitals(
            clients=int(metric_sum(page, "cellgate_connections", 'side="client"')),
            unit_connections=int(metric_sum(page, "cellgate_connections", 'side="unit"')),
            in_flight=int(metric_sum(page, "cellgate_in_flight")),
            waiting=int(metric_sum(page, "cellgate_waiting")),
            descriptors=len(list((proc / "fd").iterdir())),
            threads=int(status["Threads"]),
            tasks=int(metric_sum(page, "cellgate_tasks")),
            rss_mb=int(status["VmRSS"].split()[0]) / 1024,
        )

    def _configuration(self) -> dict[str, object]:
        cells: dict[str, list[object]] = {}
        transfer = {"transfer": "nixl"} if self._roles else {}
        for unit in self._units:
            cells.setdefault(self._cell(unit.name), []).append(self._unit(unit))
        listen, admin = f"127.0.0.1:{self.port}", f"127.0.0.1:{self.admin_port}"
        return {
            "listen": listen,
            "admin": admin,
            "admin_token_file": str(Path(self._folder.name) / "token"),
            "cells": [{"name": name, "units": units, **transfer} for name, units in cells.items()],
            **self._settings,
        }

    def _unit(self, unit: Served) -> dict[str, object]:
        entry: dict[str, object] = {"name": unit.name, "url": unit.url, "max_in_flight": self._max_in_flight}
        if unit.name in self._roles:
            entry["role"] = self._roles[unit.name]
        nodes = list(self._nodes(unit.name))
        return entry | ({"nodes": nodes} if nodes else {}) | dict(self._more.get(unit.name, {}))

    def _start(self) -> None:
        command = [*self._limit, *self.program.words, *self._serve]
        self._process = processes.start(command, self.log, self.program.folder)
        self.pid = self._process.pid
        processes.wait_ready(self._process, self.admin_port, "/readyz", self.log)
        self.wait_up()

    def wait_up(self) -> None:
        """Return when every unit is up. Raises RuntimeError after 60 s, and 0.1 s more for each unit."""
        timeout_s = _UP_TIMEOUT_S + 0.1 * len(self.units())
        if not wait_until(lambda: all(unit["verdict"] == "up" for unit in self.units()), timeout_s):
            raise RuntimeError(f"the units are not all up; the gate said:\n{processes.tail(self.log)}")

    def _ask(self, path: str, body: bytes | None = None) -> Reply:
        return fetch(f"http://127.0.0.1:{self.admin_port}{path}", body)

    def _stop(self) -> None:
        # SIGINT: streams are cut; whoever wanted them has read them by now.
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        processes.stop(self._process)
        if self._unread_log:
            os.close(self._pipe)
        self._folder.cleanup()


def metric_sum(page: str, name: str, label: str = "") -> float:
    """The sum of a metric's samples, or of those that carry a label such as 'unit="a"'."""
    lines = (line for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{")))
    return sum(float(line.rpartition(" ")[2]) for line in lines if label in line)
