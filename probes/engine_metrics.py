"""The engine's own numbers at `/metrics`: how busy it is, and whether its step counters grow.

The text is scanned for the names needed, never fully parsed: one engine shows thousands of lines. Names as in
vLLM (gauges since 0.4, `gpu_cache_usage_perc` before 0.10) and SGLang (prefix `sglang:` or `sglang_`).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import ClassVar

from probes.base import FetchError, Patient
from router.nouns import Finding, Load

_RUNNING = ("num_requests_running", "num_running_reqs")
_WAITING = ("num_requests_waiting", "num_queue_reqs")
_KV_USE = ("kv_cache_usage_perc", "gpu_cache_usage_perc", "token_usage")
# Only counters that an engine step moves; a front end counts requests even while its engine is frozen.
_PROGRESS = ("iteration_tokens_total_count", "generation_tokens_total", "prompt_tokens_total")
_BORN = "process_start_time_seconds"

_ABSENT = "absent"
"""Note: True when the last reply held none of the names."""

_SAMPLE = re.compile(
    rf"\n({_BORN}|(?:vllm:|sglang[:_])(?:{'|'.join(_RUNNING + _WAITING + _KV_USE + _PROGRESS)}))"
    r"(?:\{[^\n]*\})? ([^ \n]+)".encode()
)
_LIMIT_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """GET /metrics every `period_s`; every `absent_s` from a unit that has none.

    A look that brings no reply is soon repeated: the next one may show the unit's next epoch.
    """

    name: ClassVar[str] = "engine_metrics"
    period_s: float = 1.0
    absent_s: float = 30.0
    timeout_s: float = 2.0

    def limit_s(self, _patient: Patient) -> float:
        """One fetch."""
        return self.timeout_s

    def due_at(self, patient: Patient, last_at: float) -> float:
        """Late for a unit that has no metrics."""
        return last_at + (self.absent_s if patient.notes.get(_ABSENT) else self.period_s)

    async def look(self, patient: Patient) -> AsyncGenerator[Finding, None]:
        """The load, or nothing: absence of metrics says nothing about the unit."""
        own_in_flight = patient.in_flight
        try:
            reply = await patient.fetch("GET", "/metrics", timeout_s=self.timeout_s, max_bytes=_LIMIT_BYTES)
        except FetchError:
            return
        load = (
            scan(reply.body, patient.unit.name, patient.now(), own_in_flight) if reply.status == 200 else None
        )
        patient.notes[_ABSENT] = load is None
        if load is not None:
            yield load


def scan(body: bytes, unit: str, at: float, own_in_flight: int) -> Load | None:
    """The load in a text in Prometheus' format; None when it shows no engine.

    Engines behind one front end (data parallel ranks) are summed; of their KV cache use the fullest counts.
    """
    samples: dict[str, list[float]] = defaultdict(list)
    epoch = None
    for match in _SAMPLE.finditer(b"\n" + body):
        name, text = match[1].decode("ascii"), match[2].decode("ascii", "replace")
        value = _number(text)
        if value is None:
            continue
        if name == _BORN:
            epoch = text
        else:
            samples[re.split("[:_]", name, maxsplit=1)[1]].append(value)
    if not any(name in samples for name in (*_RUNNING, *_WAITING)):
        return None
    return Load(
        unit,
        at,
        running=int(_total(samples, _RUNNING)),
        waiting=int(_total(samples, _WAITING)),
        kv_use=max((value for name in _KV_USE for value in samples[name]), default=0.0),
        own_in_flight=own_in_flight,
        progress=_total(samples, _PROGRESS),
        epoch=epoch,
    )


def _total(samples: dict[str, list[float]], names: tuple[str, ...]) -> float:
    return sum(sum(samples[name]) for name in names)


def _number(text: str) -> float | None:
    """A finite count or share; None for NaN, infinities, negatives and what is no number."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0.0 else None
