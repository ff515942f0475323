"""How long a first token takes on an idle unit however little there is to compute. Pure.

Front ends, tokenizers, networks and crowded machines take their time for each request, but for many at once.
Who took that for prefill would believe an engine slow, send it little, and by that have it look slower yet:
what is in flight, over how long it takes, is a rate that sinks with what is sent.
"""

from __future__ import annotations

from math import exp, inf

LATENCY_MAX_S = 60.0
LEAN_S = 60.0
"""Half of the way to what peers have is gone in so long."""

_FADE = 0.95
_LEAST_S = 0.05
"""Work that takes less is as good as none."""
_CLIP, _CLIP_FIRST = 4.0, 3.0


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
        """Take over a latency from elsewhere, unless something was seen already or it makes no sense."""
        if not self.seen and 0.0 <= value < inf:
            self.value = min(value, LATENCY_MAX_S)

    def lean(self, towards: float, elapsed_s: float) -> None:
        """Go some of the way to what peers have; what was seen counts the less from then on."""
        if self.seen and 0.0 <= towards < inf and elapsed_s > 0.0:
            keep = 0.5 ** (elapsed_s / LEAN_S)
            self.value = min(towards * (1.0 - keep) + self.value * keep, LATENCY_MAX_S)
            self._weight *= keep
            self._sum, self._tokens = self._weight * self.value, self._weight * self.tokens

    def learn(self, tokens: int, work_s: float, ttft_s: float) -> None:
        """A prompt that found the unit idle has shown its first token; to compute it should take `work_s`."""
        if not (tokens >= 0 and 0.0 <= work_s < inf and 0.0 <= ttft_s < inf):
            return
        self.seen += 1
        most_s = (self.value + work_s + _LEAST_S) * max(_CLIP, exp(_CLIP_FIRST / self.seen))
        weight = (_LEAST_S + work_s) ** -2.0
        self._sum = self._sum * _FADE + weight * min(ttft_s, most_s)
        self._tokens = self._tokens * _FADE + weight * tokens
        self._weight = self._weight * _FADE + weight
        self.tokens = self._tokens / self._weight
        self.value = min(self._sum / self._weight, LATENCY_MAX_S)

    def reset(self) -> None:
        """The unit has started anew: the value stays as a guess."""
        self.seen = 0
        self._sum = self._tokens = self._weight = 0.0
