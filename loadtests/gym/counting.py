"""Routers that count their own requests, and see nothing else. None has a queue of its own: engines queue.

`rng` breaks ties, and draws where a rule draws.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from functools import partial

from loadtests.gym.nouns import Call, Fleet, Request
from loadtests.gym.world import World


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


class AlwaysSplit(Counting):
    """As the example proxy of vLLM: each prompt to the prefiller with the fewest, then to such a decoder."""

    def come(self, call: Call, now: float) -> None:
        prefiller = self.least(self._with("prefill"))
        self.in_flight[prefiller] += 1
        self.world.prefill(call, prefiller, partial(self._computed, call, prefiller))

    def _computed(self, call: Call, prefiller: int, _now: float) -> None:
        decoder = self.least(self._with("decode"))
        self.in_flight[prefiller] -= 1
        self.in_flight[decoder] += 1
        self.world.send(call, decoder, prompt_from=prefiller)

    def _with(self, role: str) -> list[int]:
        places = enumerate(self.world.fleet.places)
        return [number for number, place in places if place.unit.role in (role, "both")]
