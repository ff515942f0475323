"""Loads after traces: one read from a file that is not part of this repository, and one like Mooncake's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from loadtests.datasets.mooncake import BLOCK_TOKENS
from loadtests.datasets.reading import read_timed
from loadtests.gym.nouns import Request
from loadtests.gym.prompts import Text
from loadtests.gym.shapes import byte_rate, lognormal, poisson

TRACE = Path("../shared/traces/synthetic_trace.jsonl")
MOST_TOKENS = 60_000
"""As the replay has it: of longer prompts an engine holds a few."""


@dataclass(frozen=True, slots=True)
class Mooncake:
    """Lines of the trace, from one drawn for the seed on, in the distances they have there but for a factor.

    A client of its own sends each; what they have in common follows from the trace's block ids, if it has
    them.
    """

    path: Path = TRACE

    @property
    def missing(self) -> str:
        """Why it cannot be run here; empty when it can."""
        return "" if self.path.exists() else f"{self.path} is not there; it is in kvcache-ai/Mooncake"

    def make(self, rng: random.Random, rate: float, requests: int) -> list[Request]:
        lines = read_timed(self.path, requests=100_000, max_tokens=MOST_TOKENS)
        first = rng.randrange(max(1, len(lines) - requests))
        lines = lines[first : first + requests]
        span_s = max(lines[-1].at_s - lines[0].at_s, 1e-9)
        factor = len(lines) / rate / span_s
        nodes: dict[tuple[int, int, int], Text] = {}
        made, nothing = [], Text()
        for number, line in enumerate(lines):
            text, left = nothing, line.prompt_tokens
            if not line.blocks:  # A trace that does not tell what prompts have in common.
                text = nothing.extend(left, 4.0)
            for block in line.blocks:
                tokens = min(left, BLOCK_TOKENS)
                key = (id(text), block, tokens)
                if key not in nodes:
                    nodes[key] = text.extend(tokens, 4.0 + 0.6 * (block % 7) / 7.0)
                text, left = nodes[key], left - tokens
            at = (line.at_s - lines[0].at_s) * factor + rng.uniform(0.0, 0.05)
            made.append(Request(number, at, text, text.extend(line.answer_tokens), chance=rng.random()))
        return made


@dataclass(frozen=True, slots=True)
class MooncakeLike:
    """As that trace is: prompts of 14,000 tokens on average (half of them over 11,000), answers of 150. Of a
    thousand requests a fifth go on from an earlier one, most of them from one some hundreds before, and
    have 95 % of their prompt in common with it; the others share a block or none.
    """

    goes_on: float = 0.22
    distance: float = 280.0

    def make(self, rng: random.Random, rate: float, requests: int) -> list[Request]:
        system, times = Text().extend(BLOCK_TOKENS), poisson(rng, rate)
        prompts: list[Text] = []
        made = []
        for number in range(requests):
            back = 1 + int(rng.expovariate(1.0 / self.distance))
            if back <= len(prompts) and rng.random() < self.goes_on:
                prompt = prompts[-back].extend(lognormal(rng, 500, 800, 4000), byte_rate(rng))
            else:
                own = lognormal(rng, 10_000, 13_500, MOST_TOKENS - BLOCK_TOKENS)
                prompt = system.extend(own, byte_rate(rng))
            prompts.append(prompt)
            context = prompt.extend(lognormal(rng, 71, 151, 2000))
            made.append(Request(number, next(times), prompt, context, chance=rng.random()))
        return made
