"""What requests of one key usually take: the ground for what the next one is charged with. Pure."""

from __future__ import annotations

COMPLETION_TOKENS = 2048
"""An answer whose request has no `max_tokens` is expected to have so many at least: short ones must not teach
that the next ones are short, because hundreds of those may be in flight at once."""
ANSWER_TOKENS_MAX = 1 << 17
"""No answer is expected to be longer, whatever its request allows: hardly a model can give one."""
_WEIGHT = 0.1
"""Of the latest request in a moving mean, which covers the last ten or twenty."""
_SHORT_SQUARE = 100.0**2
"""What prompts of less than 100 tokens have in excess is their template's; with longer ones, the text's."""


class TokenEstimator:
    """Of one key, learnt: tokens of its prompts for each one estimated, those that each prompt has besides
    (its engine's template), and those of its longest answers lately.
    """

    __slots__ = ("besides", "completion", "ratio")

    def __init__(self) -> None:
        self.ratio = 1.0
        self.besides = 0.0
        self.completion = float(COMPLETION_TOKENS)

    def expect(self, estimated: int, max_tokens: int, answers: int = 1) -> tuple[int, int]:
        """Tokens of a prompt, and those that its `answers` may have, of at most `max_tokens` each (0: any
        number).
        """
        completion = max_tokens or max(COMPLETION_TOKENS, round(self.completion))
        if completion > ANSWER_TOKENS_MAX:
            completion = ANSWER_TOKENS_MAX
        prompt = round(estimated * self.ratio + self.besides)
        if prompt < 0:
            prompt = 0
        return prompt, completion * answers

    def learn(self, estimated: int, prompt: int, completion: int) -> None:
        """A request was answered, and its engine has said what it took; `completion`: an answer."""
        longer = completion - self.completion
        self.completion += longer if longer > 0 else _WEIGHT * longer
        # Normalised least mean squares: each part of the estimate takes its share of the error.
        error = prompt - estimated * self.ratio - self.besides
        step = _WEIGHT * error / (_SHORT_SQUARE + estimated * estimated)
        self.besides += step * _SHORT_SQUARE
        self.ratio += step * estimated
