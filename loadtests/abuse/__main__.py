"""The abuse suite: what one client or one unit can do to all others on a gate as it is by default.

`python -m loadtests.abuse [NAME…]` does each abuse to a real gate before simulated units, while a neighbour
asks the same units 50 times a second on connections of its own. It prints the CPU time of the gate, the p99
of the neighbour's TTFT and its worst wait beside those without abuse, memory before, at most and after, and
what the abuser got. The exit code is 1 when one fails.
"""

import argparse
import sys

import uvloop

from loadtests.abuse.attackers import generated
from loadtests.abuse.catalog import CATALOG
from loadtests.abuse.nouns import Abuse
from loadtests.abuse.stage import Stage
from loadtests.abuse.trial import attempt, p99_without_gate_s
from loadtests.abuse.verdict import Try, is_failed, middle, worst_first
from loadtests.kit import processes, progress
from loadtests.kit.report import print_problems

TRIES = 3
_FILES = 16384


async def run(abuses: list[Abuse], tries: int = TRIES) -> int:
    """Do them all; 0 when none failed. One that fails gets fresh gates, and the median counts."""
    rows: list[list[Try]] = []
    async with Stage() as stage:
        for abuse in abuses:
            progress.phase(f"{abuse.name}, {len(rows)} of {len(abuses)} done")
            rows.append(await _row(stage, abuse, tries))
    _print_summary(rows)
    return 1 if any(is_failed(row) for row in rows) else 0


async def _row(stage: Stage, abuse: Abuse, tries: int) -> list[Try]:
    row: list[Try] = []
    while len(row) < tries:
        row.append(await attempt(stage, abuse))
        problems = row[-1].problems()
        print(f"{abuse.name}: {'failed' if problems else 'passed'}; {row[-1].line()}")
        print_problems(problems)
        if len(row) == 1 and not problems:
            break
        await stage.leave()
    if is_failed(row) and abuse.is_generated:
        await stage.ready(abuse.surroundings)
        p99_s = await p99_without_gate_s(stage, abuse)
        print(f"{abuse.name}: at one unit, without the gate, the p99 is {1000 * p99_s:.0f} ms")
    return row


def _print_summary(rows: list[list[Try]]) -> None:
    waits = f"{'p99 ms':>7} {'usual':>6} {'worst':>6} {'control':>8}"
    print(f"\n{'abuse':24} {'verdict':8} {'tries':>5} {'CPU s':>7} {waits} {'MB':>14} got")
    for row in worst_first(rows):
        one = middle(row)
        memory = f"{one.before_mb:.0f}/{one.peak_mb:.0f}/{one.after_mb:.0f}"
        got = ", ".join(what for what, _ in one.got.most_common(3))
        print(
            f"{one.abuse.name:24} {'FAILED' if is_failed(row) else 'passed':8} {len(row):5} {one.cpu_s:7.2f} "
            f"{1000 * one.p99_s:7.0f} {1000 * one.undisturbed_p99_s:6.0f} {1000 * one.wait_s:6.0f} "
            f"{1000 * one.control_s:8.0f} {memory:>14} {got}"
        )
    failed = [row[0].abuse.name for row in rows if is_failed(row)]
    print(
        f"{len(rows) - len(failed)} of {len(rows)} passed; failed: {', '.join(failed) or 'none'}", flush=True
    )


@progress.shown("abuse")
def main() -> int:
    """Run what is named, or all."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.abuse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these, or those whose names begin so")
    parser.add_argument("--list", action="store_true", help="the names, and what each does")
    parser.add_argument("--tries", type=int, default=TRIES, help="how often one that fails is tried")
    parser.add_argument("--generated", action="store_true", help="attackers that are made from seeds")
    parser.add_argument("--seeds", type=int, default=20, help="how many of them")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    args = parser.parse_args()
    if args.generated:
        processes.raise_files(_FILES)
        seeds = range(args.first, args.first + args.seeds)
        return uvloop.run(run([generated(seed) for seed in seeds], args.tries))
    chosen = [abuse for abuse in CATALOG if not args.names or abuse.name.startswith(tuple(args.names))]
    if args.list:
        print(*(f"{abuse.name:24} {abuse.what}" for abuse in chosen), sep="\n")
        return 0
    if unknown := [name for name in args.names if not any(abuse.name.startswith(name) for abuse in CATALOG)]:
        parser.error(f"no abuse is named {unknown[0]!r}; --list names them all")
    processes.raise_files(_FILES)
    return uvloop.run(run(chosen, args.tries))


if __name__ == "__main__":
    sys.exit(main())
