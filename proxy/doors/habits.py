"""What requests of one key usually take: the ground for what the next one is charged with. Pure."""

from __future__ import annotations

COMPLETION_TOKENS = 256
"""The answer that is expected of a key that has had none."""
_WEIGHT = 0.1
"""Of the latest request in a moving mean, which covers the last ten or twenty."""


class Habits:
    """Of one key, learnt: tokens of its prompts for each one estimated, and of its answers."""

    __slots__ = ("completion", "ratio")

    def __init__(self) -> None:
        self.ratio = 1.0
        self.completion = float(COMPLETION_TOKENS)

    def expect(self, estimated: int, max_tokens: int) -> tuple[int, int]:
        """Tokens of a prompt and of its answer, which has at most `max_tokens` (0: any number)."""
        completion = round(self.completion)
        return round(estimated * self.ratio), min(completion, max_tokens) if max_tokens else completion

    def learn(self, estimated: int, prompt: int, completion: int) -> None:
        """A request was answered, and its engine has said what it took."""
        self.completion += _WEIGHT * (completion - self.completion)
        if estimated > 0:
            self.ratio += _WEIGHT * (prompt / estimated - self.ratio)
