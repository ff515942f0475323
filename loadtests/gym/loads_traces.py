"""Loads after traces: Mooncake's, read from a file that is not part of this repository, and one like it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from loadtests.gym.nouns import Request
from loadtests.gym.prompts import Text
from loadtests.gym.shapes import byte_rate, exponential, lognormal, poisson
from loadtests.replay.trace import BLOCK_TOKENS, read

TRACE = Path("../shared/traces/synthetic_trace.jsonl")
MOST_TOKENS = 60_000
"""As the replay has it: of longer prompts an engine holds a few."""


@dataclass(frozen=True, slots=True)
class Mooncake:
    """Lines of the trace, from one drawn for the seed on, in the distances they have there but for a factor.

    A client of its own sends each; what they have in common follows from the trace's block ids.
    """

    path: Path = TRACE

    @property
    def missing(self) -> str:
        """Why it cannot be run here; empty when it can."""
        return "" if self.path.exists() else f"{self.path} is not there; it is in kvcache-ai/Mooncake"

    def make(self, rng: random.Random, rate: float, requests: int) -> list[Request]:
        lines = read(self.path, requests=100_000, max_tokens=MOST_TOKENS)
        first = rng.randrange(max(1, len(lines) - requests))
        lines = lines[first : first + requests]
        span_s = max(lines[-1].at_s - lines[0].at_s, 1e-9)
        factor = len(lines) / rate / span_s
        nodes: dict[tuple[int, int, int], Text] = {}
        made, nothing = [], Text()
        for number, line in enumerate(lines):
            text, left = nothing, line.prompt_tokens
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
    """As that trace: half of the prompts go on from an earlier one (its answer or another document behind
    it), prompts are 15,000 tokens on average, answers 150, and 60 % of prompt blocks have been seen before.
    """

    goes_on: float = 0.5
    window: int = 200

    def make(self, rng: random.Random, rate: float, requests: int) -> list[Request]:
        system, times = Text().extend(512), poisson(rng, rate)
        said: list[Text] = []
        made = []
        for number in range(requests):
            earlier = [text for text in said[-self.window :] if text.tokens < 40_000]
            if earlier and rng.random() < self.goes_on:
                # The later ones more often.
                text = earlier[-1 - int(len(earlier) * rng.random() ** 2)]
                prompt = text.extend(lognormal(rng, 1500, 4000, 20_000), byte_rate(rng))
            else:
                prompt = system.extend(lognormal(rng, 7000, 11_000, MOST_TOKENS - 600), byte_rate(rng))
            context = prompt.extend(exponential(rng, 150, 2000))
            said.append(context)
            made.append(Request(number, next(times), prompt, context, chance=rng.random()))
        return made
