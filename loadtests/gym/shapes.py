"""What loads are made with: lengths, arrivals, and how many bytes a token of somebody's text takes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import inf, log, sin, tau
from typing import Protocol

from loadtests.gym.nouns import Request


class Load(Protocol):
    """A way in which requests come: `requests` of them at `rate` a second on average."""

    def make(self, rng: random.Random, rate: float, requests: int) -> list[Request]:
        """Those that come by themselves; who follows up is behind another."""
        ...


def exponential(rng: random.Random, mean: float, most: float = inf, least: int = 1) -> int:
    """A length in tokens."""
    return max(least, int(min(rng.expovariate(1.0 / mean), most)))


def lognormal(rng: random.Random, median: float, mean: float, most: float) -> int:
    """A length in tokens, with a long tail: sigma follows from how far the mean is from the median."""
    sigma = (2.0 * log(mean / median)) ** 0.5
    return max(1, int(min(rng.lognormvariate(log(median), sigma), most)))


def byte_rate(rng: random.Random) -> float:
    """Bytes that a token of somebody's text takes; the gate takes them for 4 until it knows better."""
    return rng.uniform(4.0, 4.6)


def poisson(rng: random.Random, rate: float) -> Iterator[float]:
    """Times at which requests come that know nothing of each other."""
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        yield at


def bursts(rng: random.Random, rate: float, least: int, most: int) -> Iterator[float]:
    """As many at once, within 50 ms, and nothing in between."""
    at = 0.0
    while True:
        size = rng.randint(least, most)
        at += rng.expovariate(rate / (least + most) * 2.0)
        yield from sorted(at + rng.uniform(0.0, 0.05) for _ in range(size))


def waves(rng: random.Random, rate: float, period_s: float) -> Iterator[float]:
    """A rate that goes up and down, between a tenth of the mean and nearly twice the mean."""
    for at in poisson(rng, 1.9 * rate):
        if rng.random() * 1.9 < 1.0 + 0.9 * sin(tau * at / period_s):
            yield at
