"""A unit that comes back with an empty cache: how soon it serves its share of agents' load, and the price.

`python -m loadtests.gym.cold_unit [--plot FILE.png]`: one of four units is away for ten seconds. With what
the gate does for it (`warmed`), and without: each seed twice. "Soonest" is when it would have served its
share if every session that begins had gone to it: to move one costs its whole prompt. What must hold: the
mean TTFT of all requests of the minute after is at most 1.05 times as long as without.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from cellgate.router import sampling
from loadtests.gym.cells import Cell, rate_of
from loadtests.gym.fleets import FLEETS
from loadtests.gym.gate import make_gates
from loadtests.gym.loads import LOADS
from loadtests.gym.nouns import Call, Change, Fleet, Request
from loadtests.gym.world import World
from loadtests.kit.report import columns, print_problems

CELLS = (
    Cell("agents", "equal", 0.5),
    Cell("agents", "equal", 0.8),
    Cell("coding_agents", "agents_4", 0.8),
)
COLD, AWAY_S = 2, 10.0
"""Which unit is away, and for how long before the middle of the load."""
AFTER_S, LOOK_S, WINDOW_S = 60.0, 1.0, 16.0
"""How long is looked at; how often; and how many of the last seconds are a unit's share."""
SHARE = 0.8 / 4
"""Of the requests: so many are its share."""
TTFT_MOST = 1.05


class Seen(NamedTuple):
    """Of one run: seconds after its return until the unit's first request, until it served its share, and
    until it would have with all sessions that began; TTFT of all; its part of the requests, by seconds.
    """

    first_s: float
    share_s: float
    soonest_s: float
    ttfts: list[float]
    parts: list[float]


class Logged(World):
    """A world that writes down what is sent where."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.sent: list[tuple[float, int, Call]] = []

    def send(self, call: Call, unit: int, prompt_from: int | None = None) -> None:
        self.sent.append((self.now, unit, call))
        super().send(call, unit, prompt_from)


def main() -> int:
    """1: to warm the unit has cost the others too much."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.gym.cold_unit", description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    jobs = [
        (cell, seed, options.requests, warmed)
        for cell in CELLS
        for warmed in (False, True)
        for seed in range(1, options.seeds + 1)
    ]
    found: dict[tuple[Cell, bool], list[Seen]] = {}
    with ProcessPoolExecutor(options.jobs) as pool:
        for (cell, _, _, warmed), seen in zip(jobs, pool.map(_play, jobs), strict=True):
            found.setdefault((cell, warmed), []).append(seen)
    head = ("cell", "", "first request", "at most", "its share", "at most", "soonest", "TTFT of all", "x")
    print(columns([head, *(_line(cell, warmed, found) for cell, warmed in found)]))
    if options.plot is not None:
        _draw(found, options.plot)
    problems = [
        f"{cell}: TTFT {ratio:.2f} times as long"
        for cell in CELLS
        if (ratio := _ttft_s(found[cell, True]) / _ttft_s(found[cell, False])) > TTFT_MOST
    ]
    print_problems(problems)
    return int(bool(problems))


def _play(job: tuple[Cell, int, int, bool]) -> Seen:
    cell, seed, requests, warmed = job
    made = LOADS[cell.load].make(random.Random(f"{cell.load} {seed}"), rate_of(cell), requests)
    last_at = max(request.at for request in made)
    changes = (Change(0.5 - AWAY_S / last_at, COLD, False), Change(0.5, COLD, True))
    world, before = Logged(replace(FLEETS[cell.fleet], changes=changes)), sampling.COMMON
    sampling.COMMON = before if warmed else -1.0
    try:
        world.run(made, [*make_gates(world, seed)])
    finally:
        sampling.COMMON = before
    back_at = world.begins_at + 0.5 * last_at
    after = [(at - back_at, unit == COLD, call) for at, unit, call in world.sent if at >= back_at]
    parts = _parts([(at, cold) for at, cold, _ in after])
    numbers = {call.request.number for *_, call in after}
    movable = {turn for each in made if each.number in numbers for turn in _turns(each)}
    return Seen(
        next((at for at, cold, _ in after if cold), inf),
        _share_s(parts),
        _share_s(_parts([(at, call.request.number in movable) for at, _, call in after])),
        [call.first_at - call.came_at for at, _, call in after if at <= AFTER_S and not call.refused],
        parts,
    )


def _turns(request: Request | None) -> Iterator[int]:
    while request is not None:
        yield request.number
        request = request.then


def _parts(sent: Sequence[tuple[float, bool]]) -> list[float]:
    """The cold unit's part of the last requests, at each look."""
    looks = [LOOK_S * number for number in range(1, int(4 * AFTER_S / LOOK_S) + 1)]
    return [_part([cold for at, cold in sent if look_s - WINDOW_S < at <= look_s]) for look_s in looks]


def _part(cold: Sequence[bool]) -> float:
    return sum(cold) / len(cold) if cold else 0.0


def _share_s(parts: Sequence[float]) -> float:
    return next((LOOK_S * number for number, part in enumerate(parts, start=1) if part >= SHARE), inf)


def _ttft_s(runs: Sequence[Seen]) -> float:
    return fmean(ttft_s for seen in runs for ttft_s in seen.ttfts)


def _line(cell: Cell, warmed: bool, found: dict[tuple[Cell, bool], list[Seen]]) -> tuple[str, ...]:
    runs = found[cell, warmed]
    firsts, shares = [seen.first_s for seen in runs], [seen.share_s for seen in runs]
    return (
        str(cell),
        "warmed" if warmed else "without",
        *(f"{each:.1f} s" for each in (median(firsts), max(firsts), median(shares), max(shares))),
        f"{median(seen.soonest_s for seen in runs):.1f} s",
        f"{_ttft_s(runs):.3f} s",
        f"{_ttft_s(runs) / _ttft_s(found[cell, False]):.2f}",
    )


def _draw(found: dict[tuple[Cell, bool], list[Seen]], path: Path) -> None:
    """The unit's part of all requests, mean of all seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(CELLS), figsize=(4.8 * len(CELLS), 3.6), sharey=True)
    for panel, cell in zip(panels, CELLS, strict=True):
        for warmed, label in ((False, "without"), (True, "warmed")):
            parts = [fmean(each) for each in zip(*(seen.parts for seen in found[cell, warmed]), strict=True)]
            panel.plot([LOOK_S * number for number in range(1, len(parts) + 1)], parts, label=label)
        panel.axhline(0.25, color="black", linewidth=0.8, linestyle=":")
        panel.set(title=str(cell), xlabel="seconds after its return", ylim=(0.0, 0.5))
        panel.legend(loc="upper left", frameon=False)
    panels[0].set_ylabel("part of all requests")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    sys.exit(main())
