"""CPU, waits, memory and leaks of the gate beside its peers, in one interleaved run.

What counts is CPU of a target's own processes, never wall time. A single wrong byte in an answer of an exact
target fails the run. `make bench` runs everything; without options only the gate and HAProxy are, quickly.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from loadtests.bench import report, run_file
from loadtests.bench.figures import Figure
from loadtests.bench.loads import LOADS, QUICK, USUAL
from loadtests.bench.measure import Patience, in_quiet
from loadtests.bench.stage import stage
from loadtests.bench.targets import SUBJECT, TARGETS
from loadtests.kit import processes, progress
from loadtests.kit.report import machine

ALL_TARGETS = tuple(name for name in TARGETS if name != "bare")
REPEATS_S = 180.0
"""What repeated measurements may take in all."""


@progress.shown("bench")
def main() -> int:
    """Run the rounds, print each figure as it comes, and the tables at the end. Returns the exit code."""
    args = _arguments()
    processes.raise_files()
    print(machine(), flush=True)
    try:
        run, failures = _rounds(args)
    except (RuntimeError, OSError) as failure:
        print(f"The benchmark failed: {failure}", file=sys.stderr)
        return 1
    print(report.full(run, markdown=args.markdown))
    late = [figure for figure in run.figures if figure.pace > report.PACE_LIMIT]
    failures += [f"Not comparable, the streams ran late: {figure.line()}" for figure in late]
    for each in failures:
        print(each, file=sys.stderr)
    return 1 if failures else 0


def _rounds(args: argparse.Namespace) -> tuple[report.Run, list[str]]:
    """All rounds, and what went wrong in them. The file has each round once it is over: a run that is
    stopped keeps those before.
    """
    figures: list[Figure] = []
    missing: dict[str, str] = {}
    failures: list[str] = []
    patience = Patience(REPEATS_S)
    about = {name: _about(name) for name in args.targets}
    arguments = f"python -m loadtests.bench {shlex.join(sys.argv[1:])}".strip()
    loads = {name: LOADS[name].about for name in args.loads}
    run = report.Run(machine(), arguments, figures, missing, about, loads)
    for number in range(args.rounds):
        with stage(number, [name for name in args.targets if name not in missing]) as standing:
            for name, why in standing.missing.items():
                print(f"{name}: {why}", flush=True)
            missing |= standing.missing
            for load in args.loads:
                for name in standing.in_turn(load):
                    progress.phase(f"round {number + 1}: {name}, {load}; {len(figures)} figures")
                    try:
                        figures.append(in_quiet(standing, name, load, args.requests, patience))
                    except (RuntimeError, OSError) as failure:
                        failures.append(f"{name}: {failure}")
                        print(failures[-1], file=sys.stderr, flush=True)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(run_file.as_json(run))
    return run, failures


def _about(name: str) -> str:
    target = TARGETS[name]
    version = target.version()
    return f"{version}; {target.about}" if version else target.about


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench", description=__doc__)
    add = parser.add_argument
    targets = names_of(TARGETS, ALL_TARGETS)
    add("--targets", type=targets, default=("haproxy", SUBJECT), metavar="NAME,NAME", help="or `all`")
    add("--loads", type=names_of(LOADS, USUAL), default=QUICK, metavar="NAME,NAME", help="or `all`")
    add("--rounds", type=_count, default=3)
    add("--requests", type=_count, default=12_000, help="of 1 kB, a round; fewer of larger ones")
    add("--markdown", action="store_true", help="print the tables as Markdown")
    add("--json", type=Path, metavar="FILE", help="write every figure there, after each round")
    return parser.parse_args()


def names_of(known: Iterable[str], all_of_them: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Reads names with commas between them, in the order in which they are known; `all` are those given."""
    known = tuple(known)

    def read(text: str) -> tuple[str, ...]:
        names = list(all_of_them) if text == "all" else text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"no {name!r}; there are {', '.join(known)}")
        return tuple(name for name in known if name in names)

    return read


def _count(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
