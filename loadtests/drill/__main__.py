"""Drills from files (`loadtests.drill FILE.yaml …`): run them, say what was promised and what was kept.

The exit code is 1 when a promise of the gate is broken, 2 when a file cannot be used or a run failed. With
`--router` once or more the same is done through other routers, and a table compares them; what those break
is theirs. Files of each run: `.run/drills/NAME/ROUTER/`.
"""

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from loadtests.drill.answers import End
from loadtests.drill.plan import Drill
from loadtests.drill.reader import DrillFileError, read
from loadtests.drill.records import UnfinishedError
from loadtests.drill.routers import ROUTERS
from loadtests.drill.run import Run, run
from loadtests.drill.summary import percentile
from loadtests.drill.timeline import draw
from loadtests.kit import progress
from loadtests.simunit.process import SimUnitError
from loadtests.vllm import VllmUnitError

OUT = Path(__file__).resolve().parents[2] / ".run" / "drills"
_OWN_NETWORK = "DRILL_OWN_NETWORK"
_SET_UP_NETWORK = (
    "ip link set lo up",
    # The rule for local addresses comes first otherwise, whatever the number of another.
    "ip rule add pref 100 lookup local",
    "ip rule del pref 0",
)
FAILURES = (RuntimeError, OSError, SimUnitError, VllmUnitError, UnfinishedError)
"""Whatever keeps a run from being one."""

_SHOWN = 5
"""Requests of each bad end that are told one by one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for."""
    args = _arguments(arguments)
    try:
        drills = [_through(read(file), router) for file in args.file for router in args.router or (None,)]
    except DrillFileError as error:
        print(error, file=sys.stderr)
        return 2
    if any(map(_needs_own_network, drills)):
        _enter_own_network()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    runs = []
    for drill in drills:
        try:
            with progress.shown("drill"):
                runs.append(_one(drill, args.out))
        except FAILURES as error:
            print(f"{drill.name} through {drill.topology.router} proves nothing: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("\nstopped; nothing is proven", file=sys.stderr)
            return 2
    if len(runs) > 1:
        print(*compared(runs), sep="\n")
    return 1 if any(not r.is_kept() for r in runs if r.drill.topology.router == "cellgate") else 0


def _through(drill: Drill, router: str | None) -> Drill:
    if router is None:
        return drill
    return drill.model_copy(update={"topology": drill.topology.model_copy(update={"router": router})})


def _needs_own_network(drill: Drill) -> bool:
    """Whether addresses are cut off, or workers would listen on every address of the machine."""
    return drill.topology.has_own_workers() or any(step.fault == "partition" for step in drill.faults)


def _enter_own_network() -> None:
    """Become the same program in a network namespace of its own, where addresses can be cut off."""
    if os.environ.get(_OWN_NETWORK):
        for command in _SET_UP_NETWORK:
            subprocess.run(command.split(), check=True)
        return
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
    again = [*unshare, sys.executable, "-m", "loadtests.drill", *sys.argv[1:]]
    os.execvpe(again[0], again, os.environ | {_OWN_NETWORK: "1"})


def _one(drill: Drill, out: Path) -> Run:
    """Run a drill, tell of it, leave its files."""
    folder = out / drill.name / drill.topology.router
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"{drill.name} through {drill.topology.router}: {drill.load.seconds:.0f} s", flush=True)
    result = run(drill, folder)
    draw(result, folder / "timeline.png")
    lines = [*told(result), f"timeline.png, locust.html, requests.jsonl and logs: {folder}"]
    (folder / "verdict.txt").write_text("\n".join(lines) + "\n")
    print(*lines, "", sep="\n", flush=True)
    return result


def told(result: Run) -> Iterator[str]:
    """A run for people: figures, faults, what ended badly, verdicts."""
    yield from result.outcome.summary.lines()
    for blow in result.outcome.blows:
        yield f"{blow.at - result.began_at:7.1f} s  {blow.what}: {blow.discovery()}"
    yield from (f"           {broken.line()}" for broken in result.outcome.splits.broken)
    for end in (End.LOST, End.HUNG, End.REPEATED, End.WRONG):
        bad = [record for record in result.outcome.summary.records if record.end is end]
        for record in bad[:_SHOWN]:
            when = f"sent at {record.sent_at - result.began_at:.1f} s, ended {record.e2e_s:.1f} s later"
            yield f"  ! {end.value}: {record.mix}, {when}: {record.why}"
    yield from (verdict.line() for verdict in result.verdicts)
    yield "PASSED" if result.is_kept() else "FAILED"


def compared(runs: Sequence[Run]) -> Iterator[str]:
    """The runs as a table in Markdown."""
    heads = ["drill", "router", "requests", *(end.value for end in End), "continued", "TTFT p50 / p99, s"]
    rows = []
    for each in runs:
        summary, topology = each.outcome.summary, each.drill.topology
        ends, ttft = summary.ends(), [percentile(summary.ttft_s(), share) for share in (0.5, 0.99)]
        latency = " / ".join("-" if math.isnan(value) else f"{value:.2f}" for value in ttft)
        counts = [len(summary.records), *(ends[end] for end in End), each.outcome.continued]
        rows.append([each.drill.name, topology.router, *map(str, counts), latency])
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.drill", description=__doc__)
    parser.add_argument("file", nargs="+", type=Path, help="the drill")
    parser.add_argument(
        "--router", action="append", choices=ROUTERS, help="instead of the file's; repeatable"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="where each run leaves its files")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
