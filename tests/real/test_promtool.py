"""Alerts and the dashboard's questions before Prometheus' own tool."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import yaml

from tests.real.programs import ROOT, find

MONITORING = ROOT / "deploy" / "monitoring"


def promtool(*arguments: str | Path) -> str:
    """What it prints; it has to be content."""
    done = subprocess.run(
        [find("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_rules_are_good_and_do_what_their_tests_say() -> None:
    assert "SUCCESS" in promtool("check", "rules", MONITORING / "rules.yaml")
    assert "SUCCESS" in promtool("test", "rules", MONITORING / "rules_test.yaml")


def test_every_question_of_the_dashboard_is_promql(tmp_path: Path) -> None:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    questions = [t["expr"] for p in dashboard["panels"] for t in p.get("targets", [])]
    # What Grafana fills in before it asks.
    filled = [re.sub(r"\$\w+", "x", each.replace("$__rate_interval", "1m")) for each in questions]
    rules = [{"record": f"asked_{number}", "expr": expr} for number, expr in enumerate(filled)]
    file = tmp_path / "asked.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": rules}]}))
    assert f"SUCCESS: {len(questions)} rules found" in promtool("check", "rules", file)
