"""Loads whose requests do not follow from each other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from loadtests.gym.nouns import Request
from loadtests.gym.prompts import Text
from loadtests.gym.shapes import bursts, byte_rate, exponential, lognormal, poisson, waves


@dataclass(frozen=True, slots=True)
class Single:
    """Prompts that begin with one of `systems` system texts (drawn by Zipf's law), and go on with text of
    one's own.

    Lengths are in tokens: of own text and answer the means of exponential ones, or with `own_median` and
    `answer_median` of lognormal ones. `arrivals` is poisson, bursts (20 to 120 at once) or waves.
    """

    systems: int = 1
    zipf: float = 1.0
    system_tokens: tuple[int, int] = (0, 0)
    own_tokens: float = 200.0
    own_median: float = 0.0
    own_most: float = 16_000.0
    own_is_fixed: bool = False
    answer_tokens: float = 200.0
    answer_median: float = 0.0
    answer_most: float = 8000.0
    arrivals: str = "poisson"
    ramp_s: float = 0.0
    stream: bool = True
    usage: bool = True
    deadline_s: float = inf

    def make(self, rng: random.Random, rate: float, requests: int) -> list[Request]:
        nothing = Text()
        systems = [self._system(rng, nothing) for _ in range(self.systems)]
        weights = list(accumulate((n + 1) ** -self.zipf for n in range(self.systems)))
        times, made = self._times(rng, rate, requests), []
        for number in range(requests):
            system = rng.choices(systems, cum_weights=weights)[0]
            prompt = system.extend(self._own(rng), byte_rate(rng))
            made.append(
                Request(
                    number,
                    next(times),
                    prompt,
                    prompt.extend(self._answer(rng)),
                    stream=self.stream,
                    usage=self.usage,
                    deadline_s=self.deadline_s,
                    chance=rng.random(),
                )
            )
        return made

    def _system(self, rng: random.Random, nothing: Text) -> Text:
        tokens = rng.randint(*self.system_tokens)
        return nothing.extend(tokens, byte_rate(rng)) if tokens else nothing

    def _own(self, rng: random.Random) -> int:
        if self.own_is_fixed:
            return int(self.own_tokens)
        if self.own_median:
            return lognormal(rng, self.own_median, self.own_tokens, self.own_most)
        return exponential(rng, self.own_tokens, self.own_most, least=8)

    def _answer(self, rng: random.Random) -> int:
        if self.answer_median:
            return lognormal(rng, self.answer_median, self.answer_tokens, self.answer_most)
        return exponential(rng, self.answer_tokens, self.answer_most)

    def _times(self, rng: random.Random, rate: float, requests: int) -> Iterator[float]:
        if self.arrivals == "bursts":
            return bursts(rng, rate, 20, 120)
        if self.arrivals == "waves":
            return waves(rng, rate, requests / rate / 2.5)
        if self.ramp_s:
            return _ramp(rng, rate, self.ramp_s)
        return poisson(rng, rate)


def _ramp(rng: random.Random, rate: float, ramp_s: float) -> Iterator[float]:
    """Requests begin to come slowly."""
    at = 0.0
    while True:
        at += rng.expovariate(rate * min(1.0, (at + 0.2) / ramp_s))
        yield at


@dataclass(frozen=True, slots=True)
class Tenants:
    """One tenant floods with long work of low priority, two others ask short things, one of them urgently."""

    flood: float = 0.3

    def make(self, rng: random.Random, rate: float, requests: int) -> list[Request]:
        nothing, times, made = Text(), poisson(rng, rate), []
        system = nothing.extend(600)
        for number in range(requests):
            is_flood = rng.random() < self.flood
            tokens = exponential(rng, 6000 if is_flood else 300, 30_000, least=20)
            prompt = (nothing if is_flood else system).extend(tokens, byte_rate(rng))
            tenant = "flood" if is_flood else rng.choice(("calm", "urgent"))
            made.append(
                Request(
                    number,
                    next(times),
                    prompt,
                    prompt.extend(exponential(rng, 200, 4000)),
                    tenant=tenant,
                    priority={"flood": 1, "calm": 0, "urgent": -1}[tenant],
                    chance=rng.random(),
                )
            )
        return made


@dataclass(frozen=True, slots=True)
class TwoModels:
    """Most ask for model `m`, few for model `n`, whose units have little to do."""

    share: float = 0.08

    def make(self, rng: random.Random, rate: float, requests: int) -> list[Request]:
        times, made = poisson(rng, rate), []
        systems = {"m": Text().extend(1000), "n": Text([1 << 24]).extend(1000)}
        for number in range(requests):
            model = "n" if rng.random() < self.share else "m"
            prompt = systems[model].extend(exponential(rng, 1500, 12_000, least=20), byte_rate(rng))
            answer = prompt.extend(exponential(rng, 150, 2000))
            made.append(Request(number, next(times), prompt, answer, model=model, chance=rng.random()))
        return made
