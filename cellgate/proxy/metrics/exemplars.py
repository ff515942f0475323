"""Exemplars: beside a bucket of a histogram stands one request that fell into it, by the id of its trace.

Only requests that are traced have one, and only the OpenMetrics format can show them:
https://github.com/OpenObservability/OpenMetrics/blob/main/specification/OpenMetrics.md#exemplars
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from prometheus_client.samples import Exemplar

from cellgate.proxy.metrics.histogram import DURATION_BOUNDS_S, TTFT_BOUNDS_S, Buckets

TTFT, DURATION = "ttft_seconds", "request_duration_seconds"
_BOUNDS = {TTFT: TTFT_BOUNDS_S, DURATION: DURATION_BOUNDS_S}


class Traced(NamedTuple):
    """A request that was traced: the unit that answered it, and what was observed."""

    unit: str
    shown: Exemplar


class Exemplars:
    """The latest traced request of each bucket, by family and cell: as many as there are buckets at most."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, str], dict[int, Traced]] = {}

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._latest)

    def note(self, family: str, cell: str, unit: str, value_s: float, trace_id: str) -> None:
        """A traced request was observed."""
        bucket = bisect_left(_BOUNDS[family], value_s)
        shown = Exemplar({"trace_id": trace_id}, value_s, round(time.time(), 3))
        self._latest.setdefault((family, cell), {})[bucket] = Traced(unit, shown)

    def beside(
        self, family: str, cell: str, unit: str | None, buckets: Buckets
    ) -> Sequence[Sequence[object]]:
        """The buckets of one row, each with its exemplar, if it has one; `unit` None: those of all units."""
        found = self._latest.get((family, cell))
        if not found:
            return buckets
        return [
            (*bucket, traced.shown)
            if (traced := found.get(number)) is not None and unit in (None, traced.unit)
            else bucket
            for number, bucket in enumerate(buckets)
        ]
