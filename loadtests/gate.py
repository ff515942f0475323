"""The gate as a process of its own, for drills: started before simulated units, known from outside only.

What must stay true: all that is reported of it comes from its admin port and from /proc.
"""

import http.client
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from loadtests.bench import processes
from loadtests.simunit.process import SimUnit

_UP_TIMEOUT_S = 20.0


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


class GateProcess:
    """`python -m proxy serve` before `units`. A context manager: inside, every unit is up."""

    def __init__(self, units: Sequence[SimUnit], *, max_in_flight: int = 256) -> None:
        self._units = units
        self._max_in_flight = max_in_flight
        self._folder = tempfile.TemporaryDirectory(prefix="drill-")
        self.log = Path(self._folder.name) / "gate.log"
        self.port, self.admin_port = processes.free_port(), processes.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.pid = 0

    def __enter__(self) -> Self:
        config = Path(self._folder.name) / "cellgate.yaml"
        config.write_text(yaml.safe_dump(self._configuration()))
        command = [sys.executable, "-m", "proxy", "serve", "--access-log", "off", "-c", str(config)]
        self._process = processes.start(command, self.log)
        self.pid = self._process.pid
        try:
            processes.wait_ready(self._process, self.admin_port, "/readyz", self.log)
            self._wait_up()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._stop()

    def metrics(self) -> str:
        """The page of /metrics."""
        return self._get("/metrics").decode()

    def events(self) -> list[dict[str, Any]]:
        """All flips so far, oldest first."""
        events: list[dict[str, Any]] = json.loads(self._get("/events"))
        return events

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
        units = [{"name": u.name, "url": u.url, "max_in_flight": self._max_in_flight} for u in self._units]
        listen, admin = f"127.0.0.1:{self.port}", f"127.0.0.1:{self.admin_port}"
        return {"listen": listen, "admin": admin, "cells": [{"name": "drill", "units": units}]}

    def _wait_up(self) -> None:
        give_up_at = time.monotonic() + _UP_TIMEOUT_S
        while not all(unit["verdict"] == "up" for unit in json.loads(self._get("/units"))):
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"the units are not all up; the gate said:\n{processes.tail(self.log)}")
            time.sleep(0.05)

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port, timeout=10)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()

    def _stop(self) -> None:
        # SIGINT: streams are cut; whoever wanted them has read them by now.
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        processes.stop(self._process)
        self._folder.cleanup()


def metric_sum(page: str, name: str, label: str = "") -> float:
    """The sum of a metric's samples, or of those that carry a label such as 'unit="a"'."""
    lines = (line for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{")))
    return sum(float(line.rpartition(" ")[2]) for line in lines if label in line)
