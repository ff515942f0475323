"""What one unit still has to do for this gate: prompts to prefill, sequences to decode. Exact and fresh.

Rules:
1. A job is queued until its first token is shown, then decoding, until it is taken out. Sums are those of the
   jobs that are there: when all are gone, all are zero.
2. Prompts are taken to be prefilled one after the other, as engines do: of the one in front a part is done by
   now. One that is overdue is expected to take as long again as it already is: a unit on which nothing moves
   looks busier all the time, not idle.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

WRITTEN_HALF_LIFE_S = 120.0
WRITTEN_STEP_S = 0.5
"""What fades in two minutes need not be faded more often."""


class Job(NamedTuple):
    """One attempt: the tokens that have to be computed before it shows anything, and those it holds in the KV
    cache that others do not.
    """

    uncached_tokens: int
    kv_tokens: int


class Prefilled(NamedTuple):
    """So many tokens were computed in so many seconds in which the unit had prompts to prefill."""

    tokens: int
    busy_s: float


class Work:
    """The jobs of one unit, by the lease (or whatever else stands for the attempt)."""

    __slots__ = (
        "_decoding",
        "_queued",
        "_written",
        "_written_at",
        "batch",
        "front_since",
        "front_tokens",
        "kv_tokens",
        "queued_tokens",
    )

    def __init__(self) -> None:
        self.queued_tokens = 0
        """Uncached tokens of the prompts that have shown nothing yet."""
        self.kv_tokens = 0
        self.batch = 0
        """All jobs: those that decode, and those that will."""
        self.front_tokens = 0
        """Uncached tokens of the prompt that is being computed, since `front_since`."""
        self.front_since = 0.0
        self._written = self._written_at = 0.0
        self._queued: dict[Hashable, Job] = {}
        self._decoding: dict[Hashable, Job] = {}

    @property
    def queued(self) -> int:
        """Prompts that have shown nothing yet."""
        return len(self._queued)

    def open(self, key: Hashable, job: Job, now: float) -> None:
        """An attempt was sent to the unit."""
        if not self._queued:
            self.front_tokens, self.front_since = job.uncached_tokens, now
        if now - self._written_at > WRITTEN_STEP_S:
            self._written, self._written_at = self.written_tokens(now), now
        self._written += job.uncached_tokens
        self._queued[key] = job
        self.batch += 1
        self.queued_tokens += job.uncached_tokens
        self.kv_tokens += job.kv_tokens

    def show(self, key: Hashable, now: float) -> Prefilled | None:
        """The first token has come. None when it was taken out, or has shown one, before."""
        job = self._queued.pop(key, None)
        if job is None:
            return None
        self._decoding[key] = job
        self.queued_tokens -= job.uncached_tokens
        busy_s = max(now - self.front_since, 0.0)
        self._begin_next(now)
        return Prefilled(job.uncached_tokens, busy_s)

    def close(self, key: Hashable, now: float) -> None:
        """The attempt is over, however it ended. Nothing happens the second time."""
        was_in_front = bool(self._queued) and next(iter(self._queued)) == key
        job = self._queued.pop(key, None)
        if job is not None:
            self.queued_tokens -= job.uncached_tokens
        else:
            job = self._decoding.pop(key, None)
        if job is not None:
            self.kv_tokens -= job.kv_tokens
            self.batch -= 1
        if was_in_front:
            # What was computed of it counts for nothing.
            self._begin_next(now)

    def backlog_tokens(self, now: float, tokens_s: float) -> float:
        """Uncached tokens that have yet to be computed, at a prefill rate of so many a second."""
        front = self.front_tokens
        left = abs(front - (now - self.front_since) * tokens_s) if front else 0.0
        return self.queued_tokens - front + left

    def written_tokens(self, now: float) -> float:
        """Uncached tokens sent here of late: new to the prefix cache, and pushing others out of it."""
        return self._written * float(0.5 ** ((now - self._written_at) / WRITTEN_HALF_LIFE_S))

    def _begin_next(self, now: float) -> None:
        self.front_since = now
        self.front_tokens = next(iter(self._queued.values())).uncached_tokens if self._queued else 0
