"""What it brings that clients tell which session a request belongs to: coding agents with and without it.

`python -m loadtests.gym.agent_sessions`: the load of coding agents on all its fleets, where clients tell
nothing (`none`), each agent its own session (`own`), or sub-agents that of the agent above them (`root`, as
clients do). Then swarms: now and then an agent begins a hundred sub-agents at once, beside others that do as
always, and only these others count. What must hold in all cells: with `root` the mean TTFT is at most 1.05
times that of `none`, and p99 1.1 times.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Literal, NamedTuple

from loadtests.gym.cells import Cell, rate_of, requests_for
from loadtests.gym.fleets import FLEETS
from loadtests.gym.gate import make_gates
from loadtests.gym.loads import LOADS
from loadtests.gym.loads_sessions import CodingAgents
from loadtests.gym.nouns import Request, Run
from loadtests.gym.plan import CODING
from loadtests.gym.world import World
from loadtests.kit.report import columns, print_problems

Told = Literal["none", "own", "root"]
TOLD: tuple[Told, ...] = ("none", "own", "root")
SWARM = "swarm"
SWARMS = (Cell(SWARM, "agents_4", 0.8), Cell(SWARM, "agents_4_gates_4", 0.8))
SUB_AGENTS, TURNS, EACH_S = 100, 3, 30.0
"""How many sub-agents a swarm has, with how many turns, and how often there is one."""
OF_SWARMS = 1 << 20
"""The number of their first request."""
MEAN_MOST, P99_MOST, SLACK_S = 1.05, 1.1, 0.02


class Figures(NamedTuple):
    """Seconds to the first token, without the swarm's own; the share of prompts from caches."""

    mean_s: float
    p99_s: float
    hits: float


def main() -> int:
    """1: telling makes something worse."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.gym.agent_sessions", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--fleets", default="agents_*", help="a pattern")
    parser.add_argument("--requests", type=int, default=0, help="in each run; 0: as many as the fleet needs")
    options = parser.parse_args()
    cells = [cell for cell in (*SWARMS, *CODING) if fnmatchcase(cell.fleet, options.fleets)]
    jobs = [(cell, told, options.seeds, options.requests) for cell in cells for told in TOLD]
    found: dict[tuple[Cell, Told], Figures] = {}
    with ProcessPoolExecutor(options.jobs) as pool:
        for (cell, told, *_), figures in zip(jobs, pool.map(_play, jobs), strict=True):
            found[cell, told] = figures
            print(f"{len(found)}/{len(jobs)} {cell}, {told}: {figures}", file=sys.stderr, flush=True)
    head = ("cell", *(f"{what}, {told}" for what in ("TTFT", "p99", "hits") for told in TOLD))
    print(columns([head, *(_line(cell, [found[cell, told] for told in TOLD]) for cell in cells)]))
    problems = [
        f"{cell}: {name} {told_s:.3f} s, {none_s:.3f} s without"
        for cell in cells
        for name, most, told_s, none_s in (
            ("mean", MEAN_MOST, found[cell, "root"].mean_s, found[cell, "none"].mean_s),
            ("p99", P99_MOST, found[cell, "root"].p99_s, found[cell, "none"].p99_s),
        )
        if told_s > most * none_s + SLACK_S
    ]
    print_problems(problems)
    return int(bool(problems))


def _play(job: tuple[Cell, Told, int, int]) -> Figures:
    cell, told, seeds, requests = job
    runs = [_run(cell, told, seed, requests) for seed in range(1, seeds + 1)]
    firsts = [
        sorted(c.first_at - c.came_at for c in run.calls if not c.refused and c.request.number < OF_SWARMS)
        for run in runs
    ]
    p99_s = fmean(ttfts[int(0.99 * len(ttfts))] for ttfts in firsts)
    return Figures(fmean(map(fmean, firsts)), p99_s, fmean(run.hits for run in runs))


def _run(cell: Cell, told: Told, seed: int, requests: int) -> Run:
    fleet, plain = FLEETS[cell.fleet], cell._replace(load="coding_agents")
    rng, rate = random.Random(f"{cell.load} {seed}"), rate_of(plain)
    made = LOADS[plain.load].make(rng, rate, requests or requests_for(plain, fleet))
    if cell.load == SWARM:
        made += _swarms(random.Random(f"{SWARM} {seed}"), made)
    for request in _all(made):
        own = request.session if told != "none" else ""
        request.session, request.root = own, request.root if told == "root" else ""
    world = World(fleet)
    return world.run(made, [*make_gates(world, seed)])


def _swarms(rng: random.Random, beside: Sequence[Request]) -> list[Request]:
    """Sub-agents of one session, all at once, that begin with the system text of another one."""
    load, number, swarms = CodingAgents(), OF_SWARMS, list[Request]()
    until = max(request.at for request in beside)
    for time in range(1, int(until / EACH_S) + 1):
        system = rng.choice(beside).prompt.base
        assert system is not None
        for _ in range(SUB_AGENTS):
            swarms.append(load.agent(rng, system, time * EACH_S, number, TURNS, f"swarm {time}"))
            number += TURNS
    return swarms


def _all(requests: Iterable[Request]) -> Iterator[Request]:
    for request in requests:
        one: Request | None = request
        while one is not None:
            yield one
            one = one.then


def _line(cell: Cell, figures: Sequence[Figures]) -> tuple[str, ...]:
    return (
        str(cell),
        *(f"{each.mean_s:.3f}" for each in figures),
        *(f"{each.p99_s:.3f}" for each in figures),
        *(f"{each.hits:.1%}" for each in figures),
    )


if __name__ == "__main__":
    sys.exit(main())
