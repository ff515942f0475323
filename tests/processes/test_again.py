"""A test that fails once: how its lane ends (tests/again.py), and what a hunt notes (tests/flakes.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


def run(folder: Path, tests: str, *plugins: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(tests)
    options = [option for plugin in plugins for option in ("-p", plugin)]
    # It may run in a worker itself.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environ = {**own, "PYTHONPATH": str(ROOT), NOTES: str(folder / "notes"), "PYTEST_ADDOPTS": ""}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", *options],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


def test_one_that_passes_by_itself_does_not_fail_the_run_and_is_kept(tmp_path: Path) -> None:
    done = run(tmp_path, PASSES + FAILS_ONCE.format("once"), "tests.again")
    assert done.returncode == 0, done.stdout
    assert "FLAKY: test_it.py::test_once failed, and passed by itself." in done.stderr
    (flake,) = map(json.loads, (tmp_path / "build" / "flakes.json").read_text().splitlines())
    assert flake["test"] == "test_it.py::test_once"
    assert "assert was_tried" in flake["error"]


def test_one_that_fails_again_fails_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, PASSES + FAILS_ALWAYS, "tests.again")
    assert done.returncode == 1
    assert "test_it.py::test_never failed, and failed again by itself." in done.stderr
    assert not (tmp_path / "build").exists()


def test_two_failures_are_a_failure(tmp_path: Path) -> None:
    done = run(tmp_path, FAILS_ONCE.format("once") + FAILS_ONCE.format("too"), "tests.again")
    assert done.returncode == 1
    assert "itself" not in done.stderr
    assert not (tmp_path / "build").exists()


def test_a_hunt_notes_what_failed_whatever_came_of_it_and_names_the_seeds(tmp_path: Path) -> None:
    run(tmp_path, PASSES + FAILS_ONCE.format("once"), "tests.again", "tests.flakes")
    assert (tmp_path / "notes").read_text() == '"test_it.py::test_once"\n'
    assert lines("test", 20, {"b": [3], "a": [2, 7]}) == [
        "test: 2 tests failed in 20 runs",
        "  2 of 20: a (PYTHONHASHSEED 2, 7)",
        "  1 of 20: b (PYTHONHASHSEED 3)",
    ]
