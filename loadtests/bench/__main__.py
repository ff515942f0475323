"""CPU of the gate beside HAProxy and beside a bare Python relay, in one interleaved run.

Only CPU of the proxy's own process counts, never wall time. A single wrong byte in an answer fails the run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from loadtests.bench import processes, report, targets

TRIES = 3


@dataclass(frozen=True, slots=True)
class Clocks:
    """CPU times at one moment, in seconds: the proxy's, all of the benchmark's own, the whole machine's."""

    at_s: float
    proxy_s: float
    own_s: float
    machine_s: float

    @classmethod
    def read(cls, target: targets.Target) -> "Clocks":
        own_s = processes.cpu_s(os.getpid())
        return cls(time.monotonic(), target.cpu_s(), own_s, processes.machine_cpu_s())

    def others_until(self, after: "Clocks") -> float:
        """The share of the machine that processes outside the benchmark used meanwhile, 0 to 1."""
        others_s = (after.machine_s - self.machine_s) - (after.own_s - self.own_s)
        return max(0.0, others_s / (after.at_s - self.at_s) / (os.cpu_count() or 1))


def main() -> int:
    """Run the rounds, print each figure as it comes, and the table at the end. Returns the exit code."""
    args = _arguments()
    print(report.machine(), flush=True)
    try:
        figures = _rounds(args)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as failure:
        print(f"The benchmark failed: {failure}", file=sys.stderr)
        return 1
    rows = report.table(figures)
    print(report.as_markdown(rows) if args.markdown else report.as_text(rows))
    print(report.machine())
    late = [each for each in figures if each.pace > report.PACE_LIMIT]
    for each in late:
        print(f"Not comparable, the streams ran late: {each.line()}", file=sys.stderr)
    return 1 if late else 0


def _rounds(args: argparse.Namespace) -> list[report.Figure]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        units = _start_engine(args.interval_ms, stack)
        running = []
        for name in args.targets:
            target = targets.start(name, units, folder)
            stack.callback(target.stop)
            running.append(target)
        figures = []
        for _ in range(args.rounds):
            for kind in ("requests", "streams"):
                figures += [_measure_in_quiet(target, kind, args) for target in running]
        return figures


def _start_engine(interval_ms: float, stack: ExitStack) -> list[int]:
    command = [sys.executable, "-m", "loadtests.bench.engine", "--interval-ms", str(interval_ms)]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE)
    stack.callback(processes.stop, engine)
    assert engine.stdout is not None
    line = engine.stdout.readline()
    if not line:
        raise RuntimeError(f"the engine ended early, code {engine.wait()}")
    ports: list[int] = json.loads(line)
    return ports


def _measure_in_quiet(target: targets.Target, kind: str, args: argparse.Namespace) -> report.Figure:
    """The first of `TRIES` measurements that the rest of the machine left alone, else the least disturbed.

    What is kept is chosen by the others' CPU alone, never by the figure.
    """
    tries: list[report.Figure] = []
    while not tries or (tries[-1].others > report.QUIET_LIMIT and len(tries) < TRIES):
        tries.append(_measure(target, kind, args))
        print(tries[-1].line(), flush=True)
    return min(tries, key=lambda each: each.others)


def _measure(target: targets.Target, kind: str, args: argparse.Namespace) -> report.Figure:
    """One load on one target. Raises RuntimeError on any answer that is missing or wrong."""
    tally, before, after = _drive(target, kind, args)
    if tally["errors"]:
        wrong = f"{len(tally['errors'])} of the {kind} went wrong, first: {tally['errors'][0]}"
        raise RuntimeError(f"{target.name}: {wrong}\nIt printed:\n{processes.tail(target.log)}")
    emitted_s = (args.tokens - 1) * args.interval_ms / 1000
    return report.Figure(
        target=target.name,
        kind=kind,
        cpu_us=(after.proxy_s - before.proxy_s) / tally["answers"] * 1e6,
        answers_per_s=tally["answers"] / tally["seconds"],
        pace=median(tally["stream_s"]) / emitted_s if kind == "streams" else 0.0,
        reads_each=tally["reads"] / tally["answers"],
        lag_ms=quantiles(tally["lags_s"], n=100)[-1] * 1000,
        others=before.others_until(after),
    )


def _drive(
    target: targets.Target, kind: str, args: argparse.Namespace
) -> tuple[dict[str, Any], Clocks, Clocks]:
    """The generator's tally of one load, and the clocks before it (behind the warm-up) and after it."""
    command = _generator_command(target, kind, args)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as generator:
        assert generator.stdin is not None
        assert generator.stdout is not None
        ready = generator.stdout.readline()
        before = Clocks.read(target)
        if ready:
            generator.stdin.write("go\n")
            generator.stdin.flush()
        result = generator.stdout.readline()
        after = Clocks.read(target)
        generator.stdin.close()
    if not result:
        raise RuntimeError(f"{target.name}: the {kind} generator ended early, code {generator.returncode}")
    return json.loads(result), before, after


def _generator_command(target: targets.Target, kind: str, args: argparse.Namespace) -> Sequence[str]:
    command = [sys.executable, "-m", "loadtests.bench.generator", kind, "--port", str(target.port)]
    if kind == "requests":
        return [*command, "--connections", str(args.connections), "--count", str(args.requests)]
    # Started evenly over ten intervals: the phases spread over the whole interval, without a burst of heads.
    spread_s = 10 * args.interval_ms / 1000
    streams = ["--connections", str(args.streams), "--tokens", str(args.tokens), "--spread-s", str(spread_s)]
    return [*command, *streams]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench", description=__doc__)
    parser.add_argument("--targets", type=_target_names, default=list(targets.STARTERS), metavar="NAME,NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=40_000, help="requests a round, closed loop")
    parser.add_argument(
        "--connections", type=int, default=16, help="keep-alive connections of the closed loop"
    )
    parser.add_argument("--streams", type=int, default=256, help="streams at once")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each stream")
    parser.add_argument("--interval-ms", type=float, default=20.0, help="time between the tokens of a stream")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    return parser.parse_args()


def _target_names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in targets.STARTERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no target {unknown[0]!r}; there are {', '.join(targets.STARTERS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
