"""The last hour of the gate in a few rows of numbers, for the plots of the status page."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from cellgate.proxy.metrics.metrics import Metrics
from cellgate.proxy.metrics.traffic import OWN_ROUTES

STEP_S = 10.0
SAMPLES = 360
"""An hour."""


class Totals(NamedTuple):
    """What has been counted so far: requests of clients, those of them that were refused or failed (5xx and
    429), first tokens and the sum of their times, tokens of answers.
    """

    requests: int
    failed: int
    first_tokens: int
    ttft_s: float
    tokens: int


class HourSample(NamedTuple):
    """One step; rates are for each second. `ttft_s` is the mean, None without a first token."""

    requests: float
    failed: float
    ttft_s: float | None
    tokens: float
    usable: int
    waiting: int


class History:
    """Takes a sample every `STEP_S`. `tokens` is how many tokens of answers were counted, `waiting` how many
    requests wait for a unit.
    """

    def __init__(self, metrics: Metrics, tokens: Callable[[], int], waiting: Callable[[], int]) -> None:
        self._metrics = metrics
        self._tokens = tokens
        self._queue_size = waiting
        self._samples: deque[HourSample] = deque(maxlen=SAMPLES)
        self._before: Totals | None = None
        self._at = 0.0

    def tick(self, now: float) -> None:
        """Called a few times a second."""
        if self._before is None:
            self._before, self._at = self._totals(), now
        elif now - self._at >= STEP_S:
            self._take(self._before, self._totals(), now - self._at)
            self._at = now

    def shown(self) -> dict[str, Any]:
        """A list of each field of `HourSample`, oldest first, ready for JSON."""
        columns = zip(*self._samples, strict=True) if self._samples else [()] * len(HourSample._fields)
        return {"step_s": STEP_S} | dict(zip(HourSample._fields, map(list, columns), strict=True))

    def _take(self, before: Totals, after: Totals, passed_s: float) -> None:
        # A unit that has left takes its counts with it.
        grown = [max(0.0, new - old) for new, old in zip(after, before, strict=True)]
        requests, failed, first_tokens, ttft_s, tokens = grown
        self._before = after
        self._samples.append(
            HourSample(
                requests=round(requests / passed_s, 2),
                failed=round(failed / passed_s, 2),
                ttft_s=round(ttft_s / first_tokens, 4) if first_tokens else None,
                tokens=round(tokens / passed_s, 1),
                usable=sum(state.is_usable() for state in self._metrics.board),
                waiting=self._queue_size(),
            )
        )

    def _totals(self) -> Totals:
        metrics = self._metrics
        work = {key: n for key, n in metrics.responses.items() if key[0] not in OWN_ROUTES}
        ttfts = [tally.ttft for tally in metrics.tallies.values()]
        return Totals(
            requests=sum(work.values()),
            failed=sum(n for (_, status), n in work.items() if status >= 500 or status == 429),
            first_tokens=sum(sum(ttft.counts) for ttft in ttfts),
            ttft_s=sum(ttft.total for ttft in ttfts),
            tokens=self._tokens(),
        )
