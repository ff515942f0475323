"""Does what the gate predicts of one unit more, and of one fewer, come true?

`python -m loadtests.gym.scaling [--markdown]` runs loads on four units, and the same requests at the same
times on three and on five. Seconds: the 90th percentile of the time to a first token. `max_in_flight` of a
unit is what its engine decodes at once.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from cellgate.extras.scaling.demand import Waits, demand_of, quantile, waits
from loadtests.gym.cells import Cell, rate_of, requests_for
from loadtests.gym.fleets import FLEETS, MODEL, fleet
from loadtests.gym.gate import Gate, make_gates
from loadtests.gym.loads import LOADS
from loadtests.gym.nouns import Request
from loadtests.gym.world import World

UNITS = 4
CELLS = [
    (load, at)
    for load in ("shared_prompt", "azure_conv", "chat", "rag", "decode_heavy", "bursts", "zipf")
    for at in (0.5, 0.8, 1.0)
]
"""Ordinary loads, and how much of what least connections can do on four units."""


class Result(NamedTuple):
    """One load: what was predicted on four units, and what came true on three, four and five."""

    load: str
    at: float
    predicted: Waits
    true: Waits


def result(load: str, at: float, seed: int = 1, requests: int = 0) -> Result:
    """Run it on each number of units."""
    cell = Cell(load, "equal", at)
    count = requests or requests_for(cell, FLEETS["equal"])
    made = LOADS[load].make(random.Random(f"{load} {seed}"), rate_of(cell), count)
    fewer, now, more = (_served(made, UNITS + change, seed) for change in (-1, 0, 1))
    ended_at = max(served.ended_at for served in now.served)
    predicted = waits(demand_of(now.served, list(now.board), ended_at))
    return Result(load, at, predicted, Waits(*(_true_s(gate) for gate in (fewer, now, more))))


def _served(made: Sequence[Request], units: int, seed: int) -> Gate:
    """The gate after a run."""
    equal = fleet(f"{units} units", [MODEL] * units)
    places = [replace(place, unit=replace(place.unit, max_in_flight=MODEL.seats)) for place in equal.places]
    world = World(replace(equal, places=tuple(places)))
    gates = make_gates(world, seed)
    world.run(made, [*gates])
    return gates[0]


def _true_s(gate: Gate) -> float:
    return quantile(served.wait_s for served in gate.served)


def main() -> None:
    """Print a table."""
    options = argparse.ArgumentParser("python -m loadtests.gym.scaling", description=__doc__)
    options.add_argument("--markdown", action="store_true", help="as a table for a page")
    edge = "| " if options.parse_args().markdown else ""
    head = ("load", "at", "now", "one more: predicted", "true", "one fewer: predicted", "true")
    print(edge + " | ".join(head))
    if edge:
        print("|---" * len(head) + "|")
    for load, at in CELLS:
        found = result(load, at)
        times = (
            found.true.now,
            found.predicted.more,
            found.true.more,
            found.predicted.fewer,
            found.true.fewer,
        )
        print(edge + " | ".join((load, f"{at:g}", *(f"{time_s or 0.0:.2f}" for time_s in times))), flush=True)


if __name__ == "__main__":
    main()
