"""The latency of a first token on an idle unit, apart from prefill. Pure.

Front ends, tokenizers, networks and crowded machines take their time for each request, but for many at once.
If that counted as prefill, an engine would look slow, get less work, and then look even slower, because a
rate that is computed from work over time falls with the work.
"""

from __future__ import annotations

from math import inf, log, sqrt
from statistics import fmean

LATENCY_MAX_S = 60.0

_LATENCY_FADE = 0.95
_LATENCY_LEAST_S = 0.05
"""Shorter work counts as none."""
_LATENCY_CLIP = 4.0
_CLIPS = (20.0, 4.5)
"""For the first ones: what is guessed may be far off."""
_BY_CHANCE = 3.5
"""Means of equal units are closer to each other than so many standard deviations."""
_APART_S = 0.02
"""So little may stay between them: it tells of the load at each."""
_LATENCIES_KEPT = 16
"""So many requests are compared."""
SEEN_LEAST = 3
"""Fewer requests are accidents."""


class Latency:
    """The recent mean TTFT of prompts that found the unit idle; those with little work say most.

    Where all prompts are as long it has all their work in it. Nobody can tell then which part that is, until
    some are right behind each other; `tokens` are those whose work is in it.

    Some requests wait for what others do not: an image, a template, a tool. Which unit got more of them is
    chance; that one would look slow, stand idle, and go on looking slow. `usual_s` is the latency of units of
    its kind, `usual_log` that of the logarithms of what requests took there, and `spread` how far these are
    apart.
    """

    __slots__ = (
        "_is_stale",
        "_kept",
        "_seen_before",
        "_sum",
        "_tokens",
        "_weight",
        "seen",
        "spread",
        "tokens",
        "usual_log",
        "usual_s",
        "value",
    )

    def __init__(self) -> None:
        self.value = self.tokens = self.usual_s = 0.0
        """Seconds, tokens, seconds."""
        self.usual_log = self.spread = 0.0
        self._kept = [0.0] * _LATENCIES_KEPT
        """What the last requests took beside their work."""
        self.seen = self._seen_before = 0
        self._is_stale = False
        """None was seen between the last two looks at its peers."""
        self._sum = self._tokens = self._weight = 0.0

    def without_work_s(self, tokens_s: float) -> float:
        """What is left of it when so many tokens are computed in a second."""
        return max(self.value - self.tokens / tokens_s, 0.0)

    def reckoned_s(self, tokens_s: float) -> float:
        """The same, to compare units by. Of a unit that has shown none just now: no more than a little from
        what is usual, unless its requests are farther from those of others than by chance.
        """
        own_s, usual_s = self.value, self.usual_s
        if self._is_stale and usual_s and abs(own_s - usual_s) > _APART_S and self._is_by_chance():
            own_s = usual_s + (_APART_S if own_s > usual_s else -_APART_S)
        return max(own_s - self.tokens / tokens_s, 0.0)

    def _is_by_chance(self) -> bool:
        if self.seen < SEEN_LEAST:
            return True
        mean_apart = self.spread / sqrt(min(self.seen, _LATENCIES_KEPT))
        return abs(fmean(self.logs()) - self.usual_log) < _BY_CHANCE * mean_apart

    def logs(self) -> list[float]:
        """The logarithms of what the last requests took beside their work."""
        return [log(_LATENCY_LEAST_S + max(took_s, 0.0)) for took_s in self._kept[: self.seen]]

    def guess(self, value: float, usual_log: float = 0.0, spread: float = 0.0) -> None:
        """Set what is usual, and an initial latency unless one was measured; nothing if it is invalid."""
        if 0.0 <= value < inf:
            self.usual_s, self.usual_log, self.spread = min(value, LATENCY_MAX_S), usual_log, spread
            self._is_stale, self._seen_before = self.seen == self._seen_before, self.seen
            if not self.seen:
                self.value = self.usual_s

    def learn(self, tokens: int, work_s: float, ttft_s: float) -> None:
        """A prompt that found the unit idle has shown its first token; to compute it should take `work_s`."""
        if not (tokens >= 0 and work_s >= 0.0 and 0.0 <= ttft_s < inf):
            return
        seen = self.seen
        self._kept[seen % _LATENCIES_KEPT] = ttft_s - work_s
        self.seen = seen + 1
        if work_s > LATENCY_MAX_S:
            work_s = LATENCY_MAX_S
        least_s = _LATENCY_LEAST_S + work_s
        usual_s = self.value + least_s
        if ttft_s > usual_s:
            ttft_s = min(ttft_s, usual_s * (_CLIPS[seen] if seen < len(_CLIPS) else _LATENCY_CLIP))
        weight = least_s**-2.0
        self._sum = total = self._sum * _LATENCY_FADE + weight * ttft_s
        self._tokens = tokens_sum = self._tokens * _LATENCY_FADE + weight * tokens
        self._weight = weight = self._weight * _LATENCY_FADE + weight
        self.tokens = tokens_sum / weight
        value = total / weight
        self.value = value if value < LATENCY_MAX_S else LATENCY_MAX_S

    def reset(self) -> None:
        """The unit has restarted: the value stays as an estimate."""
        self.seen = self._seen_before = 0
        self._sum = self._tokens = self._weight = 0.0
