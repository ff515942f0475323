"""A hunt for tests that fail by chance: `python -m tests.flakes --runs 20 --lane test`.

Runs a lane (a target of the Makefile) again and again beside two busy loops and a disk that is always being
written to. Names each test that has ever failed, how often, and the seeds of those runs; exits with 1 if
there is one. The errors are in build/hunt-LANE.json.

The seed of a run is PYTHONHASHSEED, the order of sets; those of scenarios and policies stand in the names of
their tests. As a plugin of pytest (`-p tests.flakes`, before all others) this file notes what fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LANES = ("test", "test-processes")
BUSY_LOOPS = 2
BLOCK = bytes(1 << 20)
BLOCKS = 64
NOTES = "CELLGATE_FLAKES"
"""The variable of the environment that names the file for what fails."""


def spin() -> None:
    """Keep a core busy."""
    while True:
        pass


def write() -> None:
    """Keep the disk busy: each block is on it before the next one."""
    with tempfile.TemporaryFile(dir=ROOT / "build") as file:
        while True:
            file.seek(0)
            for _ in range(BLOCKS):
                file.write(BLOCK)
                file.flush()
                os.fsync(file.fileno())


@contextmanager
def load_beside() -> Iterator[None]:
    """Busy loops and a busy disk, while the context lasts."""
    (ROOT / "build").mkdir(exist_ok=True)
    spawn = multiprocessing.get_context("spawn")
    hogs: list[BaseProcess] = [spawn.Process(target=spin, daemon=True) for _ in range(BUSY_LOOPS)]
    hogs.append(spawn.Process(target=write, daemon=True))
    for hog in hogs:
        hog.start()
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.join()


def run(lane: str, seed: int) -> set[str]:
    """Run a lane once; the tests that failed, or the lane itself if it ended otherwise."""
    file = ROOT / "build" / f"hunt-{lane}.json"
    environ = {"PYTEST_ADDOPTS": "-p tests.flakes", "PYTHONHASHSEED": str(seed), NOTES: str(file)}
    with file.open("a+", encoding="utf-8") as notes:
        done = subprocess.run(
            ["make", "-s", lane],
            cwd=ROOT,
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            check=False,
        )
        failed = {json.loads(line)["test"] for line in notes}
    if done.returncode and not failed:
        print(done.stdout[-2000:], done.stderr[-2000:], flush=True)
        return {f"make {lane}"}
    return failed


def record(file: Path, test: str, error: str) -> None:
    """Add a flake to a file: an object of JSON per line."""
    file.parent.mkdir(exist_ok=True)
    line = {"test": test, "at": time.strftime("%FT%TZ", time.gmtime()), "error": error}
    with file.open("a", encoding="utf-8") as flakes:
        flakes.write(json.dumps(line) + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what fails, in the process that has the terminal."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        record(Path(os.environ[NOTES]), report.nodeid, report.longreprtext)


def hunt(lane: str, runs: int) -> dict[str, list[int]]:
    """Run a lane so often; the tests that ever failed, with the seeds with which they did."""
    failed: defaultdict[str, list[int]] = defaultdict(list)
    for seed in range(1, runs + 1):
        begun_at = time.monotonic()
        new = run(lane, seed)
        for test in new:
            failed[test].append(seed)
        took_s = time.monotonic() - begun_at
        print(f"{lane} {seed}/{runs}: {len(new)} failed, {took_s:.0f} s", *sorted(new), flush=True)
    return failed


def lines(lane: str, runs: int, failed: Mapping[str, Sequence[int]]) -> list[str]:
    """What was found, the most frequent first."""
    found = sorted(failed.items(), key=lambda each: (-len(each[1]), each[0]))
    rows = [
        f"  {len(seeds)} of {runs}: {test} (PYTHONHASHSEED {', '.join(map(str, seeds))})"
        for test, seeds in found
    ]
    return [f"{lane}: {len(failed)} tests failed in {runs} runs", *rows]


def main() -> int:
    """Hunt in the lanes that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.flakes", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="how often each lane is run")
    parser.add_argument("--lane", choices=LANES, action="append", help="both, if none is named")
    options = parser.parse_args()
    told, is_clean = [], True
    with load_beside():
        for lane in options.lane or LANES:
            failed = hunt(lane, options.runs)
            told += lines(lane, options.runs, failed)
            is_clean &= not failed
    print(*told, sep="\n")
    return not is_clean


if __name__ == "__main__":
    sys.exit(main())
