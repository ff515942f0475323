"""Known answers: what units have said to one fixed greedy prompt, and which answers are the same. Pure.

Greedy decoding gives all units of one build the same answer, up to rounding: a log probability may differ by
the tolerance, and another token counts only where the first one was so far ahead of it that rounding cannot
explain it. Who is wrong, an extra says.

In this order: `KnownAnswerRules`, `AnswerRecord`, `is_same`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from cellgate.router.judge import ANSWER_SOURCE
from cellgate.router.nouns import AnswerToken

ANSWER_FAULT = ("", ANSWER_SOURCE)
"""The open fault of a unit that is out for its answers."""
STRIKES = 2
"""Answers in a row that differ, before a unit can be wrong."""
STRIKES_OF_TEXT = 3
"""The same where an engine shows no log probabilities: a tie of two tokens looks like another answer."""
KNOWN_RETRY_S = 2.0
"""How soon a unit is asked again whose answer is awaited."""
TOLERANCE = 0.25
"""So far two log probabilities of one token may be apart, by rounding and batching."""
AnswerTokens = tuple[AnswerToken, ...]


@dataclass(frozen=True, slots=True)
class KnownAnswerRules:
    """The rules of known answers.

    every_s (60): how often an idle unit gets the known prompt; 0: never.
    """

    every_s: float = 60.0


class AnswerRecord(NamedTuple):
    """The answers of one unit in one epoch, to one question.

    `first` is the answer that it is held to, and since when; empty: none is. `differing` counts answers in a
    row that differ, since `differs_since`.
    """

    question: str
    first: AnswerTokens
    first_at: float
    latest: AnswerTokens
    at: float
    differing: int = 0
    differs_since: float = inf
    wavered_at: float = -inf
    """When it last came back to what it had said, after other words and without a fault."""

    @property
    def needed(self) -> int:
        """How many answers in a row have to differ."""
        shows_ties = bool(self.latest) and bool(self.latest[0].others)
        return STRIKES if shows_ties else STRIKES_OF_TEXT

    @property
    def is_confirmed(self) -> bool:
        """Whether enough answers in a row have differed."""
        return self.differing >= self.needed


def is_same(one: AnswerTokens, other: AnswerTokens) -> bool:
    """Whether both are one answer, up to rounding. No answer is like nothing."""
    if not one or not other:
        return False
    if one == other and one is not other:
        # As most are; where both are one object it may have numbers that are none.
        return True
    for a, b in zip(one, other, strict=False):
        if a.token != b.token:
            # The rest follows from this token, so it says nothing.
            return _might_say(a, b) or _might_say(b, a)
        if not _is_close(a.logprob, b.logprob):
            return False
    # Where one has ended, its next token was the end.
    common = min(len(one), len(other))
    return len(one) == len(other) or bool(_tied(max(one, other, key=len)[common]))


def is_implausible(tokens: AnswerTokens, others: Collection[AnswerTokens]) -> bool:
    """Whether no other build of the model could have given this answer: where it first differs from each of
    `others`, neither found the other's token likely. False where an engine shows no log probabilities.
    """
    shown = [other for other in others if other and other[0].others]
    if not tokens or not tokens[0].others or not shown:
        return False
    return not any(_might_be(tokens, other) for other in shown)


def _might_be(one: AnswerTokens, other: AnswerTokens) -> bool:
    for a, b in zip(one, other, strict=False):
        if a.token != b.token:
            return a.token in dict(b.others) or b.token in dict(a.others)
    return True


def _tied(token: AnswerToken) -> tuple[tuple[str, float], ...]:
    """The next likely tokens that rounding may put before this one: both may move."""
    if token.logprob is None:
        return ()
    least = token.logprob - 2 * TOLERANCE
    return tuple(other for other in token.others if other[1] >= least)


def _might_say(one: AnswerToken, other: AnswerToken) -> bool:
    """Whether rounding may turn one token into the other. When all that is shown is tied, more may be."""
    tied = _tied(one)
    if tied and len(tied) == len(one.others) > 1:
        return True
    return any(text == other.token and _is_close(value, other.logprob) for text, value in tied)


def _is_close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    # False for NaN.
    return abs(one - other) <= TOLERANCE
