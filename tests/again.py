"""One failed test of processes is run once more, by itself (`pytest -p tests.again`).

Processes race with each other and with the machine: one failure of hundreds says more about the test than
about half a day of work. If it passes alone, the run passes, says so as its last words, and adds a line to
build/flakes.json. Two failures are a failure. `make test`, whose tests are deterministic, does not use this.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.flakes import record


class Again:
    """What failed in this run, and what came of the second attempt."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.failed: dict[str, str] = {}
        self.said = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.setdefault(report.nodeid, report.longreprtext)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or len(self.failed) != 1:
            return
        ((test, error),) = self.failed.items()
        command = [sys.executable, "-m", "pytest", test]
        if subprocess.run(command, cwd=self.root, check=False).returncode != 0:
            self.said = f"{test} failed, and failed again by itself."
            return
        session.exitstatus = pytest.ExitCode.OK
        file = self.root / "build" / "flakes.json"
        record(file, test, error)
        self.said = f"FLAKY: {test} failed, and passed by itself. The run passes; the error is in {file}"

    def pytest_unconfigure(self) -> None:
        if self.said:
            print(f"\n{'!' * 80}\n{self.said}\n{'!' * 80}", file=sys.stderr)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Again(config.rootpath))
