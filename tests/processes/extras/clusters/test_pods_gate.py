"""A gate whose units are pods, as a process: what it shows of them, and what no stream notices."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from loadtests.kit.fake_kubernetes import FakeKubernetes, group_pod, pod
from loadtests.kit.processes import free_port
from loadtests.simunit.process import SimUnit
from tests.processes.test_discovery_gate import is_up
from tests.wire.process import GateProcess, Stream, eventually


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
