"""CPU of the gate beside HAProxy and beside a bare Python relay, in one interleaved run.

Only CPU of the proxy's own process counts, never wall time. A single wrong byte in an answer fails the run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from loadtests.bench import processes, report, targets


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
                for target in running:
                    figures.append(_measure(target, kind, args))
                    print(figures[-1].line(), flush=True)
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


def _measure(target: targets.Target, kind: str, args: argparse.Namespace) -> report.Figure:
    """One load on one target. Raises RuntimeError on any answer that is missing or wrong."""
    tally, cpu_s = _drive(target, kind, args)
    if tally["errors"]:
        wrong = f"{len(tally['errors'])} of the {kind} went wrong, first: {tally['errors'][0]}"
        raise RuntimeError(f"{target.name}: {wrong}\nIt printed:\n{processes.tail(target.log)}")
    emitted_s = (args.tokens - 1) * args.interval_ms / 1000
    return report.Figure(
        target=target.name,
        kind=kind,
        cpu_us=cpu_s / tally["answers"] * 1e6,
        answers_per_s=tally["answers"] / tally["seconds"],
        pace=median(tally["stream_s"]) / emitted_s if kind == "streams" else 0.0,
        reads_each=tally["reads"] / tally["answers"],
        lag_ms=quantiles(tally["lags_s"], n=100)[-1] * 1000,
    )


def _drive(target: targets.Target, kind: str, args: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """The generator's tally of one load, and the CPU seconds that the proxy spent on it after the warm-up."""
    command = _generator_command(target, kind, args)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as generator:
        assert generator.stdin is not None
        assert generator.stdout is not None
        ready = generator.stdout.readline()
        before_s = target.cpu_s()
        if ready:
            generator.stdin.write("go\n")
            generator.stdin.flush()
        result = generator.stdout.readline()
        cpu_s = target.cpu_s() - before_s
    if not result:
        raise RuntimeError(f"{target.name}: the {kind} generator ended early, code {generator.returncode}")
    return json.loads(result), cpu_s


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
