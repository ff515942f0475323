"""The gate as a process, with units that stay DOWN and a command that brings them back."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtests.simunit.process import SimUnit
from tests.wire.process import GateProcess, eventually


@pytest.fixture
def unit() -> Iterator[SimUnit]:
    with SimUnit.start("a", followers=1, step_ms=4) as started:
        yield started


def cells(unit: SimUnit) -> list[dict[str, Any]]:
    nodes = [{"name": "a-0", "role": "leader"}, {"name": "a-1", "role": "follower"}]
    return [{"name": "c", "units": [{"name": "a", "url": unit.url, "nodes": nodes}]}]


def remedy(**recovery: Any) -> dict[str, Any]:
    return {"recovery": [{"cell": "c", **recovery}]}


def entries(audit: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in audit.read_text().splitlines()] if audit.exists() else []


def counted(gate: GateProcess, result: str) -> float:
    connection = gate.connect(admin=True)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    name = f'cellgate_recoveries_total{{cell="c",result="{result}"}} '
    return float(next(line for line in page.splitlines() if line.startswith(name)).removeprefix(name))


def test_a_wedged_unit_is_brought_back_by_a_command(unit: SimUnit, tmp_path: Path) -> None:
    audit, told = tmp_path / "audit.jsonl", tmp_path / "told"
    command = ["sh", "-c", f"cat > {told}; kill -CONT {unit.follower_pids[0]}; echo $CELLGATE_NODES"]
    recovery = remedy(command=command, audit=str(audit), after_s=0.5, backoff_s=30)
    with GateProcess(tmp_path, {}, cells=cells(unit), operator=recovery) as gate:
        gate.until_up("a")
        assert counted(gate, "ok") == 0
        unit.signal_follower(signal.SIGSTOP)
        assert eventually(lambda: len(entries(audit)) == 2)
        gate.until_up("a")
        assert counted(gate, "ok") == 1
        begin, end = entries(audit)
        assert (begin["step"], begin["command"], begin["case"]) == (
            "begin",
            command,
            json.loads(told.read_text()),
        )
        assert (end["result"], end["output"]) == ("ok", "a-0,a-1\n")
        kinds = [event["kind"] for event in gate.admin("GET", "/events")[1]]
        assert kinds.count("recovery") == kinds.count("recovery_done") == 1
        assert "recovering unit a: sh -c" in gate.log
        gate.signal(signal.SIGTERM)
        assert gate.exit_code() == 0
        assert "Traceback" not in gate.log


def test_a_command_that_hangs_is_killed_and_streams_do_not_feel_it(unit: SimUnit, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    command = ["sh", "-c", "echo begun; sleep 100"]
    recovery = remedy(command=command, audit=str(audit), after_s=0.2, timeout_s=0.5, backoff_s=60)
    with GateProcess(tmp_path, {}, cells=cells(unit), operator=recovery) as gate:
        gate.until_up("a")
        unit.signal_follower(signal.SIGSTOP)
        assert eventually(lambda: len(entries(audit)) == 2)
        end = entries(audit)[1]
        assert (end["result"], end["output"]) == ("timeout", "begun\n")
        assert 0.5 <= end["took_s"] < 3.0
        assert counted(gate, "timeout") == 1
        unit.signal_follower(signal.SIGCONT)


def test_sighup_changes_what_is_done(unit: SimUnit, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    never = remedy(command=["true"], audit=str(audit), after_s=600)
    soon = remedy(command=["true"], audit=str(audit), after_s=0.1, dry_run=True)
    with GateProcess(tmp_path, {}, cells=cells(unit), operator=never) as gate:
        gate.until_up("a")
        unit.signal_follower(signal.SIGSTOP)
        assert eventually(lambda: gate.units()["a"]["verdict"] == "down")
        gate.operate(**soon)
        gate.signal(signal.SIGHUP)
        assert eventually(lambda: counted(gate, "dry_run") == 1)
        unit.signal_follower(signal.SIGCONT)


def children(gate: GateProcess) -> list[str]:
    """What it has started and is running."""
    pids = Path(f"/proc/{gate.process.pid}/task/{gate.process.pid}/children").read_text().split()
    return [Path(f"/proc/{pid}/comm").read_text() for pid in pids]


def test_a_gate_that_ends_ends_its_commands_and_says_so(unit: SimUnit, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    recovery = remedy(command=["sleep", "100"], audit=str(audit), after_s=0.1, timeout_s=200)
    with GateProcess(
        tmp_path, {}, cells=cells(unit), operator=recovery, timeouts={"drain_delay_s": 0, "drain_s": 1}
    ) as gate:
        gate.until_up("a")
        unit.signal_follower(signal.SIGSTOP)
        assert eventually(lambda: len(entries(audit)) == 1)
        assert eventually(lambda: "sleep\n" in children(gate))
        gate.signal(signal.SIGTERM)
        assert gate.exit_code() == 0
        assert entries(audit)[1]["result"] == "cut_off"
        assert "Traceback" not in gate.log
        unit.signal_follower(signal.SIGCONT)


def test_sighup_begins_it_where_there_was_none(unit: SimUnit, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    # It has not seen the unit UP: then a unit is given `backoff_s`.
    soon = remedy(command=["true"], audit=str(audit), after_s=0.1, backoff_s=0.1, dry_run=True)
    with GateProcess(tmp_path, {}, cells=cells(unit), operator={"recovery": []}) as gate:
        gate.until_up("a")
        unit.signal_follower(signal.SIGSTOP)
        assert eventually(lambda: gate.units()["a"]["verdict"] == "down")
        gate.operate(**soon)
        gate.signal(signal.SIGHUP)
        assert eventually(lambda: entries(audit))
        assert eventually(lambda: counted(gate, "dry_run") == 1)
        unit.signal_follower(signal.SIGCONT)
