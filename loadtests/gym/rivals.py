"""Routers as others have them, each with what it would really see: its own requests, and the prompts it sent.

None has a queue of its own: engines queue. `rng` breaks ties, and draws where a rule draws.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from loadtests.gym.engine import Engine
from loadtests.gym.nouns import Call, Fleet, Request
from loadtests.gym.world import World
from router.books import BLOCK_BYTES


class Counting:
    """Sends each request at once to the unit that `choose` names; counts its own requests at each.

    A subclass is one rule.
    """

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world = world
        self.rng = rng
        self.in_flight = [0] * len(world.fleet.places)
        self._up = list(world.up)

    def choose(self, request: Request, units: list[int]) -> int:
        """One of `units`, which are those that serve its model and are up."""
        raise NotImplementedError

    def come(self, call: Call, now: float) -> None:
        units = serving(self.world.fleet, call.request.model, self._up)
        unit = self.choose(call.request, units)
        self.in_flight[unit] += 1
        self.world.send(call, unit)

    def first(self, call: Call, now: float) -> None:
        """Nothing follows."""

    def ended(self, call: Call, now: float) -> None:
        assert call.unit is not None
        self.in_flight[call.unit] -= 1

    def broke(self, call: Call, now: float) -> None:
        """As a proxy that tries again elsewhere."""
        self.come(call, now)

    def changed(self, unit: int, now: float, *, is_up: bool) -> None:
        self._up[unit] = is_up
        self.in_flight[unit] = 0

    def waiting(self) -> Collection[str]:
        return ()

    def least(self, units: list[int]) -> int:
        """Of those with the fewest requests one by chance."""
        fewest = min(self.in_flight[unit] for unit in units)
        return self.rng.choice([unit for unit in units if self.in_flight[unit] == fewest])


def serving(fleet: Fleet, model: str, up: list[bool]) -> list[int]:
    """The units that may get a request; those of far cells only where there are no others."""
    units = [
        number
        for number, place in enumerate(fleet.places)
        if up[number] and (not place.unit.models or model in place.unit.models)
    ]
    near = [number for number in units if not fleet.cell(fleet.places[number]).spill_s]
    return near or units


class LeastConnections(Counting):
    """As HAProxy's leastconn and nginx's least_conn."""

    def choose(self, request: Request, units: list[int]) -> int:
        weights = [self.world.fleet.places[unit].unit.weight for unit in units]
        if len(set(weights)) == 1:
            return self.least(units)
        loads = [(self.in_flight[unit] + 1) / weight for unit, weight in zip(units, weights, strict=True)]
        return self.rng.choice([unit for unit, load in zip(units, loads, strict=True) if load == min(loads)])


class PowerOfTwo(Counting):
    """The one with fewer requests of two drawn ones."""

    def choose(self, request: Request, units: list[int]) -> int:
        return self.least(self.rng.sample(units, 2) if len(units) > 1 else units)


class RoundRobin(Counting):
    """In turn."""

    def __init__(self, world: World, rng: random.Random) -> None:
        super().__init__(world, rng)
        self._turn = rng.randrange(len(world.fleet.places))

    def choose(self, request: Request, units: list[int]) -> int:
        self._turn += 1
        return units[self._turn % len(units)]


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


class LMetric(Counting):
    """Uncached tokens to compute x sequences there, the least (arXiv 2603.15202)."""

    BYTES_PER_TOKEN = 4.0

    def __init__(self, world: World, rng: random.Random) -> None:
        super().__init__(world, rng)
        self._caches = [Blocks(self._limit(unit)) for unit in range(len(world.fleet.places))]
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
        self._caches[unit], self._pending[unit] = Blocks(self._limit(unit)), 0.0

    def _limit(self, unit: int) -> int:
        return int(self.world.fleet.places[unit].model.kv_tokens * self.BYTES_PER_TOKEN / BLOCK_BYTES)

    def _uncached(self, request: Request, unit: int) -> float:
        cached = self._caches[unit].match(request.prompt.blocks) * BLOCK_BYTES
        return max(request.prompt.size - cached, 1) / self.BYTES_PER_TOKEN


class Oracle(Counting):
    """Knows each engine's speed, cache and queue, and how long each answer will be: greedy on the seconds
    that the request and those beside it will wait because it goes there.
    """

    def choose(self, request: Request, units: list[int]) -> int:
        self.world.settle()
        places, engines = self.world.fleet.places, self.world.engines
        costs = {unit: waits_s(engines[unit], request) + places[unit].network_s for unit in units}
        fewest = min(costs.values())
        return self.rng.choice([unit for unit in units if costs[unit] <= fewest + 1e-4])


PREFILL_BESIDE = 0.3
"""A second of computing prompts delays those that decode by so much of it: some were prompts as well."""


def waits_s(engine: Engine, request: Request) -> float:
    """The seconds that a request and those beside it will wait because it goes to this engine."""
    model, prompt, answer = engine.model, request.prompt, request.answer_tokens
    uncached = prompt.tokens - engine.cached(prompt.names, prompt.tokens)
    others = engine.count
    first_s = (engine.pending + uncached) / model.prefill_tokens_s
    step_s = model.step_s(0, min(others + 1, model.seats), engine.context + prompt.tokens)
    more_s = model.per_sequence_s + model.per_context_token_s * (prompt.tokens + answer / 2)
    beside_s = PREFILL_BESIDE * others * uncached / model.prefill_tokens_s + answer * more_s * min(
        others, model.seats
    )
    return first_s + answer * step_s + beside_s + _seat_s(engine, request, step_s)


def _seat_s(engine: Engine, request: Request, step_s: float) -> float:
    """How long until there are a seat and KV cache for it, if those that decode leave when they are due."""
    model = engine.model
    ahead = len(engine.waiting) + engine.coming
    leaving = ahead + 1 + len(engine.running) - model.seats
    needed = engine.kv.used + request.context.tokens
    needed += sum(sequence.goal for sequence in engine.waiting)
    lacking = needed - model.kv_tokens
    if lacking > 0 and engine.running:
        leaving = max(leaving, round(lacking * len(engine.running) / max(engine.kv.used, 1) + 0.5))
    if leaving <= 0:
        return 0.0
    dues = sorted(engine.dues()) or [1]
    rounds, rest = divmod(leaving - 1, len(dues))
    return step_s * (dues[rest] + rounds * dues[-1])


RIVALS: dict[str, type[Counting]] = {
    "leastconn": LeastConnections,
    "p2c": PowerOfTwo,
    "round_robin": RoundRobin,
    "cache_aware": CacheAware,
    "lmetric": LMetric,
    "oracle": Oracle,
}
SIMPLE = ("leastconn", "p2c", "round_robin")
"""What the gate must never be worse than."""
