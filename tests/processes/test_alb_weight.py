"""A real gate and a load balancer's API: moto's, as a server that boto3 asks over HTTP."""

from __future__ import annotations

from functools import partial

import boto3  # type: ignore[import-untyped]
import pytest
from moto.server import ThreadedMotoServer

from loadtests.kit.gate import GateProcess
from loadtests.kit.waiting import wait_until
from loadtests.simunit.process import sim_units

REGION = "eu-west-1"
PATIENCE_S = 40.0


def test_a_cell_that_loses_units_loses_weight_and_gets_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        _play()
    finally:
        server.stop()


def _play() -> None:
    ec2 = boto3.client("ec2", region_name=REGION)
    subnets = [each["SubnetId"] for each in ec2.describe_subnets()["Subnets"]][:2]
    vpc = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    api = boto3.client("elbv2", region_name=REGION)
    balancer = api.create_load_balancer(Name="lb", Subnets=subnets)["LoadBalancers"][0]["LoadBalancerArn"]
    groups = [
        api.create_target_group(Name=name, Protocol="HTTP", Port=8000, VpcId=vpc)["TargetGroups"][0]
        for name in ("own", "other")
    ]
    arns = [group["TargetGroupArn"] for group in groups]
    weights = [{"TargetGroupArn": arn, "Weight": 100} for arn in arns]
    actions = [{"Type": "forward", "ForwardConfig": {"TargetGroups": weights}}]
    made = api.create_listener(LoadBalancerArn=balancer, Protocol="HTTP", Port=80, DefaultActions=actions)
    listener = made["Listeners"][0]["ListenerArn"]

    def has(weight: int) -> bool:
        [found] = api.describe_listeners(ListenerArns=[listener])["Listeners"]
        [action] = found["DefaultActions"]
        now = {each["TargetGroupArn"]: each["Weight"] for each in action["ForwardConfig"]["TargetGroups"]}
        return now == {arns[0]: weight, arns[1]: 100}

    alb = {"rule": listener, "target_group": arns[0], "region": REGION}
    settings = {"alb": alb, "rules": {"slow_start_s": 1}}
    with sim_units(["a1", "a2"], followers=1) as units, GateProcess(units, settings=settings) as gate:
        for weight, unit in ((50, units[0]), (0, units[1])):
            unit.kill()
            assert wait_until(partial(has, weight), PATIENCE_S, 0.5), gate.metrics()
        for unit in units:
            unit.restart()
        assert wait_until(lambda: has(100), PATIENCE_S, 0.5), gate.metrics()
        assert "cellgate_alb_weight 100.0" in gate.metrics()
        kinds = [event["kind"] for event in gate.events()]
        assert kinds.count("alb_weight") >= 3
