"""The status of a worker since its last one: collected while it works, sent once a tick."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from typing import TypeVar

from cellgate.proxy.config.limits import REACHED
from cellgate.proxy.gateway import Gateway
from cellgate.proxy.logs.defects import DEFECTS
from cellgate.proxy.process.tallies import TALLIES
from cellgate.proxy.workers.board_replica import BoardReplica
from cellgate.proxy.workers.protocol import WorkerStatus
from cellgate.proxy.workers.remote_dispatcher import RemoteDispatcher
from cellgate.proxy.workers.remote_reports import RemoteReports
from cellgate.router.step_times import GAPS_MS
from cellgate.router.unit_state import UnitState

K = TypeVar("K")

GAPS_EVERY = 4
"""Gaps between tokens are sent with every fourth tick, because they are used over the last ten seconds."""
_STRETCH = 64
_PAGE_BYTES = resource.getpagesize()


class StatusReporter:
    """One worker's."""

    def __init__(
        self, replica: BoardReplica, gateway: Gateway, dispatcher: RemoteDispatcher, reports: RemoteReports
    ) -> None:
        self._replica = replica
        self._board = replica.board
        self._gateway = gateway
        self._dispatcher = dispatcher
        self._reports = reports
        self._lives: dict[str, float] = {}
        self._gaps: dict[UnitState, list[int]] = {}
        self._ticks = 0
        self._log_dropped = self._ignored = self._forged = 0
        self._limits, self._tallies = dict(REACHED), dict(TALLIES)
        self._defects = 0

    def forget(self, state: UnitState) -> None:
        """The unit is gone."""
        self._gaps.pop(state, None)

    def heard(self, lives: list[tuple[str, float]]) -> None:
        """The control process has got these."""
        self._lives.update(lives)

    def take(self, now: float, lag_s: float, *, is_last: bool = False) -> WorkerStatus:
        """All that has come since the one before."""
        self._ticks += 1
        connections, reports = self._gateway.connections(), self._reports
        log_dropped, ignored, forged = self._gateway.log_dropped(), reports.ignored_lines, reports.forgeries
        cpu_s, resident = _used()
        status = WorkerStatus(
            version=self._replica.version,
            at=now,
            lag_s=lag_s,
            lives=self._new_lives(),
            gaps=self._new_gaps() if is_last or self._ticks % GAPS_EVERY == 0 else [],
            paused=self._dispatcher.pauses(),
            clients=connections["client"],
            connections=connections["unit"],
            cpu_s=cpu_s,
            resident_bytes=resident,
            log_dropped=log_dropped - self._log_dropped,
            ignored=ignored - self._ignored,
            forged=forged - self._forged,
            limits=new_counts(REACHED, self._limits),
            tallies=new_counts(TALLIES, self._tallies),
            defects=DEFECTS.count - self._defects,
        )
        self._defects = DEFECTS.count
        self._log_dropped, self._ignored, self._forged = log_dropped, ignored, forged
        return status

    def _new_lives(self) -> list[tuple[str, float]]:
        known = self._lives
        lives = [(d.unit.name, d.life_at) for d in self._board if d.life_at > known.get(d.unit.name, 0.0)]
        known.update(lives)
        return lives

    def _new_gaps(self) -> list[tuple[str, list[tuple[int, int]]]]:
        found = []
        for state in self._board:
            counts = state.gaps_ms
            before = self._gaps.get(state)
            if before is None:
                before = self._gaps[state] = [0] * GAPS_MS
            if new := _grown(counts, before):
                found.append((state.unit.name, new))
        return found


def new_counts(counts: Mapping[K, int], before: dict[K, int]) -> list[tuple[K, int]]:
    """What was counted since `before`, which is brought up to `counts`."""
    grown = [(name, count - before.get(name, 0)) for name, count in counts.items()]
    before.update(counts)
    return [(name, count) for name, count in grown if count]


def _grown(counts: list[int], before: list[int]) -> list[tuple[int, int]]:
    """Where `counts` have grown since `before`, which is brought up to them. Most have not."""
    grown = []
    for start in range(0, GAPS_MS, _STRETCH):
        stretch = slice(start, start + _STRETCH)
        if counts[stretch] != before[stretch]:
            grown += [
                (ms, counts[ms] - before[ms])
                for ms in range(start, start + _STRETCH)
                if counts[ms] != before[ms]
            ]
            before[stretch] = counts[stretch]
    return grown


def _used() -> tuple[float, int]:
    """CPU seconds and resident bytes of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, resident_bytes(os.getpid())


def resident_bytes(pid: int) -> int:
    """The resident memory of a process; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0
