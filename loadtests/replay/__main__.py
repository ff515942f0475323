"""Cells of the gym in real processes and real time, a router after another.

    python -m loadtests.replay                                                  # what matters most
    python -m loadtests.replay --loads shared_prompt --at=-16 --routers "cellgate,haproxy leastconn"
    python -m loadtests.replay --loads mooncake --trace FILE --at 0.8 --speed-up 5

Times are virtual seconds, those of the load. Every run has fresh units and a fresh router, and is bounded in
requests and time. The exit code is 1 when the gate did not start, or broke an answer.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Collection, Sequence
from itertools import product
from pathlib import Path

import yaml

from loadtests.datasets.nouns import DatasetError
from loadtests.gym.cells import Cell
from loadtests.gym.fleets import FLEETS
from loadtests.gym.loads import LOADS
from loadtests.kit import progress
from loadtests.kit.report import machine
from loadtests.kit.routers import ROOT, ROUTERS
from loadtests.replay import figures, plots
from loadtests.replay.cell import TRIES, run_in_quiet
from loadtests.replay.figures import Result
from loadtests.replay.plan import CELLS, PlanError, Timed, plays
from loadtests.replay.virtual import RIVALS

SAMPLE = Path(__file__).parent / "sample.jsonl"
GATE = "cellgate"
_DEFAULT = (GATE, "haproxy leastconn", "smg cache_aware", "smg least_load", "gym oracle")


@progress.shown("replay")
def main() -> int:
    """Run all cells, print each run as it comes, the table at the end. Returns the exit code."""
    args = _arguments()
    gate = yaml.safe_load(args.gate.read_text()) if args.gate else {}
    print(machine(), flush=True)
    results: list[Result] = []
    for timed in _cells(args):
        try:
            for play in plays(timed, seeds=args.seeds, span_s=args.span_s, trace=args.trace, gate=gate):
                for router in args.routers:
                    progress.phase(f"{play.cell} through {router}, {len(results)} runs so far")
                    results.append(run_in_quiet(play, router, args.tries))
                    print(figures.line(results[-1]), flush=True)
        except (PlanError, DatasetError) as error:
            print(error, file=sys.stderr)
    if not results:
        return 1
    print(f"\nMeans of {args.seeds} seeds:")
    print(figures.as_text(figures.table(results, GATE)))
    print(*_keep(results, args.out), sep="\n")
    return 1 if any(_went_wrong(each) for each in results) else 0


def _cells(args: argparse.Namespace) -> list[Timed]:
    if not args.loads:
        return list(CELLS[:1] if args.quick else CELLS)
    return [
        Timed(Cell(load, fleet, much), args.speed_up)
        for load, fleet, much in product(args.loads, args.fleets, args.at)
    ]


def _went_wrong(result: Result) -> bool:
    """The gate did not start, or broke an answer."""
    return result.router.startswith(GATE) and (result.figures is None or result.figures.broken > 0)


def _keep(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write every answer and the plot."""
    folder.mkdir(parents=True, exist_ok=True)
    answers = folder / "answers.jsonl"
    with answers.open("w") as out:
        for result in results:
            where = {"cell": result.cell, "router": result.router, "seed": result.seed}
            out.writelines(json.dumps(where | dataclasses.asdict(each)) + "\n" for each in result.answers)
    return [answers, *plots.draw(results, folder)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.replay", description=__doc__)
    add = parser.add_argument
    add(
        "--loads",
        type=_names(LOADS),
        metavar="NAME,NAME",
        help="of the gym; without it a plan of seven cells",
    )
    add("--fleets", type=_names(FLEETS), default=["equal"], metavar="NAME,NAME", help="of the gym")
    add("--at", type=_numbers, default=[0.8], help="utilisations; --at=-16 means 16 requests a second")
    add("--speed-up", type=float, default=1.0, help="virtual seconds a second, with --loads")
    add("--trace", type=Path, default=SAMPLE, help="for the load mooncake; without it a sample")
    add("--routers", type=_names([*ROUTERS, *RIVALS]), default=list(_DEFAULT), metavar="NAME,NAME")
    add(
        "--seeds",
        type=int,
        default=1,
        help="repetitions, each with requests and an order of units of its own",
    )
    add("--span-s", type=float, default=60.0, help="real seconds in which requests come")
    add("--tries", type=int, default=TRIES, help="how often a disturbed run is run at most")
    add("--gate", type=Path, metavar="FILE", help="more of the gate's configuration, YAML")
    add("--out", type=Path, default=ROOT / ".run" / "replay", help="where answers and plot go")
    add("--quick", action="store_true", help="the first cell of the plan only")
    return parser.parse_args()


def _names(known: Collection[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"no {unknown[0]!r}; there are {', '.join(known)}")
        return found

    return names


def _numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
