"""Two gates discover units in a cluster, agree by Leases, and one replaces the pods of a unit that hangs."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from loadtests.kit.fake_kubernetes import Json
from loadtests.kit.lws_cluster import LWS, NAMESPACE, LwsCluster
from tests.wire.process import GateProcess, eventually

EVICTION = ("create", "pods/eviction")


@asynccontextmanager
async def controlled() -> AsyncIterator[LwsCluster]:
    """Two groups, and a controller that makes a group again once all of its pods are told to go."""
    async with LwsCluster(2, grace_s=0.0, step_ms=4) as cluster:
        controller = asyncio.create_task(_control(cluster))
        try:
            yield cluster
        finally:
            controller.cancel()


async def _control(cluster: LwsCluster) -> None:
    while True:
        for group in cluster.groups:
            if all(
                is_going(pod) for pod in cluster.api.pods() if pod["metadata"]["name"].startswith(group.name)
            ):
                await cluster.end(group)
                await cluster.start(group)
        await asyncio.sleep(0.05)


def is_going(pod: Json) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def in_cluster(folder: Path, look: Callable[[LwsCluster, list[GateProcess]], None]) -> None:
    """Two gates that both recover, each in a folder of its own."""

    def gates(cluster: LwsCluster, kubeconfig: str) -> None:
        where = {"namespace": NAMESPACE, "kubeconfig": kubeconfig}
        with ExitStack() as stack:
            found = []
            for name in ("g1", "g2"):
                (folder / name).mkdir()
                recovery: dict[str, object] = {
                    "cell": "c",
                    "kubernetes": where,
                    "after_s": 0.5,
                    "backoff_s": 2.0,
                }
                recovery["audit"] = str(folder / name / "audit")
                cell = {"name": "c", "discover": cluster.discover(kubeconfig)}
                operator = {"recovery": [recovery], "leases": where}
                gate = GateProcess(folder / name, {}, cells=[cell], operator=operator)
                found.append(stack.enter_context(gate))
            for gate in found:
                gate.until_up("big-0", "big-1")
            look(cluster, found)

    async def main() -> None:
        async with controlled() as cluster:
            await asyncio.to_thread(gates, cluster, cluster.api.kubeconfig(folder))

    asyncio.run(main())


def hang(cluster: LwsCluster, number: int) -> None:
    unit = cluster.groups[number].unit
    assert unit is not None
    unit.signal_follower(signal.SIGSTOP)


def results(folder: Path) -> list[str]:
    lines = [line for name in ("g1", "g2") for line in _lines(folder / name / "audit")]
    return [entry["result"] for entry in map(json.loads, lines) if entry["step"] == "end"]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_a_hung_unit_is_replaced_by_one_of_the_gates_once_it_may_evict_and_comes_back(tmp_path: Path) -> None:
    def look(cluster: LwsCluster, gates: list[GateProcess]) -> None:
        cluster.api.lacks = {EVICTION}
        hang(cluster, 0)
        assert eventually(lambda: "refused" in results(tmp_path)), [gate.log for gate in gates]
        rule = '{apiGroups: [""], resources: [pods/eviction], verbs: [create]}'
        assert eventually(lambda: any(rule in gate.log for gate in gates))
        assert all(answer(gate) == 200 for gate in gates), "by the other unit"
        cluster.api.lacks = set()
        assert eventually(lambda: "ok" in results(tmp_path)), [gate.log for gate in gates]
        for gate in gates:
            gate.until_up("big-0", "big-1")
        assert results(tmp_path).count("ok") == 1, "once, by one of them"
        (event,) = cluster.api.objects.all("events")
        assert event["involvedObject"]["name"] in (LWS, "big-0")
        assert cluster.groups[0].generation == 2
        assert cluster.groups[1].generation == 1
        (lease,) = cluster.api.objects.all("leases")
        assert lease["metadata"]["name"] == "cellgate-c"

    in_cluster(tmp_path, look)


def answer(gate: GateProcess) -> int:
    connection = gate.connect()
    body: dict[str, Any] = {"model": "sim", "prompt": "Once", "max_tokens": 2}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    status = connection.getresponse().status
    connection.close()
    return status
