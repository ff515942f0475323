"""An extra is taken out: its folder and its row are deleted in a copy. What is left is a gate."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from cellgate.extras import EXTRAS, ExtraName
from tests.wire.process import ROOT, GateProcess

ALL = get_args(ExtraName)
TABLE = "cellgate/extras/__init__.py"
IMPORT_ALL = (
    "import importlib, pkgutil, cellgate\n"
    "names = [each.name for each in pkgutil.walk_packages(cellgate.__path__, 'cellgate.')]\n"
    "[importlib.import_module(name) for name in names if not name.startswith(SKIPPED)]\n"
    "print(len(names))\n"
)
UNIT = {"name": "a", "url": "http://127.0.0.1:9"}


def take_out(name: str, tree: Path) -> None:
    """Deletes the folder of an extra, or its file, and its row."""
    place = tree / "cellgate" / "extras" / name
    shutil.rmtree(place) if place.is_dir() else place.with_suffix(".py").unlink()
    table = tree / TABLE
    lines = table.read_text().splitlines(keepends=True)
    [rows] = [
        node.value
        for node in ast.parse("".join(lines)).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
    ]
    [row] = [
        (key, value)
        for key, value in zip(rows.keys, rows.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == name
    ]
    assert row[0] is not None
    del lines[row[0].lineno - 1 : row[1].end_lineno]
    table.write_text("".join(lines))


@pytest.fixture(params=ALL)
def taken(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The name of an extra, and a tree without it."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "cellgate", tree / "cellgate", ignore=shutil.ignore_patterns("__pycache__"))
    take_out(request.param, tree)
    return request.param, tree


def run(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=tree, capture_output=True, text=True, check=False)


def check(tree: Path, **keys: Any) -> tuple[int, list[str]]:
    """The exit code of `cellgate check`, and its lines about what is wrong."""
    file = tree / "cellgate.yaml"
    file.write_text(yaml.safe_dump({"cells": [{"name": "c", "units": [UNIT]}], **keys}))
    done = run(tree, "-m", "cellgate", "check", "cellgate.yaml")
    return done.returncode, done.stderr.splitlines()


def asks_for(setting: str, tree: Path) -> dict[str, Any]:
    """A configuration with the setting."""
    if setting == "cells[].discover":
        return {"cells": [{"name": "c", "discover": {"from": "lws", "name": "big", "port": 9}}]}
    if setting.startswith("cells[].units[].nodes[]."):
        nodes = [{"name": "n", "role": "leader", "probes": [{"probe": "grpc", "address": "127.0.0.1:9"}]}]
        return {"cells": [{"name": "c", "units": [UNIT | {"nodes": nodes}]}]}
    if setting.startswith("cells[].units[]."):
        unit = UNIT | {setting.rpartition(".")[2]: {"from": "vllm"}}
        return {"cells": [{"name": "c", "units": [unit]}]}
    for name in ("operator.yaml", "keys.jsonl"):
        (tree / name).write_text("{}" if name == "operator.yaml" else "")
    if setting == "keys.jwt":
        issuer = {"issuer": "i", "audience": "a", "jwks_url": f"{UNIT['url']}/jwks", "tenant_claim": "t"}
        return {"keys": {"file": "keys.jsonl", "jwt": issuer}}
    asks: dict[str, Any] = {"workers": 2, "redis": "redis://r", "operator": "operator.yaml"}
    asks |= {"guardrail": {"url": "http://127.0.0.1:9/check"}}
    asks |= {"tracing": {"endpoint": f"{UNIT['url']}/v1/traces"}, "otlp_metrics": f"{UNIT['url']}/v1/metrics"}
    return {setting: asks.get(setting, True)}


def test_the_core_imports_and_what_asks_for_the_extra_gets_one_line(taken: tuple[str, Path]) -> None:
    name, tree = taken
    done = run(tree, "-c", f"SKIPPED = ('cellgate.__main__',)\n{IMPORT_ALL}")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 150
    assert check(tree)[0] == 0
    for setting in EXTRAS[name].settings:
        code, lines = check(tree, **asks_for(setting, tree))
        assert code == 2
        [line] = lines
        assert f"needs the extra {name}, and this gate is without it" in line
    for command in EXTRAS[name].commands:
        done = run(tree, "-m", "cellgate", command)
        assert done.returncode == 2
        [line] = done.stderr.splitlines()
        assert line.startswith(f"cellgate: there is no command '{command}'")
        assert f"without the extra {name}" in line


def test_a_gate_starts_without_it_and_says_so_to_a_client(taken: tuple[str, Path], tmp_path: Path) -> None:
    name, tree = taken
    with GateProcess(tmp_path, {"a": UNIT["url"]}, tree=tree) as started:
        assert set(started.units()) == {"a"}
        assert started.admin("GET", "/roll")[0] == (404 if name == "operator" else 409)
        for path, method in EXTRAS[name].routes.items():
            assert started.admin(method, path)[0] == 404
        client = started.connect()
        wants = {"Connection": "Upgrade", "Upgrade": "websocket"}
        client.request("GET", "/v1/realtime?model=m", headers=wants)
        reply = client.getresponse()
        told = json.loads(reply.read())["error"]["message"]
        assert reply.status == 501
        assert ("needs the extra realtime" in told) is (name == "realtime")
