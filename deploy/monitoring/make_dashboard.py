"""Writes dashboard.json, in Grafana's JSON model, from panels.yaml: where panels stand, what they share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
COLUMNS = 24
HEIGHTS = {"stat": 4, "timeseries": 8, "state-timeline": 8}
SOURCE = {"type": "prometheus", "uid": "${source}"}
LABELS = {
    "@gate": 'job=~"$job", instance=~"$instance"',
    "@cell": 'job=~"$job", instance=~"$instance", cell=~"$cell"',
    "@unit": 'job=~"$job", instance=~"$instance", unit=~"$unit"',
}
# Each is narrowed by those before it.
VARIABLES = {
    "job": "",
    "instance": 'job=~"$job"',
    "cell": 'job=~"$job", instance=~"$instance"',
    "unit": 'job=~"$job", instance=~"$instance", cell=~"$cell"',
}


def dashboard(rows: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The whole dashboard."""
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "title": "Cellgate",
        "uid": "cellgate",
        "tags": ["cellgate"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, *(_variable(*each) for each in VARIABLES.items())]},
        "annotations": {"list": [_falls()]},
        "panels": [{"id": number} | panel for number, panel in enumerate(_laid_out(rows), start=1)],
    }


def _laid_out(rows: Mapping[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """The panels, left to right and row by row; those of one line are equally high."""
    y = 0
    for title, panels in rows.items():
        yield {
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": _place(0, y, COLUMNS, 1),
        }
        x, y, height = 0, y + 1, 0
        for panel in panels:
            wide = panel.get("wide", 8)
            if x + wide > COLUMNS:
                x, y = 0, y + height
            height = HEIGHTS[panel.get("kind", "timeseries")]
            yield _panel(panel) | {"gridPos": _place(x, y, wide, height)}
            x += wide
        y += height


def _place(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def _panel(panel: Mapping[str, Any]) -> dict[str, Any]:
    kind = panel.get("kind", "timeseries")
    targets = [
        {"refId": chr(ord("A") + at), "expr": _labelled(expr), "legendFormat": legend, "datasource": SOURCE}
        for at, (legend, expr) in enumerate(panel["ask"].items())
    ]
    return {
        "type": kind,
        "title": panel["title"],
        "description": panel["says"],
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.get("unit", "short")} | _looks(panel), "overrides": []},
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}} if kind == "stat" else {},
    }


def _labelled(expr: str) -> str:
    for name, labels in LABELS.items():
        expr = expr.replace(name, labels)
    return expr


def _looks(panel: Mapping[str, Any]) -> dict[str, Any]:
    if states := panel.get("states"):
        options = {
            str(number): {"text": text, "color": colour, "index": number}
            for number, (text, colour) in states.items()
        }
        return {"mappings": [{"type": "value", "options": options}]}
    if panel.get("kind") != "stat":
        return {"min": 0}
    red = [{"color": "red", "value": panel["warn"]}] if "warn" in panel else []
    steps = [{"color": "green", "value": None}, *red]
    return {"thresholds": {"mode": "absolute", "steps": steps}, "color": {"mode": "thresholds"}}


def _variable(name: str, within: str) -> dict[str, Any]:
    query = f"label_values(cellgate_unit_verdict{{{within}}}, {name})"
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "A"},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


def _falls() -> dict[str, Any]:
    """A line through all panels where a unit went down."""
    return {
        "name": "Units going down",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": _labelled("sum by (unit) (increase(cellgate_unit_downs_total{@unit}[1m])) > 0"),
        "titleFormat": "{{unit}} down",
        "step": "30s",
    }


def text() -> str:
    """What dashboard.json has to be."""
    rows = yaml.safe_load((HERE / "panels.yaml").read_text(encoding="utf-8"))
    return json.dumps(dashboard(rows), indent=1) + "\n"


if __name__ == "__main__":
    (HERE / "dashboard.json").write_text(text(), encoding="utf-8")
