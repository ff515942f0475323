"""How long answers are, by model: what a decoding price is reckoned over. Pure.

The mean and not the median: costs are sums of waits, and the long answers make most of them.
"""

from __future__ import annotations

FIRST_ANSWER_TOKENS = 128.0
"""Before any answer has ended."""
GAIN = 0.02
"""What one answer moves the mean, once there were many."""
MODELS_MAX = 256
"""Whoever asks may name any model where units have not told theirs."""


class AnswerLengths:
    """Mean tokens of the answers of late, by model."""

    __slots__ = ("_all", "_models")

    def __init__(self) -> None:
        self._all: tuple[float, int] = (FIRST_ANSWER_TOKENS, 0)
        self._models: dict[str | None, tuple[float, int]] = {}

    def expected(self, model: str | None, limit: int = 0) -> float:
        """Tokens of an answer of `model` as a rule, at most `limit` (`max_tokens`; 0: none was set)."""
        mean, _ = self._models.get(model, self._all)
        return float(limit) if 0 < limit < mean else mean

    def learn(self, model: str | None, tokens: int) -> None:
        """An answer has ended, whole. One without tokens (an embedding) counts as one."""
        self._all = _moved(self._all, tokens)
        if model in self._models or len(self._models) < MODELS_MAX:
            self._models[model] = _moved(self._models.get(model, (0.0, 0)), tokens)


def _moved(known: tuple[float, int], tokens: int) -> tuple[float, int]:
    mean, seen = known
    return mean + (max(tokens, 1) - mean) * max(1.0 / (seen + 1), GAIN), seen + 1
