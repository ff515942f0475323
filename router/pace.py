"""How fast a unit has been of late: the gaps between its tokens, and its time to first token by prompt size.

`gaps_ms` is written by the byte path, one place per millisecond, and is never reset: it is also the histogram
that the metrics show. What is recent is the difference to where the counts stood 10 to 20 s ago.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate

GAPS_MS = 4096
"""Gaps between tokens are counted per millisecond up to this; the last place takes all that are longer."""
MARK_S = 10.0

_ENOUGH_GAPS = 100
_PREFILLS_KEPT = 64
_PROMPT_MIN_TOKENS = 256
"""The time to first token of a shorter prompt says little about prefill."""
_FIRST_TOKENS_PER_S = 2000.0
"""Taken for the prefill rate until there is something to go by. Low: patience at first does no harm."""


class Pace:
    """The recent speed of one unit."""

    __slots__ = ("_before", "_mark", "_marked_at", "_prefill_rates", "gaps_ms")

    def __init__(self) -> None:
        self.gaps_ms = [0] * GAPS_MS
        self._before: list[int] | None = None
        self._mark: list[int] | None = None
        self._marked_at = 0.0
        self._prefill_rates: deque[float] = deque(maxlen=_PREFILLS_KEPT)

    def mark(self, now: float) -> None:
        """Note where the counts stand, if that is due. To be called now and then while tokens flow."""
        if now - self._marked_at >= MARK_S:
            self._before, self._mark, self._marked_at = self._mark, self.gaps_ms.copy(), now

    def gap_s(self, share: float) -> float | None:
        """The gap that this share (0 to 1) of the recent ones does not exceed; None when they are too few."""
        before = self._before or self._mark
        counts = (
            self.gaps_ms if before is None else [a - b for a, b in zip(self.gaps_ms, before, strict=True)]
        )
        total = sum(counts)
        if total < _ENOUGH_GAPS:
            return None
        rank = share * total
        gap_ms = next(ms for ms, seen in enumerate(accumulate(counts)) if seen >= rank)
        # A gap is counted by its whole milliseconds; it was up to one longer.
        return (gap_ms + 1) / 1000

    def prefilled(self, tokens: int, ttft_s: float) -> None:
        """An ask with a prompt of so many tokens has shown its first one."""
        if tokens >= _PROMPT_MIN_TOKENS and ttft_s > 0.0:
            self._prefill_rates.append(tokens / ttft_s)

    def prefill_s(self, tokens: int) -> float:
        """How long the prefill of a prompt takes, judged by the faster of the recent ones.

        A time to first token includes waiting for others, so the slower ones tell of the queue; and the
        fastest ones were found in the prefix cache.
        """
        rates = sorted(self._prefill_rates)
        return tokens / (rates[len(rates) * 3 // 4] if rates else _FIRST_TOKENS_PER_S)
