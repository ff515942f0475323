"""A test that fails once: how its lane ends (tests/again.py), and what a hunt notes (tests/flakes.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documented import ROOT
from tests.flakes import NOTES, lines

FAILS_ONCE = """
from pathlib import Path

def test_{0}():
    tried = Path(__file__).with_suffix(".{0}")
    was_tried = tried.exists()
    tried.touch()
    assert was_tried
"""
FAILS_ALWAYS = "\n\ndef test_never():\n    assert False\n"
PASSES = "\n\ndef test_ever():\n    pass\n"


def run(folder: Path, tests: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (folder / "test_it.py").write_text(tests)
    # It may run in a worker itself.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environ = {
        **own,
        "PYTHONPATH": str(ROOT),
        NOTES: str(folder / "notes"),
        "PYTEST_ADDOPTS": "-p tests.flakes",
    }
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.again", *options],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


def test_one_that_passes_by_itself_does_not_fail_the_run_and_is_kept_and_noted(tmp_path: Path) -> None:
    """As in the Makefile, side by side; and in a hunt, which names the seeds."""
    done = run(tmp_path, PASSES + FAILS_ONCE.format("once"), "-n", "2")
    assert done.returncode == 0, done.stdout
    assert "FLAKY: test_it.py::test_once failed, and passed by itself." in done.stderr
    for file in ("build/flakes.json", "notes"):
        (flake,) = map(json.loads, (tmp_path / file).read_text().splitlines())
        assert flake["test"] == "test_it.py::test_once"
        assert "assert was_tried" in flake["error"]
    assert lines("test", 20, {"b": [3], "a": [2, 7]}) == [
        "test: 2 tests failed in 20 runs",
        "  2 of 20: a (PYTHONHASHSEED 2, 7)",
        "  1 of 20: b (PYTHONHASHSEED 3)",
    ]


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        (PASSES + FAILS_ALWAYS, "test_it.py::test_never failed, and failed again by itself."),
        (FAILS_ONCE.format("once") + FAILS_ONCE.format("too"), ""),
    ],
    ids=["again", "two"],
)
def test_one_that_fails_again_and_two_failures_fail_the_run(tests: str, said: str, tmp_path: Path) -> None:
    done = run(tmp_path, tests)
    assert done.returncode == 1
    assert said in done.stderr
    assert ("itself" in done.stderr) == bool(said)
    assert not (tmp_path / "build").exists()
