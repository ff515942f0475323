"""The shipped alerts in a real Prometheus before a real gate: they fire for a wedged unit, and clear."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from loadtests.bench.processes import wait_ready
from loadtests.simunit.process import SimUnit
from tests.real.programs import ROOT, find, free_port, running
from tests.wire.process import GateProcess

RULES = ROOT / "deploy" / "monitoring" / "rules.yaml"
PATIENCE_S = 150.0
OF_A_WEDGE = {"CellgateUnitDown", "CellgateWedgeFound"}


def sped_up(rules: str) -> str:
    """A minute passes in three seconds: all that is said in minutes and hours becomes shorter."""
    rules = re.sub(r"\b(\d+)h\b", lambda found: f"{int(found[1]) * 180}s", rules)
    return re.sub(r"\b(\d+)m\b", lambda found: f"{int(found[1]) * 3}s", rules)


def ask(port: int, path: str) -> Any:
    """The data of an answer of Prometheus."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=10) as reply:
        return json.load(reply)["data"]


def firing(port: int) -> dict[str, str]:
    """The alerts that fire, and the unit each is about."""
    alerts = ask(port, "alerts")["alerts"]
    return {a["labels"]["alertname"]: a["labels"].get("unit", "") for a in alerts if a["state"] == "firing"}


def until(port: int, is_so: Callable[[], object]) -> None:
    """Wait until it is so."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up_at, firing(port)
        time.sleep(0.2)


def test_a_wedged_unit_makes_its_alerts_fire_and_a_healed_one_clears_them(tmp_path: Path) -> None:
    program, port = find("prometheus"), free_port()
    (tmp_path / "rules.yaml").write_text(sped_up(RULES.read_text()))
    with SimUnit.start("a1") as hurt, SimUnit.start("a2") as well:
        gate = GateProcess(tmp_path, {"a1": hurt.url, "a2": well.url})
        with gate:
            gate.until_up("a1", "a2")
            scrape = {
                "job_name": "cellgate",
                "static_configs": [{"targets": [f"127.0.0.1:{gate.admin_port}"]}],
            }
            config = {
                "global": {
                    "scrape_interval": "1s",
                    "scrape_timeout": "1s",
                    "evaluation_interval": "1s",
                },
                "rule_files": [str(tmp_path / "rules.yaml")],
                "scrape_configs": [scrape],
            }
            (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
            command = [
                program,
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ]
            with running(command, tmp_path / "prometheus.log") as process:
                wait_ready(process, port, "/-/ready", tmp_path / "prometheus.log")
                # A counter has to be seen before it grows.
                until(port, lambda: ask(port, "query?query=cellgate_flips_total")["result"])
                assert not firing(port).keys() & OF_A_WEDGE
                hurt.fault("spin")
                until(port, lambda: firing(port).keys() >= OF_A_WEDGE)
                fired = firing(port)
                assert {fired[name] for name in OF_A_WEDGE} == {"a1"}
                assert "CellgateNoCapacity" not in fired
                hurt.fault("heal")
                until(port, lambda: not firing(port).keys() & OF_A_WEDGE)
