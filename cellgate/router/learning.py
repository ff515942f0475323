"""The rates of one unit, measured from its traffic. Pure: no clock, no random numbers.

Rules:
1. Every estimate is positive, finite and within fixed bounds, whatever it is fed.
2. One sample moves it by little: samples are clipped at a factor, and count the less the more there were. A
   change that lasts is followed within some ten samples.
3. An initial estimate (configuration, the engine, the unit's peers) is used only until something was
   measured.
4. The longer ago an estimate was confirmed, the more the next sample counts. Nothing else moves it: units
   that differ stay different however little they get (`Explorer` in sampling.py sees to it that they get
   something).

In this order: `Steps`, `StepTimes`, `Peer`, `AnswerLengths`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate
from math import exp, inf, log, sqrt
from operator import mul, sub
from statistics import fmean, median
from typing import NamedTuple, TypeVar

from cellgate.router.backlog import Prefilled
from cellgate.router.latency import SEEN_LEAST, Latency

FIRST_PREFILL_TOKENS_S = 4000.0
FIRST_BYTES_PER_TOKEN = 4.0
FIRST_STEP_S = 0.02
SPEED_BATCH = 8.0
SEQUENCE_SHARE = 0.01
"""A sequence more makes a step longer by so large a share, as long as nothing is known of it."""

_GAIN = 0.1
_LEAST, _MOST = 0.5, 2.0
"""One sample counts as at least, and at most, so many times the estimate."""
_CLIP = log(_MOST)
_CLIP_FIRST = log(20.0)
_SETTLED = 10
"""From then on each sample counts as much as any other."""
ALIKE = 1.4
"""Estimates of equal units, that come from different prompts and batches, are as far apart as that."""
PLAIN_ALIKE = 2.0
"""As ALIKE, of what plain answers show: each has waited for other requests, too."""
_UNSURE = 5.0
"""After so many samples, estimates may be twice as far apart as after very many (as logarithms)."""
_GUESS = 0.5
_FADED = 3.0
"""But never less than so many samples: one is an accident."""
_WINDOW_TOKENS = 2048
"""A prefill rate is taken over at least so many tokens: prompts that share a step end at the same time."""
_LEARNING_WINDOW_S = 0.005
_SPAN_S = 1.0
_SURPLUS = 1.25
"""Over so long so much more than the rate can be no accident of which prompts ended together."""
_WORK_SHARE = 0.25
"""A prompt whose work is a smaller part of the latency says nothing about a rate: what is left is noise."""
STEPS_LEAST = 8
"""A shorter stream is ignored for step times."""
_MEASURED_TOKENS = 32
"""A shorter prompt says more about the chat template than about bytes per token."""


class Rates:
    """All measured rates of one unit."""

    def __init__(self) -> None:
        self.prefill_tokens_s = Estimate(FIRST_PREFILL_TOKENS_S, 1.0, 1e8)
        self.plain_tokens_s = Estimate(FIRST_PREFILL_TOKENS_S, 1.0, 1e8)
        """The prefill rate as plain answers of one token show it: good for comparing units, and no more."""
        self.bytes_per_token = Estimate(FIRST_BYTES_PER_TOKEN, 0.25, 64.0)
        self.event_tokens = Estimate(1.0, 0.25, 256.0)
        """Tokens of an answer in one event of its stream."""
        self.steps = Steps()
        self.latency = Latency()
        self.followed = 0
        """Prompts that were computed right behind another: only they tell what many of them take."""
        self._tokens, self._busy_s = 0, 0.0
        self._alone_tokens, self._alone_s = 0, 0.0
        self._span_tokens, self._span_s = 0, 0.0

    def prefilled(
        self, tokens: int, busy_s: float, span_s: float = 0.0, *, follows: bool = True, had_slot: bool = True
    ) -> None:
        """So many uncached tokens were computed in `busy_s`, right behind others if it `follows`; they were
        shown `span_s` after those before them.

        One that had no seat may have waited for others to end, which says nothing of how fast prompts are
        computed. One that was alone began when the latency was over, and the work that is in the latency is
        not in its time: what is left is uncertain by a part of the latency, and one sample comes from as many
        prompts as take that long.
        """
        if span_s < 0.0:
            # Two workers have reported in another order.
            return
        self._span_tokens += tokens
        self._span_s += span_s
        if self._span_s >= _SPAN_S:
            self.did(self._span_tokens, self._span_s)
            self._span_tokens, self._span_s = 0, 0.0
        if not had_slot:
            return
        rate = self.prefill_tokens_s
        if follows:
            self.followed += 1
            self._tokens += tokens
            self._busy_s += busy_s
            if self._tokens >= _WINDOW_TOKENS and self._busy_s >= _LEARNING_WINDOW_S:
                rate.learn(self._tokens / self._busy_s)
                self._tokens, self._busy_s = 0, 0.0
            return
        latency = self.latency
        tokens -= int(latency.tokens)
        if tokens >= _WORK_SHARE * latency.value * rate.value:
            self._alone_tokens += tokens
            self._alone_s += busy_s
            if self._alone_tokens >= _WINDOW_TOKENS and self._alone_s >= max(
                _LEARNING_WINDOW_S, latency.value
            ):
                rate.learn(self._alone_tokens / self._alone_s)
                self._alone_tokens, self._alone_s = 0, 0.0

    def did(self, tokens: int, within_s: float) -> None:
        """So many uncached tokens were computed within that time, whatever took it: the unit can do that."""
        if (tokens_s := tokens / within_s) > _SURPLUS * self.prefill_tokens_s.value:
            self.prefill_tokens_s.learn(tokens_s)

    def used(self, prompt_bytes: int, prompt_tokens: int) -> None:
        """Add the `usage` of an answer."""
        if prompt_tokens >= _MEASURED_TOKENS:
            self.bytes_per_token.learn(prompt_bytes / prompt_tokens)

    def streamed(self, events: int, tokens: int) -> None:
        """A stream has ended that told its tokens."""
        if events >= STEPS_LEAST:
            self.event_tokens.learn(tokens / events)

    def reset(self) -> None:
        """The unit has restarted: the rates stay as estimates, and the first samples replace them."""
        self._tokens, self._busy_s, self.followed = 0, 0.0, 0
        self._alone_tokens, self._alone_s = 0, 0.0
        self._span_tokens, self._span_s = 0, 0.0
        self.latency.reset()
        self.prefill_tokens_s.reset()
        self.plain_tokens_s.reset()
        self.bytes_per_token.reset()
        self.event_tokens.reset()
        self.steps.reset()


def reckon(own: float, usual: float, seen: int, apart: float = ALIKE) -> float:
    """The value to use for a unit when others of its kind have `usual`: that, unless this one, after `seen`
    samples (at least one), clearly differs: is more than `apart` times as large or small.

    Estimates scatter, the more the fewer samples there are. Taking each difference as real would send all
    requests to units with lucky estimates.
    """
    far = apart ** (1.0 + _UNSURE / seen)
    return usual if usual / far < own < usual * far else own


class Estimate:
    """A positive number that follows its samples in the logarithm. `usual` is what units of its kind have."""

    __slots__ = ("_first", "_guesses", "_high", "_low", "_weight", "seen", "usual", "value")

    def __init__(self, first: float, low: float, high: float) -> None:
        self._first, self._low, self._high = first, low, high
        self.seen = 0
        self._weight = 0.0
        self._guesses = 0.0
        self.value = min(max(first, low), high)
        self.usual = 0.0

    @property
    def reckoned(self) -> float:
        """The value to use: see `reckon`."""
        return reckon(self.value, self.usual, self.seen) if self.seen else self.value

    def guess(self, value: float) -> None:
        """Set an initial estimate, unless something was measured already or it is invalid.

        It counts as half a sample.
        """
        if not 0.0 < value < inf:
            return
        self.usual = value
        if not self.seen:
            self.value = min(max(value, self._low), self._high)
            self._guesses = _GUESS

    def presume(self, times: float) -> None:
        """Nothing was ever measured of any unit: set so many times the initial estimate."""
        if not (self.seen or self.usual):
            self.value = min(max(self._first * times, self._low), self._high)

    def learn(self, sample: float) -> None:
        """Add one sample; anything but a positive number is ignored."""
        if not 0.0 < sample < inf:
            return
        self.seen += 1
        value = self.value
        if self._weight < _SETTLED:
            self._weight += 1.0
            clip, by = max(_CLIP, _CLIP_FIRST / self.seen), log(sample) - log(value)
            value *= exp(min(max(by, -clip), clip) / (self._weight + self._guesses))
        else:
            # As above, in fewer steps.
            times = sample / value
            value *= (times if _LEAST < times < _MOST else _LEAST if times < 1.0 else _MOST) ** _GAIN
        self.value = self._low if value < self._low else value if value < self._high else self._high

    def doubt(self) -> None:
        """It has changed: the next samples count more."""
        self._weight = min(self._weight, _FADED)

    def fade(self, keep: float) -> None:
        """Time has passed: old samples count a little less."""
        if self._weight > _FADED:
            self._weight = max(self._weight * keep, _FADED)

    def reset(self) -> None:
        """Treat the measured value as an estimate from now on."""
        if self.seen and not self.usual:
            self.usual = self.value
        self.seen, self._weight = 0, 0.0


class Steps:
    """How long a decoding step takes: `base_s * (1 + share * batch)`.

    The base follows a unit's samples soon. By how large a share one sequence more makes a step longer is seen
    slowly, by least squares that fade, and is taken to be that of all units of its kind: one that was slow
    with many and is fast with few would look as if it were slow because of the many.
    """

    __slots__ = ("_far", "_is_watched", "_looked_at", "_n", "_x", "_xx", "_xy", "_y", "base", "share")

    MIN_S, MAX_S = 1e-5, 10.0
    _FADE = 0.97
    _CLIP = 4.0
    _CHANGED = 3
    """So many samples in a row that are far off, to the same side, are no accidents."""
    _FLAT = 400.0
    """Added to the squares: samples scatter by a fifth, shares by a hundredth, so a slope that was seen over
    few different batches is hardly one, and leans to what is usual."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self.base = Estimate(FIRST_STEP_S, self.MIN_S, self.MAX_S)
        self.share = SEQUENCE_SHARE
        self._is_watched = False
        """All that is known comes from streams that flow."""
        self._looked_at = 0
        """How many samples there were at the last look."""
        self._far = 0
        """So many samples in a row were far above what was expected; below zero: far below."""

    @property
    def seen(self) -> int:
        """Samples."""
        return self.base.seen

    @property
    def reckoned(self) -> tuple[float, float]:
        """The values to use, base and slope: see `reckon`."""
        base_s = self.base.reckoned
        return base_s, self.share * base_s

    @property
    def own_share(self) -> float:
        """The share as this unit has shown it."""
        n = self._n
        if not n:
            return self.share
        mean_x, mean_y = self._x / n, self._y / n
        usual_slope = self.share * mean_y / (1.0 + self.share * mean_x)
        spread = max(self._xx - n * mean_x * mean_x, 0.0) + self._FLAT
        slope = (self._xy - n * mean_x * mean_y + self._FLAT * usual_slope) / spread
        # A step with more sequences is never shorter, and one with none is not for nothing.
        slope = min(max(slope, 0.0), 0.9 * mean_y / max(mean_x, 1.0))
        return slope / max(mean_y - slope * mean_x, self.MIN_S)

    def guess(self, base_s: float, share: float = SEQUENCE_SHARE) -> None:
        """As for an Estimate; the share is taken over whatever was seen."""
        if 0.0 <= share < inf:
            self.share = min(share, 1.0)
            self.base.guess(base_s)

    def presume(self, times: float) -> None:
        """As for an Estimate, of its speed."""
        self.base.presume(1.0 / times)

    def fade(self, keep: float) -> None:
        """As for an Estimate."""
        self.base.fade(keep)
        if self._n > _FADED:
            self._n, self._x, self._y = self._n * keep, self._x * keep, self._y * keep
            self._xx, self._xy = self._xx * keep, self._xy * keep

    def reset(self) -> None:
        """As for an Estimate."""
        self.base.reset()
        self._is_watched, self._looked_at = False, 0
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def at(self, batch: float) -> float:
        """Seconds a step with so many sequences."""
        return min(self.base.value * (1.0 + self.share * batch), self.MAX_S)

    def is_stale(self) -> bool:
        """Whether no stream has ended since the last look."""
        before, self._looked_at = self._looked_at, self.base.seen
        return before == self._looked_at or self._is_watched

    def watch(self, step_s: float, batch: float) -> None:
        """Streams that flow show so much. As long as none has ended, only the last look counts."""
        if is_first := self._is_watched or not self.base.seen:
            self.reset()
        self.learn(step_s, batch)
        self._is_watched, self._looked_at = is_first, self.base.seen

    def learn(self, step_s: float, batch: float) -> None:
        """Steps took so long on average while so many sequences were there."""
        if not (0.0 < step_s < inf and 0.0 <= batch < inf):
            return
        if self._is_watched:
            self.reset()
        batch = min(batch, 1e6)
        expected_s = self.at(batch)
        times = step_s / expected_s
        far = 1 if times > _MOST else -1 if times < _LEAST else 0
        self._far = self._far + far if self._far * far > 0 else far
        if abs(self._far) >= self._CHANGED:
            self.base.doubt()
        self.base.learn(step_s / (1.0 + self.share * batch))
        keep = self._FADE
        step_s = min(max(step_s, expected_s / self._CLIP), expected_s * self._CLIP)
        self._n = self._n * keep + 1.0
        self._x = self._x * keep + batch
        self._y = self._y * keep + step_s
        self._xx = self._xx * keep + batch * batch
        self._xy = self._xy * keep + batch * step_s


# The recent speed of a unit: the gaps between its tokens, how long its prefills and plain answers take.
#
# `gaps_ms` is written by the byte path, one place per millisecond, and is never reset: it is also the
# histogram that the metrics show. The recent part is the difference to the counts 10 to 20 s ago.


GAPS_MS = 4096
"""Gaps between tokens are counted per millisecond up to this; the last slot is for longer ones."""
MARK_S = 10.0

_ENOUGH_GAPS = 100
_SHORT_MS = 256
"""Mostly all gaps are shorter."""
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
JOINED_S = 0.5
"""A prompt that comes this long after the last progress may still be computed in the step that then began."""
WAIT_LEAST_S = 0.25
"""So much of a wait for a first token may be anything but prefill."""
_PACE_TOKENS = 64
ANSWERS = 3.0
"""A plain answer may take so many times as long for each token as the slowest recent one."""
_ANSWER_TOKENS = 16
"""An answer costs at least as much as so many tokens: most of a short one is its prompt."""


class StepTimes:
    """The recent speed of one unit."""

    def __init__(self) -> None:
        self.gaps_ms = [0] * GAPS_MS
        self._before: list[int] | None = None
        self._mark: list[int] | None = None
        self._marked_at = 0.0
        self.rates = Rates()
        self._largest = self._largest_step = self._largest_bound = self._stall_tokens = 0
        self._stall_s = 0.0
        self._unused = (-1.0, 0.0)
        self._pace_s = self._shared_pace_s = self._alone_pace_s = self._bound_pace_s = 0.0
        self._idle_pace_s = self.longest_wait_s = 0.0
        self.answer_token_s = 0.0
        """Seconds for each token of the slowest recent plain answer, with its prompt; 0: none was seen."""

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

    def mean_gap_s(self) -> float:
        """The mean of the recent gaps, of which there must be some. It is the same whether tokens come one by
        one or in bursts.
        """
        counts: list[int] = list(map(sub, self.gaps_ms, self._before or self._mark or _NO_GAPS))
        short, total = counts[:_SHORT_MS], sum(counts)
        total_ms: int = sum(map(mul, short, range(_SHORT_MS)))
        if sum(short) < total:
            total_ms += sum(map(mul, counts[_SHORT_MS:], range(_SHORT_MS, GAPS_MS)))
        return (total_ms / total + 0.5) / 1000.0

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
        tokens, busy_s, ttft_s, span_s, found_idle, follows, had_slot = done
        rates = self.rates
        rates.prefilled(tokens, busy_s, span_s, follows=follows, had_slot=had_slot)
        if not had_slot:
            self._bound(tokens, ttft_s)
        else:
            if found_idle:
                if ttft_s > WAIT_LEAST_S:
                    self._idle_pace_s = max(_PACE_FADES * self._idle_pace_s, ttft_s / tokens)
                rates.latency.learn(tokens, tokens / rates.prefill_tokens_s.value, ttft_s)
            if tokens > self._largest and span_s <= WAIT_LEAST_S:
                self._largest = tokens
        if self._pace_s:
            self._pace_s *= _PACE_FADES
            self._shared_pace_s *= _PACE_FADES
            self._alone_pace_s *= _PACE_FADES

    def _bound(self, tokens: int, wait_s: float) -> None:
        """The prefill of a prompt was a part of this wait: all that an engine shows that is always full."""
        self._largest_bound = max(self._largest_bound, tokens)
        self._bound_pace_s = max(_PACE_FADES * self._bound_pace_s, wait_s / tokens)

    def waited(
        self, tokens: int, wait_s: float, *, is_whole: bool, beside: int = 0, at_once: int | None = None
    ) -> None:
        """For so long nothing moved before the first token of a prompt. `is_whole`: its prefill is in it; so
        is that of those `beside` it, if several are computed at once; `at_once` tokens surely (None: all).
        """
        self._largest_step = max(self._largest_step, tokens + beside if at_once is None else at_once)
        if is_whole and tokens > self._largest:
            self._largest = tokens
        self._alone_pace_s = max(self._alone_pace_s, wait_s / max(tokens, 1))
        self.longest_wait_s = max(_PACE_FADES * self.longest_wait_s, wait_s)
        wait_s -= WAIT_LEAST_S
        self._pace_s = max(self._pace_s, wait_s / (tokens + _PACE_TOKENS))
        self._shared_pace_s = max(self._shared_pace_s, wait_s / (tokens + beside + _PACE_TOKENS))

    def record_stall(self, tokens: int, still_s: float) -> None:
        """The longest time without a change of the engine's counters while a large prompt was computed."""
        self._stall_tokens = max(self._stall_tokens, tokens)
        self._stall_s = max(still_s, STALL_FADES * self._stall_s)

    def answered(self, prompt_tokens: int, answer_s: float, tokens: int) -> None:
        """A plain answer has ended; of so many tokens, if that is known (else 0).

        Most of a short one may be its prompt; what is left then tells no more than is believed of anybody.
        """
        if prompt_tokens > 0:
            self._bound(prompt_tokens, answer_s)
        if tokens:
            token_s = answer_s / max(tokens, _ANSWER_TOKENS)
            if tokens < _ANSWER_TOKENS:
                decode_s = answer_s - prompt_tokens / self.rates.prefill_tokens_s.value
                token_s = max(token_s, min(decode_s / tokens, SLOWEST_STEP_S / ANSWERS))
            self.answer_token_s = max(token_s, _PACE_FADES * self.answer_token_s)

    def forget_pace(self) -> None:
        """It was given up for being too slow: nothing that it has shown is held against it next time."""
        self._largest = self._largest_step = self._largest_bound = 0
        self._pace_s = self._shared_pace_s = self._alone_pace_s = self._bound_pace_s = 0.0
        self._idle_pace_s = self.longest_wait_s = 0.0
        self.rates.prefill_tokens_s.reset()
        self.answer_token_s = 0.0

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
        slowest_s = min((tokens + beside) / SLOWEST_TOKENS_S, SLOWEST_PREFILL_S)
        if tokens <= KNOWN_TIMES * self._largest_bound:
            slowest_s = min(slowest_s, self._bound_pace_s * (tokens + beside))
        if tokens <= KNOWN_TIMES * self._largest:
            if tokens + beside <= KNOWN_TIMES * self._largest_step:
                return learnt_s
            # No such step was seen: all of it as slowly as the slowest prompt.
            slowest_s = min(slowest_s, self._alone_pace_s * (tokens + beside))
        elif rate.seen >= SURE:
            slowest_s = min(slowest_s, UNSURE_TIMES * learnt_s)
        return max(learnt_s, slowest_s)

    def _learnt_s(self, tokens: int, beside: int, *, counts: bool) -> float:
        """By what was seen of the unit: its rate, but attention grows with the square; and the longest waits
        recently, for a rate may have come from prompts that were in the prefix cache.
        """
        rate, latency = self.rates.prefill_tokens_s, self.rates.latency
        beyond = 1.0 if counts else min(max(1.0, tokens / max(self._largest, 1)), BEYOND_MAX)
        slowdown_of_others_s = beside / rate.value if rate.seen else 0.0
        prefill_s = latency.without_work_s(rate.value) + beyond * tokens / rate.value + slowdown_of_others_s
        # What a large prompt took in several steps, a small one may take in one.
        step_s = min(self._idle_pace_s * tokens, self.longest_wait_s)
        return max(prefill_s, step_s, self._pace_s * tokens, self._shared_pace_s * (tokens + beside))


# What stands for rates that were not measured: those of a unit's peers, and what weights say. Pure. Rules:
# 1. A weight says what a unit can do beside others: usually how many times as fast it is. It stands for
#    measurements until there are some, and no longer: it may be wrong, and a measured difference must not
#    count twice.
# 2. Where weights do not fit what was measured of some units, they are not believed of the others either.
# 3. What is usual for a unit is what peers of its weight have; and where weights do not fit, all peers.


FADE_S = 300.0
"""What was confirmed so long ago counts half."""

_NO_RATE = 1e-9
"""What sums of floats may differ by."""
LEARNING_LEAST = 1e-6
"""A unit is taken to be at least so many times as fast as the fastest."""

_Rate = TypeVar("_Rate", Estimate, Steps)
T = TypeVar("T")


class Peer(NamedTuple):
    """A unit, as others see it. Those of one kind serve the same, and are configured alike."""

    kind: Hashable
    weight: float
    rates: Rates


_Fast = tuple[float, Rates]
"""How many times as fast as the fastest a unit is taken to be, as long as nothing is known."""


PEERS_AT_ONCE = 64
"""So many units learn between two pauses."""


def learn_of_peers(units: Sequence[Peer], elapsed_s: float) -> None:
    """Have units guess what units of their kind (or all) saw; what they saw themselves fades a little."""
    for _ in learning_of_peers(units, elapsed_s):
        pass


def learning_of_peers(units: Sequence[Peer], elapsed_s: float) -> Iterator[None]:
    """The same with pauses, for many units."""
    keep = 0.5 ** (elapsed_s / FADE_S)
    most = max((unit.weight for unit in units), default=1.0)
    kinds: dict[Hashable, list[_Fast]] = {}
    for some in _some(units):
        for kind, weight, rates in some:
            kinds.setdefault(kind, []).append((max(weight / most, LEARNING_LEAST), rates))
            for estimate in (rates.prefill_tokens_s, rates.bytes_per_token, rates.event_tokens, rates.steps):
                estimate.fade(keep)
        yield
    everyone = [unit for kind in kinds.values() for unit in kind]
    for units_of_kind in kinds.values():
        if weights_fit(units_of_kind):
            weights: dict[float, list[_Fast]] = {}
            for unit in units_of_kind:
                weights.setdefault(unit[0], []).append(unit)
            for peers in weights.values():
                yield from _guess(peers, units_of_kind, everyone)
        else:
            peers = [(1.0, rates) for _, rates in units_of_kind]
            yield from _guess(peers, everyone)


def _some(units: Sequence[T]) -> Iterator[Sequence[T]]:
    return (units[at : at + PEERS_AT_ONCE] for at in range(0, len(units), PEERS_AT_ONCE))


def weights_fit(units: Sequence[tuple[float, Rates]]) -> bool:
    """Whether measured speeds differ as weights do: they scatter no more around them than in all."""
    if all(weight == units[0][0] for weight, _ in units):
        return True
    prefill = [(w, rates.prefill_tokens_s.value) for w, rates in units if rates.prefill_tokens_s.seen]
    decoding = [(w, 1.0 / rates.steps.at(SPEED_BATCH)) for w, rates in units if rates.steps.seen]
    plain = [(w, rates.plain_tokens_s.value) for w, rates in units if rates.plain_tokens_s.seen]
    known = [
        [(log(weight), log(speed)) for weight, speed in each] for each in (prefill, decoding, plain) if each
    ]
    weighed = sum(_scatter([speed - weight for weight, speed in each]) for each in known)
    return weighed <= sum(_scatter([speed for _, speed in each]) for each in known) + _NO_RATE


def _scatter(values: Sequence[float]) -> float:
    usual = median(values)
    return sum(abs(value - usual) for value in values)


def _middle(values: Sequence[float]) -> float:
    """The median; of two in the middle their geometric mean, which is as far from one as from the other."""
    ordered = sorted(values)
    below, above = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return sqrt(below * above) if below != above else below


def _guess(peers: Sequence[_Fast], *others: Sequence[_Fast]) -> Iterator[None]:
    """Set what is usual for each of `peers`, and what stands for its rates until there are some: what these
    have seen, or else the first of `others` that have seen any. All of them contain those before them.
    """
    groups = [peers]
    for some in others:
        if len(some) > len(groups[-1]):
            groups.append(some)

    def usual(of: Callable[[Rates], _Rate], value: Callable[[_Rate], float], power: int = 0) -> float | None:
        """The median, as if all were as fast as the fastest."""
        for some in groups:
            if seen := [(times, of(rates)) for times, rates in some if of(rates).seen]:
                return _middle([value(one) / times**power for times, one in seen])
        return None

    tokens_s = usual(lambda rates: rates.prefill_tokens_s, lambda rate: rate.value, 1)
    base_s = usual(lambda rates: rates.steps, lambda steps: steps.base.value, -1)
    yield
    plain_tokens_s = usual(lambda rates: rates.plain_tokens_s, lambda rate: rate.value, 1)
    step_share = usual(lambda rates: rates.steps, lambda steps: steps.own_share)
    yield
    token_bytes = usual(lambda rates: rates.bytes_per_token, lambda size: size.value)
    event_tokens = usual(lambda rates: rates.event_tokens, lambda size: size.value)
    latency = next(filter(None, map(_usual_latency, groups)), None)
    yield
    for some in _some(peers):
        for times, rates in some:
            if tokens_s is not None:
                rates.prefill_tokens_s.guess(tokens_s * times)
            else:
                rates.prefill_tokens_s.presume(times * _by_plain(rates.plain_tokens_s, plain_tokens_s, times))
            if base_s is not None and step_share is not None:
                rates.steps.guess(base_s / times, step_share)
            else:
                rates.steps.presume(times)
            if token_bytes is not None:
                rates.bytes_per_token.guess(token_bytes)
            if event_tokens is not None:
                rates.event_tokens.guess(event_tokens)
            if latency is not None:
                rates.latency.guess(*latency)
        yield


def _usual_latency(units: Sequence[_Fast]) -> tuple[float, float, float] | None:
    """The latency of units of a kind, and how far apart those of their requests are; None: none was seen."""
    seen = [rates.latency for _, rates in units if rates.latency.seen]
    if not seen:
        return None
    seen = [latency for latency in seen if latency.seen >= SEEN_LEAST] or seen
    logs = [latency.logs() for latency in seen]
    means = [fmean(some) for some in logs]
    squares = [(took - mean) ** 2 for some, mean in zip(logs, means, strict=True) for took in some]
    return _middle([latency.value for latency in seen]), median(means), sqrt(fmean(squares))


def _by_plain(rate: Estimate, usual: float | None, times: float) -> float:
    """How many times as fast as is usual for its weight a unit is by its plain answers. How fast all are is
    not known from them, because they wait for each other.
    """
    if usual is None or not rate.seen:
        return 1.0
    return reckon(rate.value, usual * times, rate.seen, PLAIN_ALIKE) / (usual * times)


# The length of answers by model: the cost of decoding is computed from it. Pure.
#
# The mean and not the median: costs are sums of waits, and the long answers make most of them.


FIRST_ANSWER_TOKENS = 128.0
"""Before any answer has ended."""
ANSWER_GAIN = 0.02
"""The weight of one answer in the mean, once there were many."""
MODELS_MAX = 256
"""The most models that are kept: clients may name any while the models of units are unknown."""


class _Length:
    """A mean; `share` is the weight of the next answer: that of all so far alike, and then ANSWER_GAIN."""

    __slots__ = ("seen", "share", "value")

    def __init__(self, value: float) -> None:
        self.value = value
        self.seen, self.share = 0, 1.0


class AnswerLengths:
    """Mean tokens of recent answers, by model."""

    def __init__(self) -> None:
        self._all = _Length(FIRST_ANSWER_TOKENS)
        self._means: dict[str | None, _Length] = {}

    def expected(self, model: str | None, limit: int = 0) -> float:
        """Expected tokens of an answer of `model`, at most `limit` (`max_tokens`; 0: none was set)."""
        mean = (self._means.get(model) or self._all).value
        return limit if 0 < limit < mean else mean

    def learn(self, model: str | None, tokens: int) -> None:
        """A whole answer has ended. One without tokens (an embedding) counts as one."""
        if tokens < 1:
            tokens = 1
        of_model = self._means.get(model)
        if of_model is None:
            of_model = _Length(0.0)
            if len(self._means) < MODELS_MAX:
                self._means[model] = of_model
        for mean in (self._all, of_model):
            mean.value += (tokens - mean.value) * mean.share
            if mean.share > ANSWER_GAIN:
                # The next one counts less.
                mean.seen += 1
                mean.share = max(1.0 / (mean.seen + 1), ANSWER_GAIN)
