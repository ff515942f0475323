"""What requests of one key to one model usually take: the ground for what the next is charged with. Pure.

A lesson is what a unit has told, so it counts for the key that asked it and the model that answered, is
bounded by what a text can have, and is forgotten.

In this order: `TokenEstimator`, `TokenEstimators`.
"""

from __future__ import annotations

from math import inf

from cellgate.proxy.request.answer_limits import ANSWER_TOKENS_MAX
from cellgate.proxy.request.token_usage import TEMPLATE_TOKENS

COMPLETION_TOKENS = 2048
"""An answer whose request has no `max_tokens` is expected to have so many at least: short ones must not teach
that the next ones are short, because hundreds of those may be in flight at once."""
_WEIGHT = 0.1
"""Of the latest request in a moving mean, which covers the last ten or twenty."""
_SHORT_SQUARE = 100.0**2
"""What prompts of less than 100 tokens have in excess is their template's; with longer ones, the text's."""


_RATIO_MAX = 4.0
"""A byte is a token at most, and a token was estimated for four of them."""
_GREAT = 1024
"""Smaller errors do not lead beyond what can be."""
FORGET_S = 600.0
"""So long after its last lesson nothing is known: who was refused by it could not correct it."""
ESTIMATES_KEPT = 16_384
"""More of them are not kept: the one made longest ago goes."""


class TokenEstimator:
    """Of one key and model, learnt: tokens of its prompts for each one estimated, those that each prompt has
    besides (its engine's template), and those of its longest answers lately.
    """

    __slots__ = ("besides", "completion", "ratio", "until")

    def __init__(self) -> None:
        self.until = inf
        """When what it knows is forgotten, in seconds since 1970."""
        self.ratio = 1.0
        self.besides = 0.0
        self.completion = float(COMPLETION_TOKENS)

    def expect(self, estimated: int, max_tokens: int, answers: int = 1) -> tuple[int, int]:
        """Tokens of a prompt, and of its `answers`, of at most `max_tokens` each (0: any number)."""
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
        if error > _GREAT:
            self.besides = min(self.besides, TEMPLATE_TOKENS)
            self.ratio = min(self.ratio, _RATIO_MAX)


Who = tuple[str, str, str]
"""A key, its tenant, and a model."""


class TokenEstimators:
    """Those of all keys and models: `known`, the one made longest ago first."""

    def __init__(self) -> None:
        self.known: dict[Who, TokenEstimator] = {}

    def make(self, who: Who) -> TokenEstimator:
        """One that is to be taught, because nothing is known."""
        self.known[who] = made = TokenEstimator()
        if len(self.known) > ESTIMATES_KEPT:
            del self.known[next(iter(self.known))]
        return made


NOVICE = TokenEstimator()
"""Who knows nothing, and learns nothing."""
