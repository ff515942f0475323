"""Configuration files written by tests, read as the gate reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import ConfigError, Overrides
from cellgate.proxy.config.settings import Settings
from cellgate.router.nouns import Fleet

ROOT = Path(__file__).parents[3]
GIVEN = Settings(fleet=Fleet())
NOBODY: Mapping[str, str] = {}
"""An environment without secrets."""
UNIT = "{name: a1, url: 'http://10.0.0.1:8000'}"
CELLS = f"cells: [{{name: a, units: [{UNIT}]}}]\n"
FULL = """
listen: 0.0.0.0:80
admin: "[::1]:9000"
policy: p2c
access_log: console
cells:
  - name: a
    weight: 2
    units:
      - name: a1
        url: HTTP://Node-1:8000/
        weight: 0.5
        max_in_flight: 64
        models: [llama]
        engine: triton
        canary: generate
        metrics_url: http://X:2/metrics?a=b
        nodes:
          - {name: a1-0, role: leader, agent: "[::1]:9902"}
          - {name: a1-1, role: follower}
  - name: b
    units: []
rules: {canary_idle_s: 3, attempts: 4}
limits: {body_bytes: 1MiB, bodies_bytes: 2000000}
timeouts: {connect_s: 0.5, drain_delay_s: 0}
pass_unlisted: true
known_answer: {every_s: 0}
continue_across_builds: true
"""


def read(tmp_path: Path, text: str | bytes, environ: Mapping[str, str] = NOBODY, **flags: Any) -> Settings:
    path = tmp_path / "gate.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(str(path), Overrides(**flags), environ)


def problems(
    tmp_path: Path, text: str | bytes, environ: Mapping[str, str] = NOBODY, **flags: Any
) -> list[str]:
    """Without the lines' numbers and the units' names: each problem of a place in a file has its line."""
    return [without_line(line) for line in lines(tmp_path, text, environ, **flags)]


def without_line(line: str) -> str:
    """A problem without its line's number and its unit's name, where it has a place."""
    return re.sub(r"^(\S*\.yaml):\d+(: \S+)( of unit [^ :]+)?(?<!:)(?=: )", r"\1\2", line)


def lines(tmp_path: Path, text: str | bytes, environ: Mapping[str, str] = NOBODY, **flags: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, environ, **flags)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return [line.removeprefix(f"{tmp_path}/") for line in caught.value.problems]


def same(line: str, expected: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, expected.split("…"))), line) is not None


def probes_of(tmp_path: Path, *probes: str) -> tuple[object, ...]:
    """The probes of the one node of the one unit, each given as the inside of a YAML mapping."""
    node = f"{{name: n, role: leader, probes: [{', '.join(f'{{{probe}}}' for probe in probes)}]}}"
    unit = f"{{name: a, url: 'http://x', nodes: [{node}]}}"
    return read(tmp_path, f"cells: [{{name: a, units: [{unit}]}}]").fleet.units[0].nodes[0].probes
