"""Routers that remember which prompts they have sent where, with what they would really see besides."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass

from cellgate.router.cost_model import BLOCK_BYTES
from loadtests.gym.counting import Counting
from loadtests.gym.nouns import Call, Request
from loadtests.gym.world import World

BYTES_PER_TOKEN = 4.0
"""What those take a token for that count in tokens."""


class Blocks:
    """The blocks of prompts that were sent to a unit, the least recently used out first."""

    def __init__(self, limit: int) -> None:
        self._held: OrderedDict[int, None] = OrderedDict()
        self._limit = limit

    def match(self, blocks: tuple[int, ...]) -> int:
        """How many blocks at the beginning of a prompt were sent there."""
        held = self._held
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] in held:
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, blocks: tuple[int, ...]) -> None:
        """A prompt is sent there."""
        for block in reversed(blocks):
            self._held.pop(block, None)
            self._held[block] = None
        while len(self._held) > self._limit:
            self._held.popitem(last=False)


@dataclass(frozen=True, slots=True)
class CacheAwareRules:
    """SMG's defaults on its command line: imbalanced means more than `abs` apart and `rel` times as many."""

    cache_threshold: float = 0.3
    balance_abs: int = 64
    balance_rel: float = 1.5
    tree_bytes: int = 67_108_864


class CacheAware(Counting):
    """sglang-router's and SMG's cache_aware: the longest match, else, or when imbalanced, the fewest."""

    rules = CacheAwareRules()

    def __init__(self, world: World, rng: random.Random) -> None:
        super().__init__(world, rng)
        self._trees = [Blocks(self.rules.tree_bytes // BLOCK_BYTES) for _ in world.fleet.places]

    def choose(self, request: Request, units: list[int]) -> int:
        loads, rules = [self.in_flight[unit] for unit in units], self.rules
        blocks = request.prompt.blocks
        most, least = max(loads), min(loads)
        if most - least > rules.balance_abs and most > rules.balance_rel * least:
            unit = self.least(units)
        else:
            matches = {unit: self._trees[unit].match(blocks) for unit in units}
            best = max(units, key=lambda unit: matches[unit])
            is_match = matches[best] * BLOCK_BYTES > rules.cache_threshold * request.prompt.size
            unit = best if is_match else self.least(units)
        self._trees[unit].add(blocks)
        return unit

    def changed(self, unit: int, now: float, *, is_up: bool) -> None:
        super().changed(unit, now, is_up=is_up)
        self._trees[unit] = Blocks(self.rules.tree_bytes // BLOCK_BYTES)


def _blocks_of(kv_tokens: int) -> int:
    return int(kv_tokens * BYTES_PER_TOKEN / BLOCK_BYTES)


class LMetric(Counting):
    """Uncached tokens to compute x sequences there, the least (arXiv 2603.15202)."""

    def __init__(self, world: World, rng: random.Random) -> None:
        super().__init__(world, rng)
        self._caches = [Blocks(_blocks_of(place.model.kv_tokens)) for place in world.fleet.places]
        self._pending = [0.0] * len(world.fleet.places)

    def choose(self, request: Request, units: list[int]) -> int:
        uncached = {unit: self._uncached(request, unit) for unit in units}
        costs = {unit: (self._pending[unit] + uncached[unit]) * (self.in_flight[unit] + 1) for unit in units}
        fewest = min(costs.values())
        return self.rng.choice([unit for unit in units if costs[unit] <= fewest])

    def come(self, call: Call, now: float) -> None:
        super().come(call, now)
        assert call.unit is not None
        uncached = self._uncached(call.request, call.unit)
        call.held = uncached
        self._pending[call.unit] += uncached
        self._caches[call.unit].add(call.request.prompt.blocks)

    def first(self, call: Call, now: float) -> None:
        assert call.unit is not None
        assert isinstance(call.held, float)
        self._pending[call.unit] -= call.held
        call.held = 0.0

    def changed(self, unit: int, now: float, *, is_up: bool) -> None:
        super().changed(unit, now, is_up=is_up)
        self._caches[unit] = Blocks(_blocks_of(self.world.fleet.places[unit].model.kv_tokens))
        self._pending[unit] = 0.0

    def _uncached(self, request: Request, unit: int) -> float:
        cached = self._caches[unit].match(request.prompt.blocks) * BLOCK_BYTES
        return max(request.prompt.size - cached, 1) / BYTES_PER_TOKEN


class Scorer(Counting):
    """llm-d's default: queue 2 + free KV cache 2 + share of the prompt that is cached 3, the highest; what
    engines say of themselves is read every 50 ms.
    """

    SCRAPE_S = 0.05

    def __init__(self, world: World, rng: random.Random) -> None:
        super().__init__(world, rng)
        places = world.fleet.places
        self._caches = [Blocks(_blocks_of(place.model.kv_tokens)) for place in places]
        self._said = [(0, 0.0)] * len(places)
        self._read_at = -self.SCRAPE_S

    def choose(self, request: Request, units: list[int]) -> int:
        if self.world.now - self._read_at >= self.SCRAPE_S:
            self._read_at = self.world.now
            self._said = [(len(engine.waiting), engine.kv_use) for engine in self.world.engines]
        queues = [self._said[unit][0] for unit in units]
        most, spread = max(queues), max(queues) - min(queues)
        blocks = request.prompt.blocks
        scores = {
            unit: 2.0 * ((most - self._said[unit][0]) / spread if spread else 1.0)
            + 2.0 * (1.0 - self._said[unit][1])
            + 3.0 * self._caches[unit].match(blocks) / max(len(blocks), 1)
            for unit in units
        }
        best = max(scores.values())
        unit = self.rng.choice([unit for unit in units if scores[unit] >= best - 1e-9])
        self._caches[unit].add(blocks)
        return unit

    def changed(self, unit: int, now: float, *, is_up: bool) -> None:
        super().changed(unit, now, is_up=is_up)
        self._caches[unit] = Blocks(_blocks_of(self.world.fleet.places[unit].model.kv_tokens))
