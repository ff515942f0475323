"""A roll as an operator has it: gates, a real Redis, a command that restarts the unit, `cellgate roll`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtests.simunit.process import SimUnit
from tests.real.redis_server import RedisServer
from tests.wire.process import GateProcess, eventually


@pytest.mark.parametrize("secret", ["", "secret-of-the-fleet"])
def test_a_roll_asked_of_one_gate_is_seen_by_both_and_restarts_the_unit_once(
    secret: str, tmp_path: Path
) -> None:
    """With a secret of the fleet an order that somebody has written into Redis does nothing."""
    told = tmp_path / "told"
    roll = {
        "command": ["sh", "-c", f"echo $CELLGATE_UNIT $CELLGATE_ID >> {told}"],
        "audit": str(tmp_path / "audit.jsonl"),
        "drain_s": 5,
        "soak_s": 0.5,
    }
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    with RedisServer(tmp_path) as redis, SimUnit.start("a", step_ms=4) as unit:
        cells = [{"name": "c", "units": [{"name": "a", "url": unit.url}]}]
        settings: dict[str, Any] = {"cells": cells, "operator": {"roll": roll}, "redis": redis.url}
        if secret:
            settings["environ"] = {"CELLGATE_FLEET_SECRET": secret}
        with GateProcess(folders[0], {}, **settings) as one, GateProcess(folders[1], {}, **settings) as other:
            one.until_up("a")
            other.until_up("a")
            assert "no roll: start one" in cellgate(other, "roll")
            if secret:
                redis.do("RPUSH", "cellgate:roll:orders", '{"verb":"start","by":"x","id":"1"}')
                assert eventually(lambda: redis.do("LLEN", "cellgate:roll:orders") == 0)
                assert "forged" in str(one.admin("GET", "/events")) + str(other.admin("GET", "/events"))
                assert "no roll: start one" in cellgate(other, "roll")
            # Before anybody conducts, an order waits.
            assert "start: asked" in cellgate(other, "roll", "start")
            assert eventually(told.exists)
            assert [gate.admin("GET", "/units")[1][0]["drained"] for gate in (one, other)] == [True, True]
            unit.restart()
            for gate in (one, other):
                assert eventually(lambda: is_done(gate))  # noqa: B023
                assert eventually(lambda: not gate.units()["a"]["drained"])  # noqa: B023
            assert "is done: 1 of 1 units done" in cellgate(one, "roll")
            assert len(told.read_text().splitlines()) == 1
            assert "the roll is done" in cellgate(one, "roll", "pause")


def is_done(gate: GateProcess) -> bool:
    return (gate.admin("GET", "/roll")[1]["roll"] or {}).get("status") == "done"


def cellgate(gate: GateProcess, *words: str) -> str:
    """What a command prints, on either stream."""
    admin = f"127.0.0.1:{gate.admin_port}"
    done = subprocess.run(
        [sys.executable, "-m", "cellgate", *words, "--admin", admin],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return done.stdout + done.stderr
