"""How cost grows: with streams, units, the size of prompts, and of agents' turns; as JSON and as plots.

`python -m loadtests.bench.growth` measures all, a fresh process for each point, and writes both;
`--draw` only draws what has been measured before.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence

from loadtests.bench.figures import Figure, Point
from loadtests.bench.loads import Agents, Load, Requests, Streams, most_streams
from loadtests.bench.measure import measured
from loadtests.bench.stage import stage
from loadtests.bench.targets import SUBJECT, TARGETS
from loadtests.kit import processes
from loadtests.kit.report import machine
from loadtests.kit.routers import ROOT

DATA = ROOT / "docs" / "data" / "growth.json"
PICTURE = ROOT / "docs" / "images" / "growth.png"
BESIDE = ("haproxy", "sglang-router", "smg", SUBJECT)
STREAMS = (100, 300, 1000, 3000, 10_000)
UNITS = (2, 10, 30, 100, 300, 1000)
TURN_BYTES = (80_000, 200_000, 600_000, 1_200_000)
PROMPT_BYTES = (1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000)
IDLE_S = 5.0
_PROMPTS_BYTES = 40_000_000
"""As many requests of a size are sent as come to this much, 40 to 4,000 of them."""


def main() -> int:
    """Measure, write, draw. Returns the exit code."""
    args = _arguments()
    processes.raise_files()
    processes.end_on_sigterm()
    if not args.draw:
        points = []
        for point in _points(args.sweeps, args.targets):
            points.append(point)
            print(
                f"{point.sweep} {point.at}: {point.idle_share:.1%} at rest; {point.figure.line()}", flush=True
            )
        kept = [each for each in _read() if each.sweep not in args.sweeps]
        _write(kept + points)
    from loadtests.bench import growth_plots

    growth_plots.draw(_read(), PICTURE)
    print(DATA, PICTURE, sep="\n")
    return 0


def _points(sweeps: Sequence[str], targets: Sequence[str]) -> Iterator[Point]:
    for sweep in sweeps:
        names = [SUBJECT] if sweep == "units" else targets
        for at, load, units in SWEEPS[sweep]():
            for name in names:
                try:
                    yield _point(sweep, at, name, load, units)
                except (RuntimeError, OSError) as failure:
                    print(f"{sweep} {at}: {name}: {failure}", file=sys.stderr, flush=True)


def _by_streams() -> Iterator[tuple[int, Load, int]]:
    for count in STREAMS:
        streams = min(count, most_streams())
        yield (
            streams,
            Streams(
                f"{streams} streams, an event a second", streams, 20, 1000, max(2.0, streams / 700), 10.0
            ),
            2,
        )


def _by_units() -> Iterator[tuple[int, Load, int]]:
    for units in UNITS:
        yield units, Requests("requests of 1 kB", 1_000, 1.0), units


def _by_prompt() -> Iterator[tuple[int, Load, int]]:
    for size in PROMPT_BYTES:
        count = min(4_000, max(40, _PROMPTS_BYTES // size))
        yield size, Requests(f"requests of {size} bytes", size, count / 4_000), 2


def _by_turn() -> Iterator[tuple[int, Load, int]]:
    for size in TURN_BYTES:
        yield size, Agents(f"an agent's turns of {size} bytes", size, 0.04), 2


SWEEPS = {"streams": _by_streams, "units": _by_units, "prompt": _by_prompt, "agents": _by_turn}


def _point(sweep: str, at: int, name: str, load: Load, units: int) -> Point:
    """Raises RuntimeError when the target does not start, or answers wrongly."""
    with stage(0, [name], units) as standing:
        if standing.missing:
            raise RuntimeError(f"{name}: {standing.missing[name]}")
        pid = standing.running[name].pid
        assert pid is not None
        before_s = processes.cpu_s(pid)
        time.sleep(IDLE_S)
        idle_share = (processes.cpu_s(pid) - before_s) / IDLE_S
        figure = measured(standing, name, sweep, load, 4_000)
    return Point(sweep, at, idle_share, figure.cpu_us * figure.answers / 1e6 / figure.seconds, figure)


def _read() -> list[Point]:
    if not DATA.exists():
        return []
    points = json.loads(DATA.read_text())["points"]
    return [Point(**each | {"figure": Figure(**each["figure"])}) for each in points]


def _write(points: Sequence[Point]) -> None:
    DATA.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(dataclasses.asdict(each)) for each in points)
    DATA.write_text(f'{{"machine": {json.dumps(machine())},\n"points": [\n{lines}\n]}}\n')


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.growth", description=__doc__)
    parser.add_argument("--sweeps", nargs="*", choices=SWEEPS, default=list(SWEEPS))
    parser.add_argument("--targets", nargs="*", choices=TARGETS, default=BESIDE)
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
