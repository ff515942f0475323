"""A gate whose units are discovered, as a process: what it shows of that, and what no stream notices."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtests.simunit.process import SimUnit
from tests.wire.process import GateProcess, Stream, eventually, metrics


@pytest.fixture(scope="module")
def units() -> Iterator[dict[str, SimUnit]]:
    started = SimUnit.start_all(["a", "b"], followers=0, step_ms=4)
    yield {unit.name: unit for unit in started}
    for unit in started:
        unit.stop()


def write(path: Path, *units: SimUnit) -> None:
    rows = [{"name": unit.name, "url": unit.url} for unit in units]
    path.write_text(yaml.safe_dump({"units": rows}))


def discovered(path: Path, **cell: Any) -> list[dict[str, Any]]:
    return [{"name": "c", "discover": {"from": "file", "path": str(path)}, **cell}]


def is_up(gate: GateProcess, title: str) -> bool:
    (line,) = (line for line in metrics(gate).splitlines() if line.startswith("cellgate_discovery_up{"))
    assert f'source="{title}"' in line
    return line.endswith(" 1.0")


def test_units_come_and_go_with_a_file_and_with_a_reload_and_no_stream_notices(
    units: dict[str, SimUnit], tmp_path: Path
) -> None:
    path = tmp_path / "units.yaml"
    write(path, units["a"])
    with GateProcess(tmp_path, {}, cells=discovered(path)) as gate:
        gate.until_up("a")
        assert is_up(gate, f"file {path}")
        units["a"].hold()
        stream = Stream(gate, tokens=20)
        assert stream.unit == "a"
        write(path, units["b"])
        gate.until_up("b")
        units["a"].release()
        assert stream.is_whole()
        # A broken file leaves the units, and is told once.
        path.write_text("units: [")
        assert eventually(lambda: not is_up(gate, f"file {path}"))
        gate.until_up("b")
        write(path, units["a"], units["b"])
        gate.until_up("a", "b")
        assert is_up(gate, f"file {path}")
        assert gate.log.count("a source of units failed") == 1
        # What happens is written by a thread of its own, a little later.
        assert eventually(lambda: gate.log.count("a source of units works again") == 1)
        # What is configured goes together with what is discovered.
        write(path, units["a"])
        gate.until_up("a")
        row = {"name": "b", "url": units["b"].url}
        keys = {"cells": discovered(path, units=[row])}
        (tmp_path / "cellgate.yaml").write_text(yaml.safe_dump(keys))
        gate.signal(signal.SIGHUP)
        gate.until_up("b", "a")
        write(path)
        gate.until_up("b")
