"""The benchmark on real processes: HAProxy and the gate, as small as it goes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from loadtests.bench.__main__ import REPEATS_S
from tests.real.programs import ROOT, find

TINY_S = 120.0
"""For each load once."""


def test_a_tiny_benchmark_ends_in_tables_and_a_file(tmp_path: Path) -> None:
    find("haproxy")
    file = tmp_path / "bench.json"
    command = [
        sys.executable,
        "-m",
        "loadtests.bench",
        "--targets",
        "haproxy,cellgate,direct",
        "--rounds",
        "1",
    ]
    command += ["--requests", "200", "--loads", "32-streams,bursts,1kB", "--json", str(file), "--markdown"]
    # Beside other work each measurement is repeated, up to a limit.
    limit_s = TINY_S + REPEATS_S
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit_s)
    # A busy machine may make streams late, which is said at the end; nothing else may go wrong.
    expected = ("bench ", "Not comparable")
    assert [line for line in done.stderr.splitlines() if line and not line.startswith(expected)] == []
    assert "### CPU, in microseconds\n\n|  | haproxy | cellgate | direct |" in done.stdout
    read = json.loads(file.read_text())
    measured = {(each["target"], each["load"]) for each in read["figures"]}
    assert measured == {
        (t, each) for t in ("haproxy", "cellgate", "direct") for each in ("32-streams", "bursts", "1kB")
    }
    assert all(each["cpu_us"] > 0 for each in read["figures"] if each["target"] != "direct")
    leaked = [each["leaked_clients"] + each["leaked_generating"] for each in read["figures"]]
    assert leaked == [0] * len(measured)
    assert read["missing"] == {}
