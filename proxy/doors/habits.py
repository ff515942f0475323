"""What requests of one key usually take: the ground for what the next one is charged with. Pure."""

from __future__ import annotations

COMPLETION_TOKENS = 256
"""The answer that is expected of a key that has had none."""
_WEIGHT = 0.1
"""Of the latest request in a moving mean, which covers the last ten or twenty."""
_SHORT_SQUARE = 100.0**2
"""What prompts of less than 100 tokens have in excess is their template's; with longer ones, the text's."""


class Habits:
    """Of one key, learnt: tokens of its prompts for each one estimated, those that each prompt has besides
    (its engine's template), and those of its answers.
    """

    __slots__ = ("besides", "completion", "ratio")

    def __init__(self) -> None:
        self.ratio = 1.0
        self.besides = 0.0
        self.completion = float(COMPLETION_TOKENS)

    def expect(self, estimated: int, max_tokens: int) -> tuple[int, int]:
        """Tokens of a prompt and of its answer, which has at most `max_tokens` (0: any number)."""
        completion = round(self.completion)
        prompt = round(estimated * self.ratio + self.besides)
        if prompt < 0:
            prompt = 0
        return prompt, min(completion, max_tokens) if max_tokens else completion

    def learn(self, estimated: int, prompt: int, completion: int) -> None:
        """A request was answered, and its engine has said what it took."""
        self.completion += _WEIGHT * (completion - self.completion)
        # Normalised least mean squares: each part of the estimate takes its share of the error.
        error = prompt - estimated * self.ratio - self.besides
        step = _WEIGHT * error / (_SHORT_SQUARE + estimated * estimated)
        self.besides += step * _SHORT_SQUARE
        self.ratio += step * estimated
