"""Each alert that is shipped, before real Prometheus and Alertmanager: a real fault fires it, its end clears
it, and no other alert fires for it.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.real.programs import ROOT, find

pytestmark = pytest.mark.nightly

PATIENCE_S = 570.0


def test_every_alert_fires_for_its_fault_alone_and_clears() -> None:
    for program in ("prometheus", "prometheus-alertmanager", "redis-server"):
        find(program)
    drill = subprocess.run(
        [sys.executable, "-m", "loadtests.alerts"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert drill.returncode == 0, drill.stdout + drill.stderr
    assert ", 0 problems" in drill.stdout
