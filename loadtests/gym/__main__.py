"""The gym: routing on simulated engines, in virtual time. Runs cells and prints a table, the worst first.

    python -m loadtests.gym --quick                                      # a few cells, one seed
    python -m loadtests.gym --loads "shared*" --fleets equal --at=0.5,0.8
    python -m loadtests.gym --markdown > table.md                        # everything

The exit code is 1 when a cell is beyond a limit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from time import perf_counter

from loadtests.gym import table
from loadtests.gym.cells import RIVAL_NAMES, Cell, play
from loadtests.gym.figures import Row, row
from loadtests.gym.fleets import FLEETS, UNEQUAL
from loadtests.gym.loads import LOADS, missing
from loadtests.gym.loads_traces import TRACE, Mooncake
from loadtests.gym.plan import UNEVEN, cells, quick_cells
from loadtests.kit import progress

Job = tuple[Cell, int, tuple[str, ...], int]
Map = Callable[[Callable[[Job], Row], Iterable[Job]], Iterator[Row]]


@progress.shown("gym")
def main(argv: list[str] | None = None) -> int:
    """Runs what was asked for; 1 when anything is beyond a limit."""
    options = _options(argv)
    LOADS["mooncake"] = Mooncake(options.trace)
    chosen = _chosen(options)
    for load in LOADS:
        if missing(load):
            print(f"left out: {load}: {missing(load)}", file=sys.stderr)
    rivals = RIVAL_NAMES if options.rivals == "all" else tuple(options.rivals.split(","))
    began = perf_counter()
    rows: list[Row] = []
    jobs = [(cell, options.seeds, rivals, options.requests) for cell in chosen]
    progress.phase("", lambda: f"{len(rows)} of {len(jobs)} cells, {_failed(rows)} beyond a limit")
    with ExitStack() as stack:
        run: Map = map if options.jobs == 1 else stack.enter_context(ProcessPoolExecutor(options.jobs)).map
        for number, each in enumerate(run(_play, jobs), start=1):
            rows.append(each)
            print(f"{number}/{len(jobs)} {each.outcome.cell} {' '.join(each.fails)}", file=sys.stderr)
    if options.detail:
        for each in rows:
            print(table.rivals(each, markdown=options.markdown), end="\n\n")
    print(table.cells(rows, markdown=options.markdown))
    failed = _failed(rows)
    print(f"\n{len(rows)} cells, {failed} beyond a limit; {perf_counter() - began:.0f} s", file=sys.stderr)
    return 1 if failed else 0


def _failed(rows: list[Row]) -> int:
    return sum(1 for each in rows if each.fails)


def _play(job: Job) -> Row:
    cell, seeds, rivals, requests = job
    return row(play(cell, seeds, rivals, requests), uneven=cell.load in UNEVEN, unequal=cell.fleet in UNEQUAL)


def _chosen(options: argparse.Namespace) -> list[Cell]:
    if not (options.loads or options.fleets):
        return quick_cells() if options.quick else cells()
    loads = [name for name in LOADS if _matches(name, options.loads or "*") and not missing(name)]
    fleets = [name for name in FLEETS if _matches(name, options.fleets or "equal")]
    if not loads or not fleets:
        raise SystemExit(f"no such load or fleet; loads: {' '.join(LOADS)}; fleets: {' '.join(FLEETS)}")
    many = [float(each) for each in options.at.split(",")]
    return [Cell(load, fleet, much) for load in loads for fleet in fleets for much in many]


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split(","))


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.gym", description=__doc__)
    parser.add_argument("--loads", help="names or patterns, with commas between them")
    parser.add_argument("--fleets", help="the same; equal when only loads are given")
    parser.add_argument(
        "--at", default="0.1,0.5,0.8,0.95", help="utilisations; --at=-16 means 16 requests a second"
    )
    parser.add_argument("--rivals", default="all", help=f"of {', '.join(RIVAL_NAMES)}")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=0, help="in each run; 0: as many as the fleet needs")
    parser.add_argument("--trace", type=Path, default=TRACE, help="for the load mooncake")
    parser.add_argument("--quick", action="store_true", help="a few cells only")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--detail", action="store_true", help="all rivals of each cell, too")
    parser.add_argument("--markdown", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
