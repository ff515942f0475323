"""The work of one unit for this gate: prompts to prefill, sequences to decode. Exact and current.

Rules:
1. A job is queued until its first token is shown, then decoding, until it is taken out. Sums are those of the
   jobs that are there: when all are gone, all are zero.
2. Prompts are taken to be prefilled one after the other, as engines do: of the one in front a part is done by
   now. One that is overdue is expected to take as long again as it already is: a unit on which nothing moves
   looks busier all the time, not idle.
3. The latency of a prompt (learning.py) comes before its work, and beside the work of others: who waits for
   less than that for others to be computed waits no longer for it.
4. A prompt had a decode slot for certain if fewer sequences were there than the unit has decoded at once
   before (`peak_batch`). Else it may have waited for another one to end, and its first token says nothing
   about the prefill rate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from math import inf
from typing import NamedTuple

_new = tuple.__new__
WRITTEN_HALF_LIFE_S = 120.0
WRITTEN_STEP_S = 0.5
"""What fades in two minutes need not be faded more often."""
ABANDONED_KEPT = 1024


class Backlog:
    """The jobs of one unit, by lease."""

    def __init__(self) -> None:
        self.queued_tokens = 0
        """Uncached tokens of the prompts that have shown nothing yet."""
        self.kv_tokens = 0
        self.batch = 0
        """All jobs: those that decode, and those that will."""
        self.front_tokens = 0
        """Uncached tokens of the prompt that is being computed, since `front_since`, or will be from then."""
        self.front_since = 0.0
        self._shown_at = 0.0
        self._first: Hashable = None
        self._written = self._written_at = 0.0
        self._queued: dict[Hashable, Job] = {}
        self._area = 0.0
        """The sum of the jobs there were, over time, less `batch` times the present time."""
        self._decoding: dict[Hashable, tuple[Job, float, float, int]] = {}
        """With when it was shown, the area then, and `computed_tokens` then."""
        self.computed_tokens = 0
        """Uncached tokens of all prompts that were ever shown."""
        self.peak_batch = 0.0
        """The most that were decoded at once, others' included."""
        self.cost_inputs: CostInputs | None = None
        """What the cost model has computed of these jobs; None as soon as they are others."""

    @property
    def queued(self) -> int:
        """Prompts that have shown nothing yet."""
        return len(self._queued)

    def open(self, key: Hashable, job: Job, now: float) -> None:
        """An attempt was sent to the unit."""
        tokens, begins_at, queued = job.uncached_tokens, job.begins_at, self._queued
        self.cost_inputs = None
        self._area -= now
        if not queued:
            self.front_tokens, self._shown_at, self._first = tokens, now, key
            self.front_since = begins_at if begins_at > now else now
        if now - self._written_at > WRITTEN_STEP_S:
            self._written, self._written_at = self.written_tokens(now), now
        self._written += tokens
        queued[key] = job
        self.batch += 1
        self.queued_tokens += tokens
        self.kv_tokens += job.kv_tokens

    def show(self, key: Hashable, now: float, foreign: float = 0.0, tells: bool = True) -> Prefilled | None:
        """The first token has come, with so many requests of others there. None when it was taken out, or has
        shown one, before; or when it `tells` nothing of how its prompt was computed.
        """
        queued, decoding, since = self._queued, self._decoding, self.front_since
        job = queued.pop(key, None)
        if job is None:
            return None
        tokens, shown_at = job.uncached_tokens, self._shown_at
        self.cost_inputs = None
        self.computed_tokens = computed = self.computed_tokens + tokens
        decoding[key] = job, now, self._area + self.batch * now, computed
        if (batch := len(decoding) + foreign) > self.peak_batch:
            self.peak_batch = batch
        self.queued_tokens -= tokens
        self.front_since = self._shown_at = now
        if queued:
            self._begin_next(now, job.sent_at)
        else:
            self.front_tokens = 0
        if not tells:
            return None
        return _new(
            Prefilled,
            (
                tokens,
                now - since if now > since else 0.0,
                now - job.sent_at,
                now - shown_at,
                key == self._first,
                since > job.begins_at,
                job.had_slot,
            ),
        )

    def take_as_computed(self, key: Hashable, now: float) -> None:
        """The prompt of an attempt is not ahead of others any more: another unit computes it, or nobody will
        see when it is. It does not change when the one in front began.
        """
        if key in self._queued:
            self._decode(key, self._leave_queue(key, now), now)

    def open_computed(self, key: Hashable, job: Job, now: float) -> None:
        """An attempt was sent to the unit, whose prompt is ahead of nobody."""
        self.open(key, job, now)
        self.take_as_computed(key, now)

    def close(self, key: Hashable, now: float) -> Concurrency:
        """The attempt is over, however it ended. Nothing happens the second time.

        Returns what was there while it was decoded.
        """
        decoded = self._decoding.pop(key, None)
        if decoded is not None:
            job, shown_at, area, computed = decoded
            batch: float = self.batch
            if now > shown_at:
                batch = (self._area + batch * now - area) / (now - shown_at)
            beside = _new(Concurrency, (batch, self.computed_tokens - computed))
        elif key in self._queued:
            job, beside = self._leave_queue(key, now), ALONE
        else:
            return ALONE
        self.cost_inputs = None
        self._area += now
        self.kv_tokens -= job.kv_tokens
        self.batch -= 1
        return beside

    def forget_peak(self) -> None:
        """The unit has restarted, maybe with fewer decode slots."""
        self.peak_batch = 0.0

    def backlog_tokens(self, now: float, tokens_s: float, latency_s: float = 0.0) -> float:
        """Uncached tokens that have yet to be computed, at a prefill rate of so many a second, when the
        latency of a prompt that is sent now is over.
        """
        queued: float = self.queued_tokens
        if self.front_tokens and now > self.front_since:
            front = self.front_tokens
            queued += abs(front - (now - self.front_since) * tokens_s) - front
        queued -= latency_s * tokens_s
        return queued if queued > 0.0 else 0.0

    def written_tokens(self, now: float) -> float:
        """Uncached tokens sent here recently: they are new to the prefix cache, and evict others."""
        return self._written * float(0.5 ** ((now - self._written_at) / WRITTEN_HALF_LIFE_S))

    def _leave_queue(self, key: Hashable, now: float) -> Job:
        was_in_front = next(iter(self._queued)) == key
        job = self._queued.pop(key)
        self.cost_inputs = None
        self.queued_tokens -= job.uncached_tokens
        if was_in_front:
            # What was computed of it counts for nothing.
            self.front_since, self.front_tokens, self._shown_at = now, 0, now
            self._begin_next(now)
        return job

    def _begin_next(self, now: float, computed_until: float = 0.0) -> None:
        """The next prompt is in front. Prompts of plain answers show nothing when they are computed; those
        that were sent before `computed_until` are, because one that was sent then is, or is due.
        """
        queued = self._queued
        while queued:
            key, job = next(iter(queued.items()))
            if job.is_streamed or job.sent_at >= computed_until:
                self.front_tokens = job.uncached_tokens
                if job.begins_at > now:
                    self.front_since = job.begins_at
                return
            del queued[key]
            self.queued_tokens -= job.uncached_tokens
            self.computed_tokens += job.uncached_tokens
            self._decode(key, job, now)
        self.front_tokens = 0

    def _decode(self, key: Hashable, job: Job, now: float) -> None:
        self._decoding[key] = job, now, self._area + self.batch * now, self.computed_tokens


class Abandoned(NamedTuple):
    """A prompt whose client left: when it was sent, when that was, who pays for it, and the bytes
    that its unit reads of it.
    """

    opened_at: float
    left_at: float
    payer: str
    size: float


class Unread:
    """What a unit reads although its client has left. What it got before `until` it has read, because it has
    answered an attempt of that time.
    """

    def __init__(self) -> None:
        self.abandoned: deque[Abandoned] = deque(maxlen=ABANDONED_KEPT)
        self.until = 0.0

    def leave(self, prompt: Abandoned) -> None:
        """The client of a prompt that has shown nothing has left."""
        if prompt.opened_at >= self.until:
            self.abandoned.append(prompt)

    @property
    def since(self) -> float:
        """When the first of them was sent that the unit has not read; inf: there is none."""
        return next((prompt.opened_at for prompt in self.abandoned if prompt.opened_at >= self.until), inf)

    def left(self, now: float, for_s: float) -> Iterable[Abandoned]:
        """Those that were left no longer ago than that, and may have yet to be read."""
        while self.abandoned and not self._counts(self.abandoned[0], now - for_s):
            self.abandoned.popleft()
        return (prompt for prompt in self.abandoned if self._counts(prompt, now - for_s))

    def _counts(self, prompt: Abandoned, since: float) -> bool:
        return prompt.opened_at >= self.until and prompt.left_at > since


class Job(NamedTuple):
    """One attempt: the tokens that have to be computed before it shows anything, and those it holds in the KV
    cache that others do not. It was sent at `sent_at`, and can be computed from `begins_at` on; `had_slot`:
    it did not wait for a decode slot.

    The other fields are what was predicted for it then. `cached_blocks` of its prompt were held before,
    `record` is what the prefix cache calls it, `ttft_s` is when the first token was due; the last three are
    those of Expected (cost.py).
    """

    uncached_tokens: int
    kv_tokens: int
    sent_at: float = 0.0
    begins_at: float = 0.0
    had_slot: bool = True
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_blocks: int = 0
    record: int = 0
    ttft_s: float = 0.0
    answer_tokens: float = 0.0
    shared_blocks: int = 0
    charged: float = 1.0
    is_streamed: bool = True


class Prefilled(NamedTuple):
    """So many tokens were computed in so many seconds in which the unit had prompts to prefill.

    It was shown `ttft_s` after it was sent, and `span_s` after the one before it or since the unit was idle.
    `found_idle`: nothing was to be computed when it was sent. `follows`: its turn came when others had been
    computed, and not when its latency was over. `had_slot`: it waited for no other to end.
    """

    tokens: int
    busy_s: float
    ttft_s: float
    span_s: float
    found_idle: bool
    follows: bool
    had_slot: bool = True


class Stalled(NamedTuple):
    """A unit with requests made no progress for `still_s`; so many tokens of prompts were there."""

    still_s: float
    since: float
    tokens: int


class Concurrency(NamedTuple):
    """What was there while an attempt was decoded: jobs on average, and the uncached tokens of prompts that
    were computed in between.
    """

    batch: float = 0.0
    tokens: int = 0


ALONE = Concurrency()

QueuedWork = tuple[float, int, float, float, float, float]
"""Of the prompts that have shown nothing: uncached tokens of those behind the first one, less those that the
latency hides; of the first one, and since when it is computed; how many tokens are computed in a second, what
each of them costs, and the rate again, or infinity while that is a guess.
"""
CostInputs = tuple[float, float, float, float, float, QueuedWork | None]
"""What an ask costs beside the jobs that are there: the tokens for which there is room in the KV cache; the
seconds for any ask, for each token of its answer, and for each uncached one of its prompt; the tokens of a
byte of prompt; and what is queued before it.
"""
