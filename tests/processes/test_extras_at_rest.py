"""What a gate imports: of extras those that it needs. Python itself says each import of the process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cellgate.extras import EXTRAS as ROWS
from cellgate.extras import attending
from loadtests.simunit.process import sim_units
from tests.extras import ONE_OR_TWO_WORKERS, needs
from tests.wire.process import GateProcess, eventually

EXTRAS = "cellgate.extras"
ALWAYS = tuple(f"{EXTRAS}.{ROWS[name].parts['plane'].partition('.')[0]}" for name in attending())
"""Those that each gate has."""
LATE = (f"{EXTRAS}.", "boto3", "zmq", "redis")
"""What most gates have no use for."""


def late(gate: GateProcess) -> set[str]:
    """Which of these its process has imported so far."""
    imported = set(re.findall(r"^import time:.*\| +([\w.]+)$", gate.log, re.MULTILINE))
    assert "cellgate.proxy.app" in imported
    return {module for module in imported if module.startswith(LATE) and not module.startswith(ALWAYS)}


def gate(folder: Path, units: dict[str, str], **keys: Any) -> GateProcess:
    return GateProcess(folder, units, environ={"PYTHONPROFILEIMPORTTIME": "1"}, **keys)


@pytest.mark.parametrize("workers", ONE_OR_TWO_WORKERS)
def test_a_gate_imports_no_extra_that_it_is_not_asked_for(tmp_path: Path, workers: int) -> None:
    with sim_units(["a"]) as units:
        unit = {"name": "a", "url": units[0].url, "engine": "openai"}
        with gate(tmp_path, {}, cells=[{"name": "c", "units": [unit]}], workers=workers) as started:
            started.until_up("a")
            assert started.admin("POST", "/roll/start")[0] == 409
            more = {module for module in late(started) if not module.startswith(f"{EXTRAS}.workers")}
            assert more == set()
            assert (late(started) != more) is (workers > 1)


@needs("operator")
def test_what_the_operators_file_asks_for_is_imported(tmp_path: Path) -> None:
    operator = {"roll": {"command": ["true"], "audit": str(tmp_path / "audit")}}
    with gate(tmp_path, {"a": "http://127.0.0.1:9"}, operator=operator) as started:
        found = late(started)
        assert f"{EXTRAS}.operator.roller" in found
        assert not any(module.startswith(f"{EXTRAS}.kv_events") for module in found)
        assert started.admin("POST", "/roll/start")[0] == 202


@needs("kv_events")
def test_kv_events_are_imported_with_the_first_unit_that_may_have_some(tmp_path: Path) -> None:
    pytest.importorskip("zmq")
    with sim_units(["a"]) as units, gate(tmp_path, {"a": units[0].url}) as started:
        started.until_up("a")
        assert eventually(lambda: f"{EXTRAS}.kv_events.wire" in late(started))
        assert not any(module.startswith(f"{EXTRAS}.operator") for module in late(started))
