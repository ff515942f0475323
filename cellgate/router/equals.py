"""A comparison of two units that were asked the same, again and again: are they equals? Pure.

Units are equals if their answers are the same function of the request and of chance. How often such an answer
is bad nobody knows, and it may be another share for each request. An exact test for that, which may be looked
at after each pair: the evidence is a product of likelihood ratios, of which the mean is at most one for
equals, whatever their share is, whoever chose the requests and in which order. So it comes to 1 / `ERROR` in
at most `ERROR` of all comparisons (Ville's inequality; Turner, Ly, Grünwald: Generic E-variables for exact
sequential k-sample tests, 2021). How they are chosen may depend on the past, never on the answers themselves.
"""

from __future__ import annotations

from math import exp, lgamma, log

ERROR = 1e-6
"""In so many comparisons of equals at most one finds a difference."""
FUTILE = 0.3
"""With so little evidence left a comparison ends."""
PAIRS_MAX, STRONG = 96, 100.0
"""So many pairs show most differences of a half; those which have shown so much evidence by then go on."""
_WORSE = ((0.98, 0.02), (0.6, 0.07), (0.97, 0.4), (0.8, 0.25))
"""What is told apart from equals: shares of bad answers of the unit, and of others."""
_RATIOS = tuple(
    {
        (bad, others): (worse if bad else 1.0 - worse)
        / (mean if bad else 1.0 - mean)
        * (usual if others else 1.0 - usual)
        / (mean if others else 1.0 - mean)
        for bad in (False, True)
        for others in (False, True)
    }
    for worse, usual in _WORSE
    for mean in [(worse + usual) / 2.0]
)
_BACK = log(100.0)
"""So much more likely it is that a unit is mended than that it is not, when it comes back."""
_BAD_MOST, _USUAL_LEAST, _APART = 0.95, 0.01, 0.1


class Comparison:
    """Of one unit with others. Of so many `pairs` of answers so many of it, and of others, were bad."""

    def __init__(self) -> None:
        self.pairs = self.bad = self.others_bad = 0
        self._evidence = [1.0] * len(_RATIOS)

    def add(self, *, is_bad: bool, other_is_bad: bool) -> None:
        """Both have answered the same request."""
        self.pairs += 1
        self.bad += is_bad
        self.others_bad += other_is_bad
        answers = is_bad, other_is_bad
        self._evidence = [
            so_far * ratios[answers] for so_far, ratios in zip(self._evidence, _RATIOS, strict=True)
        ]

    @property
    def evidence(self) -> float:
        """How much speaks against their being equals; 1: nothing."""
        return sum(self._evidence) / len(self._evidence)

    @property
    def is_worse(self) -> bool:
        """Whether the unit answers worse than others, and chance does not explain it."""
        return self.evidence >= 1.0 / ERROR

    @property
    def is_over(self) -> bool:
        """Whether more pairs are not worth what they cost."""
        evidence = self.evidence
        return self.is_worse or evidence < FUTILE or (self.pairs >= PAIRS_MAX and evidence < STRONG)


class Mending:
    """Whether a unit that was worse answers as others do: it comes back once that is far more likely."""

    def __init__(self, found: Comparison) -> None:
        self._bad = min(_BAD_MOST, (found.bad + 0.5) / (found.pairs + 1))
        usual = (found.others_bad + 0.5) / (found.pairs + 1)
        self._usual = max(_USUAL_LEAST, min(usual, self._bad - _APART))
        self._odds = 0.0

    def add(self, *, is_bad: bool) -> None:
        """It has answered once more."""
        usual, bad = (self._usual, self._bad) if is_bad else (1.0 - self._usual, 1.0 - self._bad)
        self._odds = max(0.0, self._odds + log(usual / bad))

    @property
    def is_likely(self) -> bool:
        """Whether it rather answers well again than not."""
        return self._odds > 0.0

    @property
    def is_mended(self) -> bool:
        """Whether it may come back."""
        return self._odds >= _BACK


# How likely equals differ so much by chance, where it is looked at once: Fisher's exact test.


def chance_of(bad: int, total: int, others_bad: int, others: int) -> float:
    """How likely so many of the bad ones, or more, are among these `total`, if all are equally bad."""
    if bad * others <= others_bad * total:
        return 1.0
    all_bad = bad + others_bad
    term = exp(_log_ways(total, bad) + _log_ways(others, others_bad) - _log_ways(total + others, all_bad))
    chance = 0.0
    for each in range(bad, min(total, all_bad) + 1):
        chance += term
        term *= (total - each) * (all_bad - each) / ((each + 1) * (others - all_bad + each + 1))
    return chance


def _log_ways(of: int, some: int) -> float:
    return lgamma(of + 1) - lgamma(some + 1) - lgamma(of - some + 1)
