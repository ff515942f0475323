"""Units from ECS: tasks of one tag are one unit. The API is moto's, asked by boto3 as the real one is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest
from botocore.stub import Stubber  # type: ignore[import-untyped]
from moto import mock_aws
from moto.moto_api import state_manager

from cellgate.proxy import orchestrators
from cellgate.proxy.config.settings import EcsSource
from cellgate.proxy.discovery import ecs
from cellgate.proxy.discovery.base import Found, NodePorts, SourceError
from cellgate.proxy.discovery.ecs import groups
from cellgate.router.nouns import Unit
from tests.aws import REGION, pretend_credentials

LIKE = Unit(name="", cell="c", url="", max_in_flight=7)
SOURCE = EcsSource(LIKE, "prod", 8000, region=REGION, agent_port=9902, period_s=0.01)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster with a network to run tasks in, and the client to do it with."""
    pretend_credentials(monkeypatch)
    with mock_aws():
        # Its tasks would otherwise stop after having been looked at once.
        state_manager.set_transition("ecs::task", {"progression": "manual", "times": 100})
        client = boto3.client("ecs", region_name=REGION)
        client.create_cluster(clusterName="prod")
        client.register_task_definition(
            family="engine",
            networkMode="awsvpc",
            containerDefinitions=[{"name": "engine", "image": "engine", "memory": 4, "cpu": 1}],
            requiresCompatibilities=["FARGATE"],
            cpu="256",
            memory="512",
        )
        yield client


def start(client: Any, unit: str, role: str, size: int) -> str:
    ec2 = boto3.client("ec2", region_name=REGION)
    subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    tags = {"cellgate:unit": unit, "cellgate:role": role, "cellgate:size": str(size)}
    task = client.run_task(
        cluster="prod",
        taskDefinition="engine",
        launchType="FARGATE",
        networkConfiguration={"awsvpcConfiguration": {"subnets": [subnet], "securityGroups": []}},
        tags=[{"key": key, "value": value} for key, value in tags.items() if value],
    )["tasks"][0]
    return str(task["taskArn"])


def found(source: EcsSource = SOURCE) -> Found:
    async def main() -> Found:
        async with asyncio.timeout(30.0), aclosing(ecs.follow_ecs(source)) as follow:
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
    whole = found()
    unit, other = whole.units
    assert (unit.name, unit.cell, unit.max_in_flight, other.name) == ("big-0", "c", 7, "unit-1")
    assert [node.role.value for node in unit.nodes] == ["leader", "follower", "follower"]
    host = unit.url.removeprefix("http://").removesuffix(":8000")
    assert host.count(".") == 3
    assert unit.nodes[0].agent == f"{host}:9902"
    assert len({node.agent for node in unit.nodes}) == 3
    assert (whole.suspicions, len(whole.epochs)) == ((), 2)
    cluster.stop_task(cluster="prod", task=follower, reason="deployment")
    assert against(found()) == {"big-0": "2 tasks, its size is 3"}
    start(cluster, "big-0", "follower", 3)
    again = found()
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
        found(EcsSource(LIKE, "none", 8000, region=REGION))
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    with pytest.raises(SourceError, match="ECS cannot be reached: You must specify a region"):
        found(EcsSource(LIKE, "prod", 8000))


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
    (group,) = groups([described])
    (one,) = group.members
    assert (one.trouble, one.fatal, one.address) == (reason, fatal, "10.0.0.1")
    reasons = [suspicion.reason for suspicion in group.found(LIKE, NodePorts(8000)).suspicions]
    assert (reason or "its tasks do not state its size") in reasons
