"""Units of groups: what pods make, and tasks of ECS, whose API is moto's."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest
from botocore.stub import Stubber  # type: ignore[import-untyped]

from cellgate.extras import orchestrators
from cellgate.extras.clusters import ecs
from cellgate.extras.clusters.groups import Group, Member, NodePorts, together
from cellgate.extras.clusters.lws import groups, member
from cellgate.proxy.config.sources import EcsSource
from cellgate.proxy.discovery.base import Found, SourceError
from cellgate.router.nouns import Unit
from loadtests.kit.fake_kubernetes import Json, group_pod
from tests.aws import REGION, cluster, pretend_credentials, start

__all__ = ["cluster"]


# What pods and tasks make: a unit in any case, usable or with what is wrong with it.

LIKE_PODS = Unit(name="", cell="c", url="", max_in_flight=7)
PORTS = NodePorts(8000, 9902)
LEADER = Member("x-0", "uid-0", 0, 2, "key", "10.0.0.1")
FOLLOWER = Member("x-0-1", "uid-1", 1, 2, "key", "10.0.0.2")
BOTH = (LEADER, FOLLOWER)
BEFORE = "2 groups have this name: the previous one still exists"


def found(*members: Member) -> Found:
    return Group("x-0", "pod", members, numbered=True).found(LIKE_PODS, PORTS)


def test_a_whole_group_is_a_unit_of_its_leader_and_its_followers() -> None:
    whole = found(FOLLOWER, LEADER)
    (unit,) = whole.units
    assert (unit.name, unit.url, unit.max_in_flight) == ("x-0", "http://10.0.0.1:8000", 7)
    assert [(node.name, node.role.value, node.agent) for node in unit.nodes] == [
        ("x-0", "leader", "10.0.0.1:9902"),
        ("x-0-1", "follower", "10.0.0.2:9902"),
    ]
    assert not whole.suspicions
    (unit,) = found(replace(LEADER, address="fd00::1"), FOLLOWER).units
    assert (unit.url, unit.nodes[0].agent) == ("http://[fd00::1]:8000", "[fd00::1]:9902")


@pytest.mark.parametrize(
    ("members", "wrong", "host"),
    [
        ([LEADER], "1 pod, its size is 2 (missing: 1)", "10.0.0.1"),
        ([FOLLOWER], "1 pod, its size is 2; no leader among its pods", ""),
        ([LEADER, replace(FOLLOWER, rank=0)], "2 leaders: x-0, x-0-1", "10.0.0.1"),
        ([LEADER, FOLLOWER, replace(FOLLOWER, name="x-0-2")], "3 pods, its size is 2", "10.0.0.1"),
        ([LEADER, replace(FOLLOWER, size=3)], "its pods do not agree on its size: 2 or 3", "10.0.0.1"),
        ([replace(one, size=None) for one in BOTH], "its pods do not state its size", "10.0.0.1"),
        ([replace(LEADER, address=""), FOLLOWER], "its leader x-0 has no address", ""),
        ([LEADER, replace(FOLLOWER, key="before")], BEFORE, "10.0.0.1"),
    ],
)
def test_a_group_that_is_not_right_is_a_unit_that_says_why(
    members: list[Member], wrong: str, host: str
) -> None:
    told = found(*members)
    fatal = {suspicion.node: suspicion.reason for suspicion in told.suspicions if suspicion.fatal}
    assert fatal == {"group": wrong}
    assert [unit.url for unit in told.units] == [host and f"http://{host}:8000"]
    assert told.epochs == ()


def test_a_group_made_anew_is_another_incarnation_even_under_its_old_key() -> None:
    (first, same, again, other) = (
        found(*members).epochs[0][1]
        for members in (
            (LEADER, FOLLOWER),
            (FOLLOWER, LEADER),
            (LEADER, replace(FOLLOWER, incarnation="again")),
            [replace(one, key="other") for one in BOTH],
        )
    )
    assert same == first != again
    assert other.partition("-")[0] == "other"


# Pods.


def running(rank: int = 0, **status: Any) -> Json:
    return group_pod("big", 3, rank, size=2, uid=f"uid-{rank}", ip=f"10.0.0.{rank}") | status


def test_a_pod_tells_its_place_by_labels_its_size_and_its_engine_by_annotation() -> None:
    one = member(pod := running(1), {})
    assert (one.name, one.rank, one.size, one.address) == ("big-3-1", 1, 2, "10.0.0.1")
    assert one.trouble == ""
    pod["metadata"]["annotations"]["leaderworkerset.sigs.k8s.io/size"] = "two"
    assert member(pod, {}).size is None
    pod = running()
    pod["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"] = "vllm"
    pod["status"] |= container("vllm", terminated="OOMKilled")
    assert member(pod, {}).fatal


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/9 nodes"}
UNREADY = {"type": "Ready", "status": "False", "reason": "ContainersNotReady"}


def container(name: str, **state: str) -> Json:
    """The status of a pod, one of whose containers is in this state."""
    states = {kind: {"reason": reason} for kind, reason in state.items()}
    return {"containerStatuses": [{"name": name, "state": states}]}


@pytest.mark.parametrize(
    ("status", "trouble", "fatal"),
    [
        ({"phase": "Pending"}, "its pod is pending", True),
        (
            {"phase": "Pending", "conditions": [UNSCHEDULABLE]},
            "its pod is pending (Unschedulable: 0/9 nodes)",
            True,
        ),
        ({"phase": "Failed", "reason": "Evicted"}, "its pod has ended: Failed (Evicted)", True),
        (
            container("engine", waiting="CrashLoopBackOff"),
            "container engine does not run: CrashLoopBackOff",
            True,
        ),
        (container("logs", terminated="Error"), "container logs does not run: Error", False),
        ({"conditions": [UNREADY]}, "its pod is not ready (ContainersNotReady)", False),
        ({"conditions": []}, "its pod is not ready", False),
    ],
)
def test_what_keeps_a_pod_from_working_is_told(status: Json, trouble: str, fatal: bool) -> None:
    """That it is on its way out before all else."""
    pod = running()
    pod["status"] |= status
    one = member(pod, {})
    assert (one.trouble, one.fatal) == (trouble, fatal)
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert (member(pod, {}).trouble, member(pod, {}).fatal) == ("its pod is being deleted", True)


def test_groups_come_in_the_order_of_their_index_and_what_they_tell_is_told_as_one() -> None:
    pods = [group_pod("big", number, 0, size=1, uid=str(number), ip="10.0.0.1") for number in (10, 2, 0)]
    assert [group.name for group in groups("big", pods, {})] == ["big-0", "big-2", "big-10"]
    pod = running()
    pod["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/group-index"] = "5f2c9e01aa00" * 3
    (group,) = groups("big", [pod], {})
    assert group.name == "big-5f2c9e01"
    one, other = found(LEADER, FOLLOWER), Group("y-0", "pod", (LEADER,)).found(LIKE_PODS, PORTS)
    both = together([one, other])
    assert [unit.name for unit in both.units] == ["x-0", "y-0"]
    assert [suspicion.unit for suspicion in both.suspicions] == ["y-0"]
    assert [unit for unit, _ in both.epochs] == ["x-0"]


SOURCE = EcsSource(LIKE_PODS, "prod", 8000, region=REGION, agent_port=9902, period_s=0.01)


def tasks_found(source: EcsSource = SOURCE) -> Found:
    async def main() -> Found:
        async with asyncio.timeout(30.0), aclosing(ecs.follow(source)) as follow:
            return await anext(follow)

    return asyncio.run(main())


def against(found: Found) -> dict[str, str]:
    return {suspicion.unit: suspicion.reason for suspicion in found.suspicions}


def test_leader_and_followers_of_one_tag_are_one_unit(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pages they fill; one that stops leaves a unit that says what is missing."""
    monkeypatch.setattr(orchestrators, "DESCRIBED_AT_ONCE", 2)
    start(cluster, "big-0", "leader", 3)
    follower, _ = (start(cluster, "big-0", "follower", 3) for _ in range(2))
    start(cluster, "", "leader", 1)
    start(cluster, "unit-1", "leader", 1)
    whole = tasks_found()
    unit, other = whole.units
    assert (unit.name, unit.cell, unit.max_in_flight, other.name) == ("big-0", "c", 7, "unit-1")
    assert [node.role.value for node in unit.nodes] == ["leader", "follower", "follower"]
    host = unit.url.removeprefix("http://").removesuffix(":8000")
    assert host.count(".") == 3
    assert unit.nodes[0].agent == f"{host}:9902"
    assert len({node.agent for node in unit.nodes}) == 3
    assert (whole.suspicions, len(whole.epochs)) == ((), 2)
    cluster.stop_task(cluster="prod", task=follower, reason="deployment")
    assert against(tasks_found()) == {"big-0": "2 tasks, its size is 3"}
    start(cluster, "big-0", "follower", 3)
    again = tasks_found()
    assert against(again) == {}
    assert again.epochs != whole.epochs


def test_only_the_tasks_of_the_services_named_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_credentials(monkeypatch)
    client = boto3.client("ecs", region_name=REGION)
    with Stubber(client) as stub:
        for service, tasks in (("big", ["one"]), ("small", ["two"])):
            asked = {"cluster": "prod", "serviceName": service, "desiredStatus": "RUNNING"}
            stub.add_response("list_tasks", {"taskArns": tasks}, asked)
        assert list(orchestrators._arns(client, "prod", ("big", "small"))) == ["one", "two"]


def test_a_cluster_that_is_not_there_and_no_region_are_a_loss_that_says_so(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SourceError, match=r"ECS refuses: .*ClusterNotFound"):
        tasks_found(EcsSource(LIKE_PODS, "none", 8000, region=REGION))
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    with pytest.raises(SourceError, match="ECS cannot be reached: You must specify a region"):
        tasks_found(EcsSource(LIKE_PODS, "prod", 8000))


# Tasks as the API describes them, in states that moto does not know.


def task(role: str = "leader", size: str = "1", **status: Any) -> dict[str, Any]:
    tags = {"cellgate:unit": "u", "cellgate:role": role, "cellgate:size": size}
    return {
        "taskArn": "arn:aws:ecs:eu-west-1:1:task/prod/0123456789abcdef",
        "lastStatus": "RUNNING",
        "desiredStatus": "RUNNING",
        "tags": [{"key": key, "value": value} for key, value in tags.items()],
        "containers": [{"networkInterfaces": [{"privateIpv4Address": "10.0.0.1"}]}],
    } | status


STOPPING = {"desiredStatus": "STOPPED", "lastStatus": "DEACTIVATING", "stoppedReason": "Scaling"}


@pytest.mark.parametrize(
    ("described", "reason", "fatal"),
    [
        (task(lastStatus="PROVISIONING"), "its task is provisioning", True),
        (task(**STOPPING), "its task is deactivating (Scaling)", True),
        (task(healthStatus="UNHEALTHY"), "the health check of its container fails", False),
        (task(role="boss"), "its tag cellgate:role is neither leader nor follower", True),
        (task(size="two"), "", False),
    ],
)
def test_what_keeps_a_task_from_working_is_told(described: dict[str, Any], reason: str, fatal: bool) -> None:
    (group,) = ecs.groups([described])
    (one,) = group.members
    assert (one.trouble, one.fatal, one.address) == (reason, fatal, "10.0.0.1")
    reasons = [suspicion.reason for suspicion in group.found(LIKE_PODS, NodePorts(8000)).suspicions]
    assert (reason or "its tasks do not state its size") in reasons
