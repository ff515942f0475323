"""What cost grows with: units and streams, for the gate and others beside it, in one run.

`python -m loadtests.scale` starts each target before one engine that answers for all units, and measures what
it takes at rest, a request, a token of a stream, and the TTFT of 256 clients that come at once; then a token
with more streams, on few units. What must hold: with the most units a token, a request and the TTFT cost at
most 1.25 times what they do with the fewest, and the TTFT is at most that of SMG. The plot shows costs over
counts. The exit code is 1 when something does not hold. It needs a machine that does nothing else.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from loadtests.bench.loads import LOADS, Load
from loadtests.bench.measure import measured
from loadtests.bench.stage import Stage, stage
from loadtests.bench.targets import SUBJECT, TARGETS
from loadtests.kit import processes, progress
from loadtests.kit.report import print_problems, verdict

UNITS = (4, 50, 250, 1000)
BESIDE = ("smg", "sglang-router", SUBJECT)
STREAMS = ("256-streams", "2000-streams", "many")
MOST = 1.25
SETTLE_S, IDLE_S = 45.0, 10.0
"""A gate asks idle units ever more rarely in their first minute."""
_LOADS = {"request_us": "1kB", "token_us": "256-streams", "ttft_ms": "bursts"}
_REQUESTS = 4_000


class Scale(NamedTuple):
    """One target with so many units: CPU at rest as a share of a core, CPU of a request and of a token, in
    microseconds, and the 99th percentile of the TTFT of 256 at once. None: it was not measured.
    """

    target: str
    units: int
    idle: float
    request_us: float | None
    token_us: float | None
    ttft_ms: float | None
    others: float

    def line(self) -> str:
        """For people."""
        request, token, ttft = map(_shown, (self.request_us, self.token_us, self.ttft_ms))
        return (
            f"{self.target:16}{self.units:6} units{self.idle:8.1%} at rest{request:>9} us a request{token:>8}"
            f" us a token{ttft:>8} ms TTFT p99 (others took {self.others:.0%})"
        )


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def problems(rows: Sequence[Scale]) -> list[str]:
    """Why it fails; empty when it passes."""
    own = sorted((row for row in rows if row.target == SUBJECT), key=lambda row: row.units)
    if len(own) < 2:
        return ["proves nothing: the gate was measured with fewer than two numbers of units"]
    found, few, many = [], own[0], own[-1]
    for name, words in (("request_us", "a request"), ("token_us", "a token"), ("ttft_ms", "the TTFT")):
        less, more = getattr(few, name), getattr(many, name)
        if less is None or more is None:
            found.append(f"proves nothing: {words} was not measured")
        elif more > MOST * less:
            found.append(
                f"{words} with {many.units} units is {more / less:.2f} times that with {few.units}, "
                f"the limit is {MOST:g}"
            )
    smg = next((row for row in rows if row.target == "smg" and row.units == many.units), None)
    if smg is not None and smg.ttft_ms and many.ttft_ms and many.ttft_ms > smg.ttft_ms:
        found.append(f"TTFT p99 is {many.ttft_ms:.0f} ms, that of SMG is {smg.ttft_ms:.0f} ms")
    return found


def _by_units(targets: Sequence[str], counts: Sequence[int]) -> Iterator[Scale]:
    for units in counts:
        for name in targets:
            progress.phase(f"{name}, {units} units")
            with stage(0, [name], units) as standing:
                if standing.missing:
                    print(f"{name}: {standing.missing[name]}", file=sys.stderr, flush=True)
                    continue
                yield _scale(standing, name, units)


def _scale(standing: Stage, name: str, units: int) -> Scale:
    pid, found, others = standing.running[name].pid, dict[str, float | None](), 0.0
    assert pid is not None
    time.sleep(SETTLE_S)
    before_s = processes.cpu_s(pid)
    time.sleep(IDLE_S)
    idle = (processes.cpu_s(pid) - before_s) / IDLE_S
    for field, load in _LOADS.items():
        found[field] = None
        try:
            figure = measured(standing, name, load, LOADS[load], _REQUESTS)
        except RuntimeError as failure:
            print(f"{name}, {units} units, {load}: {failure}", file=sys.stderr, flush=True)
            continue
        found[field] = figure.ttft_p99_ms if field == "ttft_ms" else figure.cpu_us
        others = max(others, figure.others)
    return Scale(name, units, idle, **found, others=others)


def _by_streams(targets: Sequence[str], loads: Sequence[str]) -> None:
    for load in loads:
        for name in targets:
            progress.phase(f"{name}, {load}")
            with stage(0, [name], UNITS[0]) as standing:
                if standing.missing:
                    continue
                try:
                    made: Load = LOADS[load]
                    print(measured(standing, name, load, made, _REQUESTS).line(), flush=True)
                except RuntimeError as failure:
                    print(f"{name}, {load}: {failure}", file=sys.stderr, flush=True)


def draw(rows: Sequence[Scale], path: Path) -> None:
    """The plot of costs over the number of units."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(15, 3.8))
    panels = (
        ("idle", "CPU at rest, share of a core"),
        ("request_us", "CPU a request, us"),
        ("token_us", "CPU a token, us"),
        ("ttft_ms", "TTFT p99 of 256 at once, ms"),
    )
    for panel, (name, words) in zip(axes, panels, strict=True):
        for target in dict.fromkeys(row.target for row in rows):
            own = [row for row in rows if row.target == target and getattr(row, name) is not None]
            panel.plot([row.units for row in own], [getattr(row, name) for row in own], "o-", label=target)
        panel.set(xlabel="units", ylabel=words, xscale="log", ylim=(0, None))
        panel.grid(alpha=0.3)
    axes[-1].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


@progress.shown("scale")
def main() -> int:
    """Measure, print, draw; 0 when all holds."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.scale", description=__doc__)
    parser.add_argument("--targets", nargs="*", choices=TARGETS, default=BESIDE)
    parser.add_argument("--units", nargs="*", type=int, default=UNITS)
    parser.add_argument("--streams", nargs="*", choices=STREAMS, default=STREAMS)
    parser.add_argument("--plot", type=Path, help="write the plot to this file")
    args = parser.parse_args()
    processes.raise_files()
    rows = []
    for row in _by_units(args.targets, args.units):
        rows.append(row)
        print(row.line(), flush=True)
    _by_streams(args.targets, args.streams)
    if args.plot is not None and rows:
        draw(rows, args.plot)
    found = problems(rows)
    print(verdict(found))
    print_problems(found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
