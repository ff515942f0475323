"""The recent speed of a unit: the gaps between its tokens, how long its prefills and plain answers take.

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
SLOWEST_TOKENS_S = 15.0
"""No engine computes prompts more slowly, as far as is known before it has shown any: processors without a
GPU do 20 tokens a second and more, and tokens are estimated from bytes."""
SLOWEST_STEP_S = 2.0
"""The same of a token of an answer: large models on processors need a second."""
SLOWEST_PREFILL_S = 600.0
"""Nor is any prompt computed for longer."""
SURE, UNSURE_TIMES = 3, 8.0
"""After so many samples of its rate, a unit takes at most so many times as long as that says for a prompt
that is larger than all before."""
KNOWN_TIMES = 2.0
"""What a unit has shown with one prompt is believed of prompts up to so many times as large."""
_PACE_FADES = 0.97
WAIT_LEAST_S = 0.25
"""So much of a wait for a first token may be anything but prefill."""
_PACE_TOKENS = 64
_ANSWER_TOKENS = 16
"""An answer costs at least as much as so many tokens: most of a short one is its prompt."""


class StepTimes:
    """The recent speed of one unit."""

    __slots__ = (
        "_before",
        "_largest",
        "_mark",
        "_marked_at",
        "_pace_s",
        "_stall_s",
        "_stall_tokens",
        "_unused",
        "answer_token_s",
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
        self._pace_s = 0.0
        self.longest_answer_s = 0.0
        self.answer_token_s = 0.0
        """Seconds for each token of the slowest plain answer of late, with its prompt; 0: none was seen."""

    def mark(self, now: float) -> None:
        """Take a snapshot of the counts, if it is due. Must be called now and then while tokens flow."""
        if now - self._marked_at >= MARK_S:
            self._before, self._mark, self._marked_at = self._mark, self.gaps_ms.copy(), now

    def gap_s(self, share: float, enough: int = _ENOUGH_GAPS) -> float | None:
        """The gap that this share (0 to 1) of the recent ones does not exceed; None when they are too few."""
        before = self._before or self._mark or _NO_GAPS
        total = sum(self.gaps_ms) - sum(before)
        if total < enough:
            return None
        rank = share * total
        # Most gaps are short, so only a few slots at the beginning are read.
        counts = map(sub, self.gaps_ms, before)
        gap_ms = next(ms for ms, seen in enumerate(accumulate(counts)) if seen >= rank)
        # A gap is counted by its whole milliseconds; it was up to one longer.
        return (gap_ms + 1) / 1000

    def slowest_s(self, unused_since: float | None) -> float:
        """The usual gap that hardly any exceeds; of few, the longest; 0 without any. Without requests, the
        last of which came at `unused_since`, it stays as it is, and is not counted again.
        """
        if unused_since is None:
            return self._slowest_s()
        if self._unused[0] != unused_since:
            self._unused = unused_since, self._slowest_s()
        return self._unused[1]

    def _slowest_s(self) -> float:
        return self.gap_s(0.99) or self.gap_s(1.0, enough=1) or 0.0

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
        if tokens > self._largest and had_seat and span_s <= WAIT_LEAST_S:
            self._largest = tokens
        self._pace_s *= _PACE_FADES

    def waited(self, tokens: int, wait_s: float, *, is_whole: bool) -> None:
        """For so long nothing moved before the first token of a prompt. `is_whole`: all of its prefill is in
        that.
        """
        if is_whole and tokens > self._largest:
            self._largest = tokens
        self._pace_s = max(self._pace_s, (wait_s - WAIT_LEAST_S) / (tokens + _PACE_TOKENS))

    def record_stall(self, tokens: int, still_s: float) -> None:
        """The longest time without a change of the engine's counters while a large prompt was computed."""
        self._stall_tokens = max(self._stall_tokens, tokens)
        self._stall_s = max(still_s, STALL_FADES * self._stall_s)

    def answered(self, answer_s: float, tokens: int = 0) -> None:
        """A plain answer has ended; of so many tokens, if that is known."""
        self.longest_answer_s = max(answer_s, STALL_FADES * self.longest_answer_s)
        if tokens:
            token_s = answer_s / max(tokens, _ANSWER_TOKENS)
            self.answer_token_s = max(token_s, _PACE_FADES * self.answer_token_s)

    def forget_pace(self) -> None:
        """It was given up for being too slow: nothing that it has shown is held against it next time."""
        self._largest, self._pace_s = 0, 0.0
        self.rates.prefill_tokens_s.reset()
        self.longest_answer_s = self.answer_token_s = 0.0

    def prefill_s(self, tokens: int, *, counts: bool = False, beside: int = 0) -> float:
        """How long the prefill of a prompt may take, with so many tokens of other prompts `beside` it; or how
        long the counters of an engine may not move during it.

        Engines that count their steps mostly compute a large prompt in pieces, and count each; that they do
        is known once one was seen. What is much larger than anything that the unit has computed may take as
        long as on the slowest engine, or `UNSURE_TIMES` as long as its rate says, once that was measured.
        """
        rate = self.rates.prefill_tokens_s
        learnt_s = self._learnt_s(tokens, beside, counts=counts)
        if LARGE_TOKENS <= tokens <= 2 * self._stall_tokens and counts:
            return min(learnt_s, 2.0 * self._stall_s)
        if tokens <= KNOWN_TIMES * self._largest or rate.is_given:
            return learnt_s
        slowest_s = min((tokens + beside) / SLOWEST_TOKENS_S, SLOWEST_PREFILL_S)
        if rate.seen >= SURE:
            slowest_s = min(slowest_s, UNSURE_TIMES * learnt_s)
        return max(learnt_s, slowest_s)

    def _learnt_s(self, tokens: int, beside: int, *, counts: bool) -> float:
        """By what was seen of the unit: its rate, but attention grows with the square; and the longest waits
        of late, for a rate may have come from prompts that were in the prefix cache.
        """
        rate, latency = self.rates.prefill_tokens_s, self.rates.latency
        beyond = 1.0 if counts else min(max(1.0, tokens / max(self._largest, 1)), BEYOND_MAX)
        beside_s = beside / rate.value if rate.seen else 0.0
        prefill_s = latency.without_work_s(rate.value) + beyond * tokens / rate.value + beside_s
        return max(prefill_s, self._pace_s * (tokens + beside))
