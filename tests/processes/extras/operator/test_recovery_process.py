"""The gate as a process, with units that stay DOWN and a command that brings them back."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtests.simunit.process import SimUnit
from tests.wire.process import GateProcess, eventually, metrics


@pytest.fixture
def unit() -> Iterator[SimUnit]:
    with SimUnit.start("a", followers=1, step_ms=4) as started:
        yield started


def cells(unit: SimUnit) -> list[dict[str, Any]]:
    nodes = [{"name": "a-0", "role": "leader"}, {"name": "a-1", "role": "follower"}]
    return [{"name": "c", "units": [{"name": "a", "url": unit.url, "nodes": nodes}]}]


def remedy(**recovery: Any) -> dict[str, Any]:
    """For as often as a busy machine may need."""
    return {"recovery": [{"cell": "c", "attempts": 1000, **recovery}]}


def entries(audit: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in audit.read_text().splitlines()] if audit.exists() else []


def counted(gate: GateProcess, result: str) -> float:
    name = f'cellgate_recoveries_total{{cell="c",result="{result}"}} '
    page = metrics(gate).splitlines()
    return float(next(line for line in page if line.startswith(name)).removeprefix(name))


def change(gate: GateProcess, remedies: dict[str, Any]) -> None:
    """Have other remedies, from the end of this on."""
    gate.operate(**remedies)
    assert gate.admin("POST", "/reload")[0] == 200


def test_a_wedged_unit_is_brought_back_by_a_command_once_a_reload_says_that_there_is_one(
    unit: SimUnit, tmp_path: Path
) -> None:
    rehearsed, audit, told = (tmp_path / name for name in ("rehearsed", "audit", "told"))
    command = ["sh", "-c", f"cat > {told}; kill -CONT {unit.follower_pids[0]}; echo $CELLGATE_NODES"]
    with GateProcess(tmp_path, {}, cells=cells(unit), operator={"recovery": []}) as gate:
        gate.until_up("a")
        unit.signal_follower(signal.SIGSTOP)
        assert eventually(lambda: gate.units()["a"]["verdict"] == "down")
        # It has not seen the unit UP: then a unit is given `backoff_s`.
        change(gate, remedy(command=command, audit=str(rehearsed), after_s=0.1, backoff_s=0.1, dry_run=True))
        assert eventually(lambda: entries(rehearsed) and counted(gate, "dry_run"))
        assert (gate.units()["a"]["verdict"], told.exists()) == ("down", False)
        change(gate, remedy(command=command, audit=str(audit), after_s=0.5, backoff_s=0.1))
        assert eventually(lambda: len(entries(audit)) == 2)
        gate.until_up("a")
        assert counted(gate, "ok") == 1
        begin, end = entries(audit)
        case = json.loads(told.read_text())
        assert (begin["step"], begin["command"], begin["case"]) == ("begin", command, case)
        assert (end["result"], end["output"]) == ("ok", "a-0,a-1\n")
        kinds = [event["kind"] for event in gate.admin("GET", "/events")[1]]
        assert {"recovery", "recovery_done"} <= set(kinds)
        assert eventually(lambda: "recovering unit a: sh -c" in gate.log)
        gate.signal(signal.SIGTERM)
        assert gate.exit_code() == 0
        assert "Traceback" not in gate.log
