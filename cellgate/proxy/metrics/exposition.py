"""Renders the counts of the gate and the state of the Board as Prometheus metric families.

Series that may be watched by an alert exist at zero from the start: Prometheus sees no increase in a series
that is born with its first event.
"""

from __future__ import annotations

import asyncio
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.registry import Collector

from cellgate import VERSION
from cellgate.proxy.config.limits import REACHED
from cellgate.proxy.logs.defects import DEFECTS
from cellgate.proxy.metrics.families import MetricRow, counter, gauge, histogram, renamed
from cellgate.proxy.metrics.metrics import Metrics
from cellgate.router.nouns import Load, Sign, Verdict
from cellgate.router.unit_state import UnitState


class Exposition(Collector):
    """Renders everything at each scrape; has no state.

    `waiting` tells how many requests wait for a unit, `connections` how many connections are open by side
    (`client`, `unit`), `suspended` how much evidence was not counted, `gate_faults` how many connections
    the gate could not open by its own fault; all are called at scrape only.
    """

    def __init__(
        self,
        metrics: Metrics,
        now: Callable[[], float],
        *,
        waiting: Callable[[], int],
        connections: Callable[[], Mapping[str, int]],
        suspended: Callable[[], int] = int,
        gate_faults: Callable[[], int] = int,
    ) -> None:
        self._metrics = metrics
        self._board = metrics.board
        self._now = now
        self._queue_size = waiting
        self._connections = connections
        self._suspended = suspended
        self._gate_faults = gate_faults

    def collect(self) -> Iterator[Metric]:
        """All families of the gate."""
        yield gauge(
            "build_info",
            "Constant 1; the labels describe the running gate.",
            ("version", "python"),
            [_build()],
        )
        yield from self._gate()
        yield from self._units()
        yield from self._judgement()
        yield from self._troubles()
        yield from self._loads()

    def _gate(self) -> Iterator[Metric]:
        m = self._metrics
        yield counter(
            "bytes",
            "Bytes from (in) and to (out) clients.",
            ("direction",),
            [(("in",), m.bytes_in), (("out",), m.bytes_out)],
        )
        yield histogram(
            "loop_lag_seconds", "How late timers of the event loop fire.", (), [((), *m.lag.read())]
        )
        yield gauge(
            "loop_lag_max_seconds",
            "How late the latest timer of the last minute fired.",
            (),
            [((), max(m.last_lags_s, default=0.0))],
        )
        yield gauge(
            "tasks",
            "Running asyncio tasks: probes and the admin port.",
            (),
            [((), len(asyncio.all_tasks()))],
        )
        yield gauge("waiting", "Requests waiting for a unit with room.", (), [((), self._queue_size())])
        yield gauge(
            "connections",
            "Open connections, by peer.",
            ("side",),
            (((side,), n) for side, n in self._connections().items()),
        )

    def _units(self) -> Iterator[Metric]:
        board = self._board
        # A unit that was replaced may be on the Board twice under one name while its last streams end.
        in_flight: Counter[str] = Counter()
        for state in (*board, *board.leaving):
            in_flight[state.unit.name] += state.in_flight
        yield gauge(
            "in_flight",
            "Attempts in flight at a unit.",
            ("unit",),
            (((name,), n) for name, n in in_flight.items()),
        )
        yield gauge(
            "unit_verdict",
            "Verdict of a unit: 1 for the current one, 0 for the others.",
            ("unit", "cell", "verdict"),
            (
                ((state.unit.name, state.unit.cell, verdict.value), state.case.verdict is verdict)
                for state in board
                for verdict in Verdict
            ),
        )
        yield gauge(
            "unit_drained",
            "1 when an operator took the unit out of rotation.",
            ("unit", "cell"),
            (((state.unit.name, state.unit.cell), state.drained) for state in board),
        )

        yield gauge(
            "unit_on_hold",
            "1 while the engine of the unit stands still on purpose, or has yet to show work after that.",
            ("unit", "cell"),
            (((state.unit.name, state.unit.cell), state.hold is not None) for state in board),
        )

    def _judgement(self) -> Iterator[Metric]:
        board = self._board
        yield gauge(
            "unit_degraded",
            "How much slower than the others of its cell a unit is: 0 not at all, 0.5 half as fast.",
            ("unit", "cell"),
            (((state.unit.name, state.unit.cell), state.outlier.degraded) for state in board),
        )
        yield from renamed(
            "unit_doubted",
            gauge(
                "unit_restart_suspected",
                "1 while a unit gets no requests because it may have restarted.",
                ("unit", "cell"),
                (((state.unit.name, state.unit.cell), state.is_restart_suspected()) for state in board),
            ),
        )
        yield gauge(
            "node_up",
            "1 when the last evidence of this source about the node was good.",
            ("unit", "node", "source"),
            (
                ((state.unit.name, node, source), word.sign is Sign.GOOD)
                for state in board
                for (node, source), word in state.last_evidence.items()
                if node is not None
            ),
        )
        yield gauge(
            "panic",
            "1 during panic: units that do not answer are kept in rotation.",
            (),
            [((), board.panic_at is not None)],
        )

    def _troubles(self) -> Iterator[Metric]:
        yield counter(
            "recoveries",
            "Attempts to recover a unit of a cell, by how they ended.",
            ("cell", "result"),
            self._metrics.recoveries.items(),
        )
        yield counter(
            "evidence_suspended",
            "Evidence against units that was not counted because the gate lagged.",
            (),
            [((), self._suspended())],
        )
        yield from renamed(
            "own_troubles",
            counter(
                "gate_faults",
                "Connections that the gate could not open by its own fault, and times it stopped accepting.",
                (),
                [((), self._gate_faults())],
            ),
        )
        yield counter(
            "defects",
            "Unexpected exceptions in the gate; each is in the log.",
            (),
            [((), DEFECTS.count + self._metrics.defects)],
        )
        yield counter(
            "limits",
            "Times that a limit on one client or unit took effect, by limit.",
            ("limit",),
            (((name,), count + self._metrics.limits[name]) for name, count in REACHED.items()),
        )

    def _loads(self) -> Iterator[Metric]:
        known = [(state, state.load) for state in self._board if state.load is not None]
        now = self._now()

        def per_unit(name: str, text: str, value: Callable[[Load], float]) -> Metric:
            return gauge(name, text, ("unit",), ((_unit(state), value(load)) for state, load in known))

        yield per_unit(
            "unit_load_running", "Requests the engine says it is computing.", lambda load: load.running
        )
        yield per_unit(
            "unit_load_waiting", "Requests the engine says it has queued.", lambda load: load.waiting
        )
        yield per_unit(
            "unit_load_kv_use", "Share of the engine's KV cache in use, 0 to 1.", lambda load: load.kv_use
        )
        yield per_unit("unit_load_age_seconds", "How old the engine's report is.", lambda load: now - load.at)


def _build() -> MetricRow:
    return (VERSION, platform.python_version()), 1


def _unit(state: UnitState) -> Sequence[str]:
    return (state.unit.name,)
