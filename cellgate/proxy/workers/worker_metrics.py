"""Metrics of the processes of a gate with workers: their clients, requests and resources."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from typing import Protocol

from prometheus_client import Metric
from prometheus_client.registry import Collector

from cellgate.proxy.metrics.families import counter, gauge, renamed
from cellgate.proxy.workers.protocol import WorkerStatus
from cellgate.proxy.workers.worker_status import resident_bytes


class WorkerTotals:
    """The totals of the workers of one number, including those that have ended."""

    __slots__ = ("_before_s", "_now_s", "clients", "requests", "resident_bytes")

    def __init__(self) -> None:
        self.requests = 0
        self.clients = 0
        self.resident_bytes = 0
        self._before_s = self._now_s = 0.0

    @property
    def cpu_s(self) -> float:
        """CPU used by all of them."""
        return self._before_s + self._now_s

    def take(self, status: WorkerStatus) -> None:
        """The present worker has sent its status."""
        self.clients, self.resident_bytes, self._now_s = status.clients, status.resident_bytes, status.cpu_s

    def end(self) -> None:
        """The worker has ended: its last totals stay added."""
        self._before_s, self._now_s = self.cpu_s, 0.0
        self.clients = self.resident_bytes = 0


class Workers(Protocol):
    """What the control process knows of its workers."""

    totals: dict[int, WorkerTotals]
    """By number, whether there is one now or not."""
    deaths: int
    lost_attempts: int
    """Those that were open at workers which ended."""

    def accepting(self) -> int:
        """How many workers accept."""


class WorkerMetrics(Collector):
    """The metrics of one control process. `restarts`: the number that ended before it."""

    def __init__(self, workers: Workers, restarts: int) -> None:
        self._workers = workers
        self._restarts = restarts

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield from self._deaths()
        yield from self._clients()
        yield from self._resources()

    def _deaths(self) -> Iterator[Metric]:
        workers = self._workers
        yield gauge("workers", "Workers that accept clients.", (), [((), workers.accepting())])
        yield counter(
            "worker_deaths",
            "Workers that ended by themselves; each was replaced.",
            (),
            [((), workers.deaths)],
        )
        yield from renamed(
            "brain_deaths",
            counter(
                "control_process_deaths",
                "Control processes that ended by themselves.",
                (),
                [((), self._restarts)],
            ),
        )
        yield counter(
            "worker_attempts_lost",
            "Attempts on units that were open at workers which ended.",
            (),
            [((), workers.lost_attempts)],
        )

    def _clients(self) -> Iterator[Metric]:
        totals = self._workers.totals.items()
        yield counter(
            "worker_requests",
            "Requests answered, by worker.",
            ("worker",),
            (((str(number),), total.requests) for number, total in totals),
        )
        yield gauge(
            "worker_clients",
            "Clients connected to a worker.",
            ("worker",),
            (((str(number),), total.clients) for number, total in totals),
        )

    def _resources(self) -> Iterator[Metric]:
        totals = self._workers.totals.items()
        used = resource.getrusage(resource.RUSAGE_SELF)
        own_s = used.ru_utime + used.ru_stime
        yield counter(
            "process_cpu_seconds",
            "CPU used by the processes of the gate: the control process, and workers by number.",
            ("process",),
            [(("control",), own_s), *(((str(number),), total.cpu_s) for number, total in totals)],
        )
        yield gauge(
            "process_memory_bytes",
            "Resident memory of the processes of the gate, what they share counted in each.",
            ("process",),
            [
                (("control",), resident_bytes(os.getpid())),
                *(((str(number),), total.resident_bytes) for number, total in totals),
            ],
        )
