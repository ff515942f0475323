"""The length of answers by model: the cost of decoding is computed from it. Pure.

The mean and not the median: costs are sums of waits, and the long answers make most of them.
"""

from __future__ import annotations

FIRST_ANSWER_TOKENS = 128.0
"""Before any answer has ended."""
GAIN = 0.02
"""The weight of one answer in the mean, once there were many."""
MODELS_MAX = 256
"""The most models that are kept: clients may name any while the models of units are unknown."""


class _Mean:
    """A mean; `share` is the weight of the next answer: that of all so far alike, and then GAIN."""

    __slots__ = ("seen", "share", "value")

    def __init__(self, value: float) -> None:
        self.value = value
        self.seen, self.share = 0, 1.0

    def settle(self) -> None:
        """One more was added, and the next one counts less."""
        self.seen += 1
        self.share = max(1.0 / (self.seen + 1), GAIN)


class AnswerLengths:
    """Mean tokens of recent answers, by model."""

    __slots__ = ("_all", "_means")

    def __init__(self) -> None:
        self._all = _Mean(FIRST_ANSWER_TOKENS)
        self._means: dict[str | None, _Mean] = {}

    @property
    def mean(self) -> float:
        """Of all models."""
        return self._all.value

    def expected(self, model: str | None, limit: int = 0) -> float:
        """Expected tokens of an answer of `model`, at most `limit` (`max_tokens`; 0: none was set)."""
        mean = (self._means.get(model) or self._all).value
        return limit if 0 < limit < mean else mean

    def learn(self, model: str | None, tokens: int) -> None:
        """A whole answer has ended. One without tokens (an embedding) counts as one."""
        if tokens < 1:
            tokens = 1
        every, of_model = self._all, self._means.get(model)
        every.value += (tokens - every.value) * every.share
        if every.share > GAIN:
            every.settle()
        if of_model is None:
            if len(self._means) >= MODELS_MAX:
                return
            of_model = self._means[model] = _Mean(0.0)
        of_model.value += (tokens - of_model.value) * of_model.share
        if of_model.share > GAIN:
            of_model.settle()
