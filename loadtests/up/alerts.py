"""The shipped alerts and dashboard, asked of a real Prometheus.

What must stay true: what is asked is what is shipped. Rules may be made faster, all of them alike, and in no
other way: `sped_up`.
"""

from __future__ import annotations

import json
import re
import time
import urllib.parse
from pathlib import Path
from typing import Any, NamedTuple

from loadtests.wire.blocking import fetch

MONITORING = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
RULES = MONITORING / "rules.yaml"
DASHBOARD = MONITORING / "dashboard.json"
TIMEOUT_S = 10.0
_VARIABLES = {"$job": ".*", "$instance": ".*", "$cell": ".*", "$unit": ".*"}


def sped_up(rules: str, factor: int) -> str:
    """`rules`, in which a minute passes `factor` times as fast: in `for`, and in the windows of rates."""

    def shorter(found: re.Match[str]) -> str:
        seconds = int(found[1]) * {"m": 60, "h": 3600}[found[2]]
        return f"{max(1, seconds // factor)}s"

    return re.sub(r"\b(\d+)([mh])\b", shorter, rules)


class Prometheus:
    """One that listens on a port of this machine."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def ask(self, path: str, **fields: object) -> Any:
        """The data of an answer. Raises RuntimeError with its words for a question it cannot answer."""
        url = f"{self._url}{path}?{urllib.parse.urlencode(fields)}"
        reply = fetch(url, silence_s=TIMEOUT_S)
        if reply.status != 200:
            raise RuntimeError(f"Prometheus answers {reply.status} to {url}: {reply.body[:500]!r}")
        return json.loads(reply.body)["data"]

    def alerts(self, state: str = "firing") -> dict[str, str]:
        """The alerts in this state, and the unit each is about."""
        found = self.ask("alerts")["alerts"]
        return {a["labels"]["alertname"]: a["labels"].get("unit", "") for a in found if a["state"] == state}

    def firing(self, instance: str) -> set[str]:
        """The alerts that fire about one gate, or about none in particular."""
        return {
            alert["labels"]["alertname"]
            for alert in self.ask("alerts")["alerts"]
            if alert["state"] == "firing" and alert["labels"].get("instance", instance) == instance
        }

    def has_data(self, expr: str, last_s: float, *, rate_interval_s: int) -> bool:
        """Whether an expression of the dashboard had a value at some time of the last `last_s` seconds."""
        for name, value in (_VARIABLES | {"$__rate_interval": f"{rate_interval_s}s"}).items():
            expr = expr.replace(name, value)
        now = time.time()
        found = self.ask("query_range", query=expr, start=now - last_s, end=now, step=max(1.0, last_s / 500))
        return any(value != "NaN" for series in found["result"] for _, value in series["values"])


class Question(NamedTuple):
    """One expression of the dashboard: in which panel, under which legend."""

    panel: str
    legend: str
    expr: str

    def __str__(self) -> str:
        return f"{self.panel} ({self.legend})" if self.legend else self.panel


def questions() -> list[Question]:
    """All that the panels of the dashboard ask for."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [
        Question(panel["title"], target["legendFormat"], target["expr"])
        for panel in panels
        for target in panel.get("targets", ())
    ]
