"""Routers one after another before the same simulated units, under the same trace: one table, and plots.

Times are virtual seconds, those of the trace. Every cell (router x load x seed) has fresh units and a fresh
router, and is bounded in requests and time.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from loadtests.bench import report
from loadtests.replay import figures, plots
from loadtests.replay.cell import Plan, run_in_quiet
from loadtests.replay.client import body_of
from loadtests.replay.engine import Model
from loadtests.replay.figures import Cell
from loadtests.replay.ideal import least_connections
from loadtests.replay.routers import ROOT, ROUTERS
from loadtests.replay.trace import TraceError, read

SAMPLE = Path(__file__).parent / "sample.jsonl"
GATE = "cellgate"
REFERENCE = "haproxy leastconn"
_OVERLOAD = 3.0
"""Arrivals so many times as dense as in the trace are far more than four units can serve."""
_DEFAULT = (
    GATE,
    "sglang-router cache_aware",
    "sglang-router power_of_two",
    "vllm-router cache_aware",
    REFERENCE,
)
_HALF_SPEED = (GATE, "cellgate told", "cellgate weighed", REFERENCE)


def main() -> int:
    """Run all cells, print each as it comes, the table at the end. Returns the exit code."""
    args = _arguments()
    try:
        requests = read(args.trace, requests=args.requests, max_tokens=args.max_tokens)
    except TraceError as error:
        print(error, file=sys.stderr)
        return 1
    gate = yaml.safe_load(args.gate.read_text()) if args.gate else {}
    bodies = [body_of(each) for each in requests]
    plan = Plan(requests, bodies, args.units, args.speed_up, args.patience_s, gate, args.half_speed)
    span_s = requests[-1].at_s - requests[0].at_s
    tokens = sum(each.prompt_tokens for each in requests)
    print(report.machine(), flush=True)
    print(
        f"{args.trace}: {len(requests)} requests in {span_s:.0f} s, {tokens / len(requests):.0f} tokens each"
    )
    saturation = args.saturation or _saturation(plan, span_s)
    cells = _cells(plan, args, saturation)
    print(f"\nload 1 is {saturation:.3f} times the arrivals of the trace. Medians of {args.seeds} seeds:")
    print(figures.as_text(figures.table(cells, GATE)))
    print(*_keep(cells, args.out), sep="\n")
    return 1 if any(_went_wrong(each) for each in cells) else 0


def _saturation(plan: Plan, span_s: float) -> float:
    """What the reference saturates at when all units are well, as a multiple of the trace's arrivals."""
    healthy = dataclasses.replace(plan, slow=None)
    ideal = least_connections(plan.requests, _OVERLOAD, [Model()] * plan.units)
    expected = figures.saturation(ideal, span_s)
    cell = run_in_quiet(healthy, REFERENCE, scale=_OVERLOAD, load=math.inf, seed=0)
    if cell.figures is None:
        print(f"{REFERENCE}: {cell.missing}; load 1 is what the model says")
        return expected
    found = figures.saturation(cell.answers, span_s)
    print(
        f"{REFERENCE} saturates at {found:.3f} times the arrivals of the trace (the model: {expected:.3f})",
        flush=True,
    )
    return found


def _cells(plan: Plan, args: argparse.Namespace, saturation: float) -> list[Cell]:
    cells = []
    for seed in range(1, args.seeds + 1):
        for load in args.loads:
            for router in args.routers:
                cells.append(run_in_quiet(plan, router, scale=load * saturation, load=load, seed=seed))
                print(figures.line(cells[-1]), flush=True)
    return cells


def _went_wrong(cell: Cell) -> bool:
    """The gate did not start, or broke an answer."""
    return cell.router.startswith(GATE) and (cell.figures is None or cell.figures.broken > 0)


def _keep(cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Write every answer and the plots."""
    folder.mkdir(parents=True, exist_ok=True)
    answers = folder / "answers.jsonl"
    with answers.open("w") as out:
        for cell in cells:
            where = {"router": cell.router, "load": cell.load, "seed": cell.seed}
            out.writelines(json.dumps(where | dataclasses.asdict(each)) + "\n" for each in cell.answers)
    return [answers, *plots.draw(cells, folder)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.replay", description=__doc__)
    add = parser.add_argument
    add(
        "--trace",
        type=Path,
        default=SAMPLE,
        help="in Mooncake's format; by default a sample of its first lines",
    )
    add("--requests", type=int, default=1500, help="so many from its beginning")
    add("--max-tokens", type=int, default=60_000, help="longer prompts are left out")
    add("--routers", type=_names, metavar="NAME,NAME", help=f"of: {', '.join(ROUTERS)}")
    add("--loads", type=_numbers, default=[0.6, 0.8, 0.95], help="shares of what HAProxy saturates at")
    add("--seeds", type=int, default=3, help="repetitions, with the units named in another order")
    add(
        "--saturation",
        type=float,
        help="load 1, as a multiple of the trace's arrivals, instead of measuring it",
    )
    add("--half-speed", type=int, metavar="UNIT", help="the number of a unit at half speed, from 0")
    add("--gate", type=Path, metavar="FILE", help="more of the gate's configuration, YAML")
    add("--units", type=int, default=4)
    add("--speed-up", type=float, default=10.0, help="virtual seconds a second")
    add("--patience-s", type=float, default=60.0, help="real seconds from the last request to giving up")
    add("--out", type=Path, default=ROOT / ".run" / "replay", help="where answers and plots go")
    add("--quick", action="store_true", help="300 requests, load 0.8, one seed")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.loads, args.seeds = 300, [0.8], 1
    if args.half_speed is not None and not 0 <= args.half_speed < args.units:
        parser.error(f"--half-speed: units are numbered 0 to {args.units - 1}")
    args.routers = args.routers or list(_DEFAULT if args.half_speed is None else _HALF_SPEED)
    return args


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in ROUTERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no router {unknown[0]!r}; there are {', '.join(ROUTERS)}")
    return names


def _numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
