"""The length of answers by model: the cost of decoding is computed from it. Pure.

The mean and not the median: costs are sums of waits, and the long answers make most of them.
"""

from __future__ import annotations

from collections import Counter

FIRST_ANSWER_TOKENS = 128.0
"""Before any answer has ended."""
GAIN = 0.02
"""The weight of one answer in the mean, once there were many."""
_ALL = "\0"
MODELS_MAX = 256
"""The most models that are kept: clients may name any while the models of units are unknown."""


class AnswerLengths:
    """Mean tokens of recent answers, by model."""

    __slots__ = ("_means", "_seen", "mean")

    def __init__(self) -> None:
        self.mean = FIRST_ANSWER_TOKENS
        """Of all models."""
        self._means: dict[str | None, float] = {}
        self._seen: Counter[str | None] = Counter()

    def expected(self, model: str | None, limit: int = 0) -> float:
        """Expected tokens of an answer of `model`, at most `limit` (`max_tokens`; 0: none was set)."""
        mean = self._means.get(model, self.mean)
        return limit if 0 < limit < mean else mean

    def learn(self, model: str | None, tokens: int) -> None:
        """A whole answer has ended. One without tokens (an embedding) counts as one."""
        seen, means, tokens = self._seen, self._means, max(tokens, 1)
        seen[_ALL] = count = seen[_ALL] + 1
        self.mean += (tokens - self.mean) * max(1.0 / count, GAIN)
        if model in means or len(means) < MODELS_MAX:
            seen[model] = count = seen[model] + 1
            mean = means.get(model, 0.0)
            means[model] = mean + (tokens - mean) * max(1.0 / count, GAIN)
