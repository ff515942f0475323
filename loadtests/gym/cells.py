"""A cell of the gym: one load at one utilisation on one fleet, through the gate and its rivals, seed by seed.

All rivals get the same requests at the same times. Utilisation 1 is what least connections saturates at:
all requests come at once, and those that end between the 10th and the 90th percentile of ends are counted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from loadtests.gym.events import follow, see
from loadtests.gym.fleets import FLEETS
from loadtests.gym.gate import make_gates
from loadtests.gym.loads import LOADS
from loadtests.gym.loads_sessions import Sessions
from loadtests.gym.nouns import Fleet, Request, Rival, Run
from loadtests.gym.rivals import RIVALS
from loadtests.gym.world import World

GATE, EVENTS, SEES = "gate", "gate with events", "gate that sees"
"""The product, the same with units that publish KV events, and one that sees all caches as they are: more
than that cannot be had from any knowledge of them.
"""
AGAIN = "leastconn again"
"""Least connections with other chances, which shows how much of a difference is noise."""
_PREPARED = {GATE: lambda _world, _board: None, EVENTS: follow, SEES: see}
RIVAL_NAMES = (GATE, AGAIN, *RIVALS)
_ENOUGH_UNITS = 4
"""Of more units of one kind the saturation is that of so many, times as much."""


class Cell(NamedTuple):
    """What is run. `utilisation` is a share of what least connections can do, or, negative, requests a second
    times -1.
    """

    load: str
    fleet: str
    utilisation: float

    def __str__(self) -> str:
        much = f"{-self.utilisation:g}/s" if self.utilisation < 0 else f"{self.utilisation:g}"
        return f"{self.load} {much} {self.fleet}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a cell, by rival, one run for each seed."""

    cell: Cell
    rate: float
    runs: dict[str, list[Run]]


def play(cell: Cell, seeds: int, rivals: Sequence[str] = RIVAL_NAMES, requests: int = 0) -> Outcome:
    """Run a cell."""
    fleet = FLEETS[cell.fleet]
    rate = rate_of(cell)
    runs: dict[str, list[Run]] = {name: [] for name in rivals}
    count = requests or requests_for(cell, fleet)
    for seed in range(1, seeds + 1):
        made = LOADS[cell.load].make(random.Random(f"{cell.load} {seed}"), rate, count)
        for name in rivals:
            runs[name].append(run(fleet, made, name, seed))
    return Outcome(cell, rate, runs)


def rate_of(cell: Cell) -> float:
    """Requests a second."""
    much = cell.utilisation
    return -much if much < 0 else much * saturation(cell.load, cell.fleet)


def run(fleet: Fleet, requests: Sequence[Request], rival: str, seed: int, *, hurry: bool = False) -> Run:
    """One run of one rival."""
    world = World(fleet, hurry=hurry)
    if rival in _PREPARED:
        rivals: list[Rival] = [*make_gates(world, seed, prepare=_PREPARED[rival])]
    else:
        kind = RIVALS["leastconn" if rival == AGAIN else rival]
        rivals = [kind(world, random.Random(f"{seed} {rival} {number}")) for number in range(fleet.gates)]
    return world.run(requests, rivals)


def requests_for(cell: Cell, fleet: Fleet) -> int:
    """Enough for a steady state: some for each seat, fewer where most seats stay empty."""
    seats, much = sum(place.model.seats for place in fleet.places), abs(cell.utilisation)
    load = LOADS[cell.load]
    times = load.more if isinstance(load, Sessions) else 1.0
    return int(min(3000, times * max(400, 1200 * min(1.0, 0.3 + much), 4 * seats * much)))


@cache
def saturation(load: str, fleet_name: str) -> float:
    """Requests a second that least connections can do."""
    fleet = FLEETS[fleet_name]
    times, places = 1.0, fleet.places
    if len(places) > _ENOUGH_UNITS and all(place.model == places[0].model for place in places):
        times = len(places) / _ENOUGH_UNITS
        fleet = replace(fleet, places=places[:_ENOUGH_UNITS], changes=(), joining=frozenset(), gates=1)
    fleet = replace(fleet, changes=(), joining=frozenset())
    count = requests_for(Cell(load, fleet_name, 1.0), fleet)
    made = LOADS[load].make(random.Random(f"{load} saturation"), 1000.0, count)
    ends = sorted(call.ended_at for call in run(fleet, made, "leastconn", 0, hurry=True).calls)
    first, last = len(ends) // 10, 9 * len(ends) // 10
    return times * (last - first) / (ends[last] - ends[first])
