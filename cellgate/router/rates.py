"""The rates of one unit, measured from its traffic. Pure: no clock, no random numbers.

Rules:
1. Every estimate is positive, finite and within fixed bounds, whatever it is fed.
2. One sample moves it by little: samples are clipped at a factor, and count the less the more there were. A
   change that lasts is followed within some ten samples.
3. An initial estimate (configuration, the engine, the unit's peers) is used only until something was
   measured.
4. The longer ago an estimate was confirmed, the more the next sample counts. Nothing else moves it: units
   that differ stay different however little they get (explore.py sees to it that they get something).
"""

from __future__ import annotations

from math import exp, inf, log

from cellgate.router.latency import Latency

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
_WINDOW_S = 0.005
_SPAN_S = 1.0
_SURPLUS = 1.25
"""Over so long so much more than the rate can be no accident of which prompts ended together."""
_WORK_SHARE = 0.25
"""A prompt whose work is a smaller part of the latency says nothing about a rate: what is left is noise."""
_MEASURED_TOKENS = 32
"""A shorter prompt says more about the chat template than about bytes per token."""


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

    __slots__ = ("_first", "_guesses", "_high", "_is_given", "_low", "_weight", "seen", "usual", "value")

    def __init__(self, first: float, low: float, high: float) -> None:
        self._first, self._low, self._high = first, low, high
        self.seen = 0
        self._weight = 0.0
        self._guesses = 0.0
        self._is_given = False
        self.value = min(max(first, low), high)
        self.usual = 0.0

    @property
    def reckoned(self) -> float:
        """The value to use: see `reckon`."""
        return reckon(self.value, self.usual, self.seen) if self.seen else self.value

    @property
    def is_given(self) -> bool:
        """Whether an initial estimate is configured."""
        return self._is_given

    def guess(self, value: float, *, is_given: bool = False) -> None:
        """Set an initial estimate, unless something was measured already or it is invalid.

        It counts as half a sample. `is_given`: it is configured, and no other estimate replaces it.
        """
        if not is_given and 0.0 < value < inf:
            self.usual = value
        if not self.seen and 0.0 < value < inf and (is_given or not self._is_given):
            self.value = min(max(value, self._low), self._high)
            self._guesses, self._is_given = _GUESS, is_given

    def presume(self, times: float) -> None:
        """Nothing was ever measured of any unit: set so many times the initial estimate."""
        if not (self.seen or self.usual or self._is_given):
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
    """How long a decoding step takes: `base_s + per_sequence_s * batch`, by least squares that fade."""

    __slots__ = ("_n", "_usual", "_x", "_xx", "_xy", "_y", "base_s", "per_sequence_s", "seen", "usual_s")

    MIN_S, MAX_S = 1e-5, 10.0
    _FADE = 0.97
    _FLAT = 4.0
    """Added to the variance of the batch: a slope seen over few different batches is hardly one, and leans to
    what is usual."""
    _CLIP = 4.0

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self.seen = 0
        self._usual = SEQUENCE_SHARE
        self.base_s, self.per_sequence_s = FIRST_STEP_S, SEQUENCE_SHARE * FIRST_STEP_S
        self.usual_s = 0.0
        """As base_s, of units of its kind."""

    @property
    def reckoned(self) -> tuple[float, float]:
        """The values to use, base and slope: see `reckon`."""
        usual_s, own_s = self.usual_s * (1.0 + self._usual * SPEED_BATCH), self.at(SPEED_BATCH)
        if self.seen and reckon(own_s, usual_s, self.seen) is usual_s:
            return self.usual_s, self._usual * self.usual_s
        return self.base_s, self.per_sequence_s

    @property
    def share(self) -> float:
        """By how large a share of a step one sequence more makes it longer."""
        return self.per_sequence_s / self.base_s

    def guess(self, base_s: float, share: float = SEQUENCE_SHARE) -> None:
        """As for an Estimate. How steps grow with the batch is taken over in part even where it was seen."""
        if not (0.0 < base_s < inf and 0.0 <= share < inf):
            return
        self._usual = min(share, 1.0)
        self.usual_s = self._bounded(base_s)
        if not self.seen:
            self.base_s = self._bounded(base_s)
            self.per_sequence_s = self._usual * self.base_s

    def presume(self, times: float) -> None:
        """As for an Estimate, of its speed."""
        if not (self.seen or self.usual_s):
            self.base_s = self._bounded(FIRST_STEP_S / times)
            self.per_sequence_s = SEQUENCE_SHARE * self.base_s

    def fade(self, keep: float) -> None:
        """As for an Estimate."""
        if self._n > _FADED:
            self._n, self._x, self._y = self._n * keep, self._x * keep, self._y * keep
            self._xx, self._xy = self._xx * keep, self._xy * keep

    def reset(self) -> None:
        """As for an Estimate."""
        if self.seen and not self.usual_s:
            self.usual_s = self.base_s
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self.seen = 0
        self._usual = min(self.share, 1.0)

    def at(self, batch: float) -> float:
        """Seconds a step with so many sequences."""
        return min(self.base_s + self.per_sequence_s * batch, self.MAX_S)

    def learn(self, step_s: float, batch: float) -> None:
        """Steps took so long on average while so many sequences were there."""
        if not (0.0 < step_s < inf and 0.0 <= batch < inf):
            return
        self.seen += 1
        expected = self.at(batch)
        factor = max(self._CLIP, exp(_CLIP_FIRST / self.seen))
        step_s = self._bounded(min(max(step_s, expected / factor), expected * factor))
        batch = min(batch, 1e6)
        keep = self._FADE
        self._n = self._n * keep + 1.0
        self._x = self._x * keep + batch
        self._y = self._y * keep + step_s
        self._xx = self._xx * keep + batch * batch
        self._xy = self._xy * keep + batch * step_s
        mean_x, mean_y = self._x / self._n, self._y / self._n
        variance = max(self._xx / self._n - mean_x * mean_x, 0.0) + self._FLAT
        covariance = self._xy / self._n - mean_x * mean_y
        slope = (covariance + self._FLAT * self._usual * self.base_s) / variance
        # A step with more sequences is never shorter, and one with none is not for nothing.
        self.per_sequence_s = min(max(slope, 0.0), 0.9 * mean_y / max(mean_x, 1.0))
        self.base_s = self._bounded(mean_y - self.per_sequence_s * mean_x)

    def _bounded(self, step_s: float) -> float:
        return min(max(step_s, self.MIN_S), self.MAX_S)


class Rates:
    """All measured rates of one unit."""

    __slots__ = (
        "_alone_s",
        "_alone_tokens",
        "_busy_s",
        "_span_s",
        "_span_tokens",
        "_tokens",
        "bytes_per_token",
        "followed",
        "latency",
        "plain_tokens_s",
        "prefill_tokens_s",
        "steps",
    )

    def __init__(self) -> None:
        self.prefill_tokens_s = Estimate(FIRST_PREFILL_TOKENS_S, 1.0, 1e8)
        self.plain_tokens_s = Estimate(FIRST_PREFILL_TOKENS_S, 1.0, 1e8)
        """The prefill rate as plain answers of one token show it: good for comparing units, and no more."""
        self.bytes_per_token = Estimate(FIRST_BYTES_PER_TOKEN, 0.25, 64.0)
        self.steps = Steps()
        self.latency = Latency()
        self.followed = 0
        """Prompts that were computed right behind another: only they tell what many of them take."""
        self._tokens, self._busy_s = 0, 0.0
        self._alone_tokens, self._alone_s = 0, 0.0
        self._span_tokens, self._span_s = 0, 0.0

    def prefilled(self, tokens: int, busy_s: float, *, had_seat: bool = True) -> None:
        """So many uncached tokens, right behind others, were computed in so many seconds.

        Without `had_seat` they may have waited for others to end, which says nothing of how fast prompts are
        computed.
        """
        if not had_seat or tokens < 0 or not 0.0 <= busy_s < inf:
            return
        self.followed += 1
        self._tokens += tokens
        self._busy_s += busy_s
        if self._tokens >= _WINDOW_TOKENS and self._busy_s >= _WINDOW_S:
            self.prefill_tokens_s.learn(self._tokens / self._busy_s)
            self._tokens, self._busy_s = 0, 0.0

    def prefilled_alone(self, tokens: int, busy_s: float, *, had_seat: bool = True) -> None:
        """They began when the latency was over, and the work that is in the latency is not in `busy_s`.

        What is left when the latency is taken away is uncertain by a part of the latency: one sample comes
        from as many prompts as take that long.
        """
        if not had_seat or tokens < 0 or not 0.0 <= busy_s < inf:
            return
        latency = self.latency
        tokens -= int(latency.tokens)
        if tokens < _WORK_SHARE * latency.value * self.prefill_tokens_s.value:
            return
        self._alone_tokens += tokens
        self._alone_s += busy_s
        if self._alone_tokens >= _WINDOW_TOKENS and self._alone_s >= max(_WINDOW_S, latency.value):
            self.prefill_tokens_s.learn(self._alone_tokens / self._alone_s)
            self._alone_tokens, self._alone_s = 0, 0.0

    def achieved(self, tokens: int, span_s: float) -> None:
        """So many uncached tokens were shown in so long, whatever took it: the unit can do that."""
        if tokens < 0 or not 0.0 <= span_s < inf:
            return
        self._span_tokens += tokens
        self._span_s += span_s
        if self._span_s >= _SPAN_S:
            tokens_s = self._span_tokens / self._span_s
            if tokens_s > _SURPLUS * self.prefill_tokens_s.value:
                self.prefill_tokens_s.learn(tokens_s)
            self._span_tokens, self._span_s = 0, 0.0

    def used(self, prompt_bytes: int, prompt_tokens: int) -> None:
        """Add the `usage` of an answer."""
        if prompt_tokens >= _MEASURED_TOKENS:
            self.bytes_per_token.learn(prompt_bytes / prompt_tokens)

    def reset(self) -> None:
        """The unit has restarted: the rates stay as estimates, and the first samples replace them."""
        self._tokens, self._busy_s, self.followed = 0, 0.0, 0
        self._alone_tokens, self._alone_s = 0, 0.0
        self._span_tokens, self._span_s = 0, 0.0
        self.latency.reset()
        self.prefill_tokens_s.reset()
        self.plain_tokens_s.reset()
        self.bytes_per_token.reset()
        self.steps.reset()


class Errors:
    """The recent share of failed attempts on a unit: each failure halves the distance to 1."""

    __slots__ = ("_at", "_share")

    HALF_LIFE_S = 10.0
    MAX = 0.99

    def __init__(self) -> None:
        self._share = 0.0
        self._at = 0.0

    def share(self, now: float) -> float:
        """0 to MAX. It fades, so that a unit with old failures is tried again."""
        return self._share * 0.5 ** (max(now - self._at, 0.0) / self.HALF_LIFE_S) if self._share else 0.0

    def failed(self, now: float) -> None:
        """An attempt failed by the unit's fault."""
        share = self.share(now)
        self._share, self._at = min(share + (1.0 - share) / 2.0, self.MAX), now

    def worked(self, now: float) -> None:
        """An attempt succeeded."""
        if self._share:
            self._share, self._at = self.share(now) / 2.0, now
