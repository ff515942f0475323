"""A gate whose units are discovered, as a process: what it shows of that, and what no stream notices."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtests.kit.fake_kubernetes import FakeKubernetes, group_pod, pod
from loadtests.kit.processes import free_port
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


async def test_a_pod_that_is_not_ready_gets_no_new_request_and_ends_what_it_has(tmp_path: Path) -> None:
    api, port = await FakeKubernetes().start(), free_port()
    ips = {"a": "127.0.0.2", "b": "127.0.0.3"}
    two = await asyncio.to_thread(
        SimUnit.start_all, [*ips], [*ips.values()], followers=0, step_ms=4, port=port
    )
    for name, ip in ips.items():
        await api.put(pod(name, labels={"app": "vllm"}, annotations={}, uid=name, ip=ip))
    where = {"selector": "app=vllm", "port": port, "kubeconfig": api.kubeconfig(tmp_path)}
    try:
        with GateProcess(tmp_path, {}, cells=[{"name": "c", "discover": {"from": "pods", **where}}]) as gate:
            await asyncio.to_thread(gate.until_up, "a", "b")
            two[0].hold()
            streams = [await asyncio.to_thread(Stream, gate, tokens=20) for _ in range(4)]
            assert {stream.unit for stream in streams} == {"a", "b"}
            await api.ready("a", ready=False)
            assert await asyncio.to_thread(eventually, lambda: list(gate.units()) == ["b"])
            later = [await asyncio.to_thread(Stream, gate, tokens=2) for _ in range(6)]
            assert {stream.unit for stream in later} == {"b"}
            two[0].release()
            assert all([await asyncio.to_thread(stream.is_whole) for stream in (*streams, *later)])
            await api.ready("a")
            await asyncio.to_thread(gate.until_up, "a", "b")
            # Where nobody is ready, canaries decide.
            await api.ready("a", ready=False)
            assert await asyncio.to_thread(eventually, lambda: list(gate.units()) == ["b"])
            await api.ready("b", ready=False)
            assert await asyncio.to_thread(eventually, lambda: len(gate.units()) == 2)
            assert (await asyncio.to_thread(Stream, gate, tokens=2)).is_whole()
    finally:
        for unit in two:
            unit.stop()
        await api.stop()


async def test_groups_that_are_not_right_are_shown_with_the_reason_and_stay_when_the_cluster_is_lost(
    tmp_path: Path,
) -> None:
    api = await FakeKubernetes().start()
    two_leaders = [group_pod("big", 0, 0, size=2, uid=str(n), ip=f"127.0.0.{n}") for n in (8, 9)]
    two_leaders[1]["metadata"]["name"] = "big-0-1"
    alone = group_pod("big", 1, 0, size=2, uid="alone", ip="127.0.0.7")
    for each in (*two_leaders, alone):
        await api.put(each)
    where = {"name": "big", "namespace": "prod", "kubeconfig": api.kubeconfig(tmp_path)}
    cell = {"name": "c", "discover": {"from": "lws", "port": 9, **where}}
    try:
        await asyncio.to_thread(_look, api, cell, tmp_path, asyncio.get_running_loop())
    finally:
        await api.stop()


def _look(api: FakeKubernetes, cell: dict[str, Any], folder: Path, loop: asyncio.AbstractEventLoop) -> None:
    with GateProcess(folder, {}, cells=[cell]) as gate:
        assert eventually(lambda: len(gate.units()) == 2), gate.log
        for _ in range(2):
            told = {name: (unit["verdict"], unit["reason"]) for name, unit in gate.units().items()}
            assert [verdict for verdict, _ in told.values()] == ["down", "down"]
            assert "2 leaders: big-0, big-0-1" in told["big-0"][1]
            assert "1 pod, its size is 2 (missing: 1)" in told["big-1"][1]
            asyncio.run_coroutine_threadsafe(api.stop(), loop).result()
            assert eventually(lambda: not is_up(gate, "lws prod/big"))
        assert eventually(lambda: "its last 2 units are kept" in gate.log)
