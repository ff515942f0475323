"""What a scrape shows of the processes of a gate with workers: who has how much, and what they use."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import Metric
from prometheus_client.registry import Collector

from cellgate.proxy.metrics.families import counter, gauge
from cellgate.proxy.workers.accounts import resident_bytes
from cellgate.proxy.workers.protocol import Report

if TYPE_CHECKING:
    from cellgate.proxy.workers.control_process import BrainGate


class Record:
    """What is known of the workers of one number, of those that have ended as well."""

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

    def take(self, report: Report) -> None:
        """The one that is there has told."""
        self.clients, self.resident_bytes, self._now_s = report.clients, report.resident_bytes, report.cpu_s

    def end(self) -> None:
        """It is gone: what it told last stays added."""
        self._before_s, self._now_s = self.cpu_s, 0.0
        self.clients = self.resident_bytes = 0


class WorkerMetrics(Collector):
    """Of a brain. `restarts`: so many ended before it."""

    def __init__(self, brain: BrainGate, restarts: int) -> None:
        self._brain = brain
        self._restarts = restarts

    def collect(self) -> Iterator[Metric]:
        """All families."""
        brain, records = self._brain, self._brain.worker_records.items()
        yield gauge("workers", "Workers that accept clients.", (), [((), brain.accepting())])
        yield counter(
            "worker_deaths",
            "Workers that ended by themselves; each was replaced.",
            (),
            [((), brain.deaths)],
        )
        yield counter("brain_deaths", "Brains that ended by themselves.", (), [((), self._restarts)])
        yield counter(
            "worker_attempts_lost",
            "Attempts on units that were open at workers which ended.",
            (),
            [((), brain.lost_attempts)],
        )
        yield counter(
            "worker_requests",
            "Requests answered, by worker.",
            ("worker",),
            (((str(number),), record.requests) for number, record in records),
        )
        yield gauge(
            "worker_clients",
            "Clients connected to a worker.",
            ("worker",),
            (((str(number),), record.clients) for number, record in records),
        )
        used = resource.getrusage(resource.RUSAGE_SELF)
        own_s = used.ru_utime + used.ru_stime
        yield counter(
            "process_cpu_seconds",
            "CPU used by the processes of the gate: the brain, and workers by number.",
            ("process",),
            [(("brain",), own_s), *(((str(number),), record.cpu_s) for number, record in records)],
        )
        yield gauge(
            "process_memory_bytes",
            "Resident memory of the processes of the gate, what they share counted in each.",
            ("process",),
            [
                (("brain",), resident_bytes(os.getpid())),
                *(((str(number),), record.resident_bytes) for number, record in records),
            ],
        )
