"""Pods of a unit are replaced by the official client. The API server answers as a real one does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cellgate.proxy.config.action_settings import ReplacePods
from cellgate.proxy.extras.operator import kubernetes
from cellgate.proxy.extras.operator.plan import RecoveryReport, RecoveryResult
from cellgate.proxy.orchestrators import ApiError, ask, connected
from loadtests.kit.fake_kubernetes import FakeKubernetes, group_pod, pod
from tests.sockets.test_recovery_deeds import ABOUT

RULES = Path(__file__).parents[2] / "deploy" / "recovery" / "kubernetes-rbac.yaml"
UNIT = {**ABOUT, "unit": "big-1"}

Replace = Callable[..., Awaitable[RecoveryReport]]


def cluster(folder: Path, scenario: Callable[[FakeKubernetes, Replace], Awaitable[None]]) -> None:
    """Two groups of two pods and a set, and a way to replace those of a unit."""

    async def main() -> None:
        api = await FakeKubernetes().start()
        try:
            for number, rank in ((0, 0), (0, 1), (1, 1), (1, 0)):
                ip = f"127.0.{number}.{rank + 1}"
                made = group_pod("big", number, rank, size=2, uid=f"{number}/{rank}", ip=ip)
                made["spec"]["nodeName"] = f"node-{rank}"
                await api.put(made)
                api.objects.put("nodes", "", {"metadata": {"name": f"node-{rank}"}, "spec": {}})
            kind = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet"}
            api.objects.put("leaderworkersets", "prod", {**kind, "metadata": {"name": "big"}})

            def replace(about: Any = UNIT, **keys: Any) -> Awaitable[RecoveryReport]:
                action = ReplacePods("prod", kubeconfig=api.kubeconfig(folder), **keys)
                return kubernetes.replace_pods(action, about)

            await scenario(api, replace)
        finally:
            await api.stop()

    asyncio.run(main())


def going(api: FakeKubernetes) -> list[str]:
    return sorted(one["metadata"]["name"] for one in api.pods() if "deletionTimestamp" in one["metadata"])


def rights_used(api: FakeKubernetes) -> set[tuple[str, str, str]]:
    """What the API server was asked for: verb, group, resource."""
    return {(what.verb, what.group, what.resource) for what in api.asked}


def rights_given(rules: Path) -> set[tuple[str, str, str]]:
    """What the roles in a file allow."""
    return {
        (verb, group, resource)
        for role in yaml.safe_load_all(rules.read_text())
        for rule in role.get("rules", ())
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_a_group_is_evicted_as_a_whole_and_the_cluster_is_told_why(tmp_path: Path) -> None:
    async def scenario(api: FakeKubernetes, replace: Replace) -> None:
        report = await replace()
        assert (report.result, report.detail) == (RecoveryResult.OK, "evicted 2 of 2 pods")
        assert report.output == "gone: big-1 big-1-1"
        assert going(api) == ["big-1", "big-1-1"]
        (event,) = api.objects.all("events")
        regarding = event["involvedObject"]
        assert (regarding["kind"], regarding["uid"]) == ("LeaderWorkerSet", "uid-big")
        assert event["message"] == (
            "unit big-1 was DOWN since 2026-01-01T00:00:00.000Z: gone\\x0afor good; attempt 2, a1-0123"
        )
        (leader,) = (one for one in api.pods() if one["metadata"]["name"] == "big-1")
        assert leader["metadata"]["annotations"]["cellgate.io/verdict"].startswith("DOWN since 2026")

    cluster(tmp_path, scenario)


def test_pods_may_be_chosen_by_their_labels_and_deleted(tmp_path: Path) -> None:
    async def scenario(api: FakeKubernetes, replace: Replace) -> None:
        for name, unit in (("x-1", "llama"), ("x-2", "llama"), ("x-3", "qwen")):
            labels = {"app": "x", "unit": unit}
            await api.put(pod(name, labels=labels, annotations={}, uid=name, ip="127.0.0.9"))
        report = await replace({**UNIT, "unit": "llama"}, selector="app=x,unit={unit}", evict=False)
        assert (report.result, report.detail) == (RecoveryResult.OK, "deleted 2 of 2 pods")
        assert going(api) == ["x-1", "x-2"]
        assert api.objects.all("events")[0]["involvedObject"]["name"] == "x-1"

    cluster(tmp_path, scenario)


def test_a_cordoned_node_is_said_and_keeps_nothing_from_being_done(tmp_path: Path) -> None:
    async def scenario(api: FakeKubernetes, replace: Replace) -> None:
        api.objects.put("nodes", "", {"metadata": {"name": "node-1"}, "spec": {"unschedulable": True}})
        report = await replace()
        assert report.result is RecoveryResult.OK
        assert "node node-1 is cordoned, so its pod is placed elsewhere if there is room" in report.detail

    cluster(tmp_path, scenario)


@pytest.mark.parametrize("right", [("create", "pods/eviction"), ("list", "pods")])
def test_a_right_that_is_missing_is_named_and_nothing_is_done(tmp_path: Path, right: tuple[str, str]) -> None:
    async def scenario(api: FakeKubernetes, replace: Replace) -> None:
        api.lacks = {right}
        report = await replace()
        assert report.result is RecoveryResult.REFUSED
        rule = f'{{apiGroups: [""], resources: [{right[1]}], verbs: [{right[0]}]}}'
        assert f"lacks a right in namespace prod: add the rule {rule} to its role" in report.detail
        assert going(api) == []

    cluster(tmp_path, scenario)


def test_rights_to_tell_things_are_not_needed_to_do_them(tmp_path: Path) -> None:
    async def scenario(api: FakeKubernetes, replace: Replace) -> None:
        api.lacks = {("patch", "pods"), ("create", "events"), ("get", "nodes"), ("get", "leaderworkersets")}
        report = await replace()
        assert report.result is RecoveryResult.OK
        assert report.detail.count("lacks a right") == 3, "each once"
        assert going(api) == ["big-1", "big-1-1"]

    cluster(tmp_path, scenario)


def test_a_disruption_budget_is_heeded_and_quoted(tmp_path: Path) -> None:
    async def scenario(api: FakeKubernetes, replace: Replace) -> None:
        api.disruptions = 0
        report = await replace()
        assert report.result is RecoveryResult.REFUSED
        assert "The disruption budget big needs 2 healthy pods and has 2 currently" in report.detail
        api.disruptions = 1
        report = await replace()
        assert (report.result, going(api)) == (RecoveryResult.FAILED, ["big-1"])
        assert report.detail.startswith("evicted 1 of 2 pods; big-1-1: the API server refuses: 429 Cannot")

    cluster(tmp_path, scenario)


@pytest.mark.parametrize(
    ("unit", "said"),
    [
        ("big-7", "0 pods with leaderworkerset.sigs.k8s.io/name=big,"),
        ("llama", "unit llama is not named SET-INDEX: give a selector"),
    ],
)
def test_a_unit_without_pods_is_refused(tmp_path: Path, unit: str, said: str) -> None:
    async def scenario(api: FakeKubernetes, replace: Replace) -> None:
        report = await replace({**UNIT, "unit": unit})
        assert report.result is RecoveryResult.REFUSED
        assert report.detail.startswith(said)
        assert report.detail.endswith("nothing was done")

    cluster(tmp_path, scenario)


def test_a_pod_that_was_made_anew_meanwhile_is_left_alone(tmp_path: Path) -> None:
    async def scenario(api: FakeKubernetes, replace: Replace) -> None:
        listed = next(one for one in api.pods() if one["metadata"]["name"] == "big-1")
        await api.put({**listed, "metadata": {**listed["metadata"], "uid": "again"}})
        action = ReplacePods("prod", kubeconfig=api.kubeconfig(tmp_path))
        async with connected(action.kubeconfig) as connection:
            with pytest.raises(ApiError, match="409 Precondition failed"):
                await ask(connection, kubernetes.going(action, "prod", listed))
        assert going(api) == []

    cluster(tmp_path, scenario)


def test_an_api_server_that_is_gone_is_said(tmp_path: Path) -> None:
    async def scenario(api: FakeKubernetes, replace: Replace) -> None:
        await api.stop()
        report = await replace()
        assert report.result is RecoveryResult.REFUSED
        assert report.detail.startswith("the API server cannot be reached: ")

    cluster(tmp_path, scenario)


def test_the_rights_in_deploy_are_exactly_those_that_are_used(tmp_path: Path) -> None:
    async def scenario(api: FakeKubernetes, replace: Replace) -> None:
        await replace()
        await replace({**UNIT, "unit": "big-0"}, evict=False)
        assert rights_used(api) == rights_given(RULES)

    cluster(tmp_path, scenario)
