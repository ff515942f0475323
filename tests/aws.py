"""What tests of AWS share: credentials that open nothing, a load balancer with weights, a cluster of ECS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import boto3  # type: ignore[import-untyped]
import pytest
from moto import mock_aws
from moto.moto_api import state_manager

REGION = "eu-west-1"


def pretend_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let boto3 sign requests, with keys that no AWS account knows."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


class Balancer(NamedTuple):
    """An Application Load Balancer with two target groups of weight 100, in a rule and in its listener's
    default action.
    """

    api: Any
    own: str
    other: str
    listener: str
    rule: str

    def weights(self, *, default: bool = False) -> list[int]:
        """Of this gate's group, and of the other."""
        if default:
            [found] = self.api.describe_listeners(ListenerArns=[self.listener])["Listeners"]
        else:
            [found] = self.api.describe_rules(RuleArns=[self.rule])["Rules"]
        [action] = found["DefaultActions" if default else "Actions"]
        groups = {each["TargetGroupArn"]: each["Weight"] for each in action["ForwardConfig"]["TargetGroups"]}
        return [groups[self.own], groups[self.other]]


def make_balancer() -> Balancer:
    """A new one, at the API that boto3 asks now."""
    ec2 = boto3.client("ec2", region_name=REGION)
    subnets = [each["SubnetId"] for each in ec2.describe_subnets()["Subnets"]][:2]
    vpc = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    api = boto3.client("elbv2", region_name=REGION)
    arn = api.create_load_balancer(Name="lb", Subnets=subnets)["LoadBalancers"][0]["LoadBalancerArn"]
    made = [
        api.create_target_group(Name=name, Protocol="HTTP", Port=8000, VpcId=vpc)["TargetGroups"][0]
        for name in ("own", "other")
    ]
    own, other = (group["TargetGroupArn"] for group in made)
    groups = [{"TargetGroupArn": group, "Weight": 100} for group in (own, other)]
    actions = [{"Type": "forward", "ForwardConfig": {"TargetGroups": groups}}]
    listener = api.create_listener(LoadBalancerArn=arn, Protocol="HTTP", Port=80, DefaultActions=actions)
    listener_arn = listener["Listeners"][0]["ListenerArn"]
    path = [{"Field": "path-pattern", "Values": ["/v1/*"]}]
    rule = api.create_rule(ListenerArn=listener_arn, Conditions=path, Priority=1, Actions=actions)
    return Balancer(api, own, other, listener_arn, rule["Rules"][0]["RuleArn"])


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
