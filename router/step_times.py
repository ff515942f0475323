"""The recent speed of a unit: the gaps between its tokens, and the duration of its prefills.

`gaps_ms` is written by the byte path, one place per millisecond, and is never reset: it is also the histogram
that the metrics show. The recent part is the difference to the counts 10 to 20 s ago.
"""

from __future__ import annotations

from itertools import accumulate
from operator import sub

from cellgate.router.backlog import Prefilled
from cellgate.router.rates import Rates

GAPS_MS = 4096
"""Gaps between tokens are counted per millisecond up to this; the last slot is for longer ones."""
MARK_S = 10.0

_ENOUGH_GAPS = 100
_NO_GAPS = [0] * GAPS_MS
BEYOND_MAX = 4.0
LARGE_TOKENS = 8192
STALL_FADES = 0.9


class StepTimes:
    """The recent speed of one unit."""

    __slots__ = (
        "_before",
        "_largest",
        "_mark",
        "_marked_at",
        "_stall_s",
        "_stall_tokens",
        "_unused",
        "gaps_ms",
        "longest_answer_s",
        "rates",
    )

    def __init__(self) -> None:
        self.gaps_ms = [0] * GAPS_MS
        self._before: list[int] | None = None
        self._mark: list[int] | None = None
        self._marked_at = 0.0
        self.rates = Rates()
        self._largest = 0
        self._stall_tokens = 0
        self._stall_s = 0.0
        self._unused = (-1.0, 0.0)
        self.longest_answer_s = 0.0

    def mark(self, now: float) -> None:
        """Take a snapshot of the counts, if it is due. Must be called now and then while tokens flow."""
        if now - self._marked_at >= MARK_S:
            self._before, self._mark, self._marked_at = self._mark, self.gaps_ms.copy(), now

    def gap_s(self, share: float) -> float | None:
        """The gap that this share (0 to 1) of the recent ones does not exceed; None when they are too few."""
        before = self._before or self._mark or _NO_GAPS
        total = sum(self.gaps_ms) - sum(before)
        if total < _ENOUGH_GAPS:
            return None
        rank = share * total
        # Most gaps are short, so only a few slots at the beginning are read.
        counts = map(sub, self.gaps_ms, before)
        gap_ms = next(ms for ms, seen in enumerate(accumulate(counts)) if seen >= rank)
        # A gap is counted by its whole milliseconds; it was up to one longer.
        return (gap_ms + 1) / 1000

    def slowest_s(self, unused_since: float | None) -> float:
        """The usual gap that hardly any exceeds; 0 when they are too few. Without requests, the last of which
        came at `unused_since`, it stays as it is, and is not counted again.
        """
        if unused_since is None:
            return self.gap_s(0.99) or 0.0
        if self._unused[0] != unused_since:
            self._unused = unused_since, self.gap_s(0.99) or 0.0
        return self._unused[1]

    def prefilled(self, done: Prefilled) -> None:
        """A prompt was computed.

        Prompts are computed one after the other or in one step, so the time of one begins when the one before
        it is done: to go by its time to first token would be to go by the length of the queue.
        """
        tokens, busy_s, ttft_s, span_s, found_idle, follows, had_seat = done
        rates = self.rates
        rates.achieved(tokens, span_s)
        learn = rates.prefilled if follows else rates.prefilled_alone
        learn(tokens, busy_s, had_seat=had_seat)
        if found_idle and had_seat:
            rates.latency.learn(tokens, tokens / rates.prefill_tokens_s.value, ttft_s)
        if tokens > self._largest:
            self._largest = tokens

    def record_stall(self, tokens: int, still_s: float) -> None:
        """The longest time without a change of the engine's counters while a large prompt was computed."""
        self._stall_tokens = max(self._stall_tokens, tokens)
        self._stall_s = max(still_s, STALL_FADES * self._stall_s)

    def answered(self, answer_s: float) -> None:
        """A plain answer has ended."""
        self.longest_answer_s = max(answer_s, STALL_FADES * self.longest_answer_s)

    def prefill_s(self, tokens: int, *, counts: bool = False) -> float:
        """How long the prefill of a prompt takes, or how long the counters of an engine may not move during
        it.

        Engines that count their steps mostly compute a large prompt in pieces, and count each; that they do
        is known once one was seen. Of others what is said of a much larger prompt than any before is a guess:
        it may take up to four times as long, for attention grows with the square, and the rate may have come
        from prompts that were in the prefix cache.
        """
        tokens_s = self.rates.prefill_tokens_s.value
        latency_s, prefill_s = self.rates.latency.without_work_s(tokens_s), tokens / tokens_s
        if not counts:
            return latency_s + prefill_s * min(max(1.0, tokens / max(self._largest, 1)), BEYOND_MAX)
        if LARGE_TOKENS <= tokens <= 2 * self._stall_tokens:
            return min(latency_s + prefill_s, 2.0 * self._stall_s)
        return latency_s + prefill_s
