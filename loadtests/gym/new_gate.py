"""What a restart costs: a gate that knows nothing takes over from one that has learnt, in the middle of it.

`python -m loadtests.gym.new_gate`: the TTFT of the minute after, beside that of the same minute without it,
with 4 and 100 units, one gate or one of two. The old one ends its requests; beside another gate all see them
meanwhile, through Redis. What must hold: at most 2 times with one gate, 1.1 times beside another. A run with
100 units takes a minute or two.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from loadtests.gym.cells import Cell, rate_of, requests_for
from loadtests.gym.fleets import FLEETS
from loadtests.gym.gate import Gate, make_gates
from loadtests.gym.loads import LOADS
from loadtests.gym.nouns import Call
from loadtests.gym.world import World
from loadtests.kit.report import columns, print_problems

CELLS = (Cell("chat", "equal", 0.6), Cell("agents", "equal", 0.6), Cell("agents", "hundred", 0.6))
AFTER_S = 60.0
MOST = {1: 2.0, 2: 1.1}
"""By how many gates there are."""


class Job(NamedTuple):
    """One run. `gates`: how many; the first one is replaced, if `replaced`."""

    cell: Cell
    gates: int
    replaced: bool
    seed: int


class Replaced:
    """A gate, and from some moment on another one, which gets what comes then."""

    def __init__(self, old: Gate) -> None:
        self.old = self.new = old
        self._gates: dict[Call, Gate] = {}

    def come(self, call: Call, now: float) -> None:
        """As Rival."""
        self._gates[call] = self.new
        self.new.come(call, now)

    def first(self, call: Call, now: float) -> None:
        """As Rival."""
        self._gates[call].first(call, now)

    def ended(self, call: Call, now: float) -> None:
        """As Rival."""
        self._gates.pop(call).ended(call, now)

    def broke(self, call: Call, now: float) -> None:
        """As Rival."""
        self._gates[call].broke(call, now)

    def changed(self, unit: int, now: float, *, is_up: bool) -> None:
        """As Rival."""
        for gate in {self.old, self.new}:
            gate.changed(unit, now, is_up=is_up)

    def waiting(self) -> Collection[str]:
        """As Rival."""
        return {*self.old.waiting(), *self.new.waiting()}


def main() -> int:
    """1: a restart costs too much."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.gym.new_gate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    seeds = range(1, options.seeds + 1)
    pairs = [(cell, gates) for cell in CELLS for gates in (1, 2)]
    jobs = [
        Job(*pair, replaced=replaced, seed=seed)
        for pair in pairs
        for replaced in (False, True)
        for seed in seeds
    ]
    found: dict[tuple[Cell, int, bool], list[float]] = {}
    with ProcessPoolExecutor(options.jobs) as pool:
        for job, ttft_s in zip(jobs, pool.map(play, jobs), strict=True):
            found.setdefault(job[:3], []).append(ttft_s)
            print(job, f"{ttft_s:.3f}", file=sys.stderr, flush=True)
    rows = [(*pair, fmean(found[*pair, False]), fmean(found[*pair, True])) for pair in pairs]
    head = ("cell", "gates", "TTFT", "after a restart", "x")
    lines = [
        (str(cell), str(gates), f"{usual_s:.3f} s", f"{new_s:.3f} s", f"{new_s / usual_s:.2f}")
        for cell, gates, usual_s, new_s in rows
    ]
    print(columns([head, *lines]))
    problems = [
        f"{cell}: {new_s / usual_s:.2f} times the TTFT"
        for cell, gates, usual_s, new_s in rows
        if new_s > MOST[gates] * usual_s
    ]
    print_problems(problems)
    return int(bool(problems))


def play(job: Job) -> float:
    """The mean TTFT of what came by the first gate in the minute after its restart, or would have."""
    cell, fleet = job.cell, FLEETS[job.cell.fleet]
    rate = rate_of(cell)
    count = max(requests_for(cell, fleet), int(rate * 3 * AFTER_S))
    made = LOADS[cell.load].make(random.Random(f"{cell.load} {job.seed}"), rate, count)
    world = World(replace(fleet, gates=job.gates))
    gates = make_gates(world, job.seed)
    first, at = Replaced(gates[0]), world.begins_at + 0.5 * max(request.at for request in made)

    def swap(now: float) -> None:
        world.begins_at = now
        new = Gate(world, random.Random(f"{job.seed} new"), 0)
        gates[0], new.peers, first.new = new, gates, new
        if job.gates > 1:
            gates.append(first.old)
        else:
            first.old.peers = [first.old]

    if job.replaced:
        world.at(at, swap)
    run = world.run(made, [first, *gates[1:]])
    ttfts = [
        call.first_at - call.came_at
        for call in run.calls
        if at <= call.came_at < at + AFTER_S and call.request.chance * job.gates < 1.0 and not call.refused
    ]
    return fmean(ttfts)


if __name__ == "__main__":
    sys.exit(main())
