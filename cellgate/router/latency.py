"""The latency of a first token on an idle unit, apart from prefill. Pure.

Front ends, tokenizers, networks and crowded machines take their time for each request, but for many at once.
If that counted as prefill, an engine would look slow, get less work, and then look even slower, because a
rate that is computed from work over time falls with the work.
"""

from __future__ import annotations

from math import inf

LATENCY_MAX_S = 60.0

_FADE = 0.95
_LEAST_S = 0.05
"""Shorter work counts as none."""
_CLIP = 4.0
_CLIPS = (20.0, 20.0, 4.5)
"""For the first ones: what is guessed may be far off."""


class Latency:
    """The mean TTFT of late of prompts that found the unit idle; those with little work say most.

    Where all prompts are as long it has all their work in it. Nobody can tell then which part that is, until
    some are right behind each other; `tokens` are those whose work is in it.
    """

    __slots__ = ("_sum", "_tokens", "_weight", "seen", "tokens", "value")

    def __init__(self) -> None:
        self._sum = self._tokens = self._weight = 0.0
        self.seen = 0
        self.value = 0.0
        """Seconds."""
        self.tokens = 0.0

    def without_work_s(self, tokens_s: float) -> float:
        """What is left of it when so many tokens are computed in a second."""
        return max(self.value - self.tokens / tokens_s, 0.0)

    def guess(self, value: float) -> None:
        """Set an initial latency, unless one was measured already or it is invalid."""
        if not self.seen and 0.0 <= value < inf:
            self.value = min(value, LATENCY_MAX_S)

    def learn(self, tokens: int, work_s: float, ttft_s: float) -> None:
        """A prompt that found the unit idle has shown its first token; to compute it should take `work_s`."""
        if not (tokens >= 0 and 0.0 <= work_s < inf and 0.0 <= ttft_s < inf):
            return
        self.seen = seen = self.seen + 1
        if work_s > LATENCY_MAX_S:
            work_s = LATENCY_MAX_S
        least_s = _LEAST_S + work_s
        usual_s = self.value + least_s
        if ttft_s > usual_s:
            ttft_s = min(ttft_s, usual_s * (_CLIPS[seen] if seen < len(_CLIPS) else _CLIP))
        weight = least_s**-2.0
        self._sum = total = self._sum * _FADE + weight * ttft_s
        self._tokens = tokens_sum = self._tokens * _FADE + weight * tokens
        self._weight = weight = self._weight * _FADE + weight
        self.tokens = tokens_sum / weight
        value = total / weight
        self.value = value if value < LATENCY_MAX_S else LATENCY_MAX_S

    def reset(self) -> None:
        """The unit has restarted: the value stays as an estimate."""
        self.seen = 0
        self._sum = self._tokens = self._weight = 0.0
