"""The Redis that gates share is killed and frozen: all parts, or one. 1 when something does not hold."""

import argparse
import sys
from collections.abc import Callable, Sequence

import uvloop

from loadtests.kit import progress
from loadtests.kit.report import run_parts
from loadtests.redis_faults.cost import cost
from loadtests.redis_faults.flips import flips
from loadtests.redis_faults.floods import floods
from loadtests.redis_faults.killed_gate import killed_gate
from loadtests.redis_faults.outage import outage
from loadtests.redis_faults.replaced import failed_over, resharded


@progress.shown("redis-faults")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; 0 when each passes."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.redis_faults", description=__doc__)
    parser.add_argument(
        "part",
        nargs="?",
        help="one of outage, sentinels, cluster, killed-gate, flips, floods, cost; all without it",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase of load, and of cost")
    parser.add_argument("--rps", type=float, default=100.0, help="requests a second under load")
    parser.add_argument("--rounds", type=int, default=6, help="of flips, each of 20 units")
    args = parser.parse_args(arguments)
    parts: dict[str, Callable[[], list[str]]] = {
        "outage": lambda: uvloop.run(outage(args.seconds, args.rps)),
        "sentinels": lambda: uvloop.run(failed_over(args.seconds, args.rps)),
        "cluster": lambda: uvloop.run(resharded(args.seconds, args.rps)),
        "killed-gate": lambda: uvloop.run(killed_gate()),
        "flips": lambda: uvloop.run(flips(args.rounds)),
        "floods": lambda: uvloop.run(floods(args.seconds, args.rps)),
        "cost": lambda: cost(args.seconds),
    }
    if args.part not in (None, *parts):
        parser.error(f"there are: {', '.join(parts)}")
    return run_parts({args.part: parts[args.part]} if args.part else parts)


if __name__ == "__main__":
    sys.exit(main())
