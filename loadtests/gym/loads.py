"""Loads: each a class of its own, with the knobs that are natural to it.

`make` gives `requests` requests that come at `rate` a second on average; how long prompts and answers are is
drawn from `rng`, and so are the bytes a token takes: what the gate takes them for (4) is a guess.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf
from typing import Protocol

from loadtests.gym.nouns import Request
from loadtests.gym.prompts import Text


class Load(Protocol):
    """A way in which requests come."""

    def make(self, rng: random.Random, rate: float, requests: int) -> list[Request]:
        """The requests, in the order of their numbers."""
        ...


def length(rng: random.Random, mean: float, most: float = inf, least: int = 1) -> int:
    """An exponential length, in tokens."""
    return max(least, int(min(rng.expovariate(1.0 / mean), most)))


def byte_rate(rng: random.Random) -> float:
    """Bytes that a token of somebody's text takes."""
    return rng.uniform(4.0, 4.6)


@dataclass(frozen=True, slots=True)
class SharedPrompt:
    """Everybody has one system prompt, a question of one's own, and gets a long answer: the commonest chat.

    `ramp_s`: so long it takes until the requests come at their full rate.
    """

    system_tokens: int = 4096
    own_tokens: int = 200
    answer_tokens: float = 800.0
    ramp_s: float = 0.0

    def make(self, rng: random.Random, rate: float, requests: int) -> list[Request]:
        system, at, made = Text().extend(self.system_tokens), 0.0, []
        for number in range(requests):
            slow = min(1.0, (at + 0.2) / self.ramp_s) if self.ramp_s else 1.0
            at += rng.expovariate(rate * slow)
            prompt = system.extend(self.own_tokens, byte_rate(rng))
            answer = length(rng, self.answer_tokens, 20 * self.answer_tokens)
            made.append(Request(number, at, prompt, prompt.extend(answer), chance=rng.random()))
        return made


LOADS: dict[str, Load] = {
    "shared_prompt": SharedPrompt(),
    "shared_prompt_ramp": SharedPrompt(ramp_s=10.0),
}
