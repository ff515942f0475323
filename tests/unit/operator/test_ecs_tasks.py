"""Units in Amazon ECS are acted on. The API is moto's, asked by boto3 as the real one is.

moto starts no tasks for services: tasks are started by themselves, and what services are asked is compared.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError  # type: ignore[import-untyped]

from cellgate.proxy import orchestrators
from cellgate.proxy.config.action_settings import ReplaceTasks
from cellgate.proxy.extras.operator import actions
from cellgate.proxy.extras.operator.plan import RecoveryReport, RecoveryResult
from tests.unit.discovery.test_ecs import cluster, start

DEPLOY = Path(__file__).parents[3] / "deploy"
__all__ = ["cluster"]
ACTION = ReplaceTasks("prod", region="eu-west-1")
DEPLOYMENT = ReplaceTasks("prod", region="eu-west-1", deploy=True)
ABOUT = {"unit": "big-0", "id": "big-0-7", "reason": "gone\n" * 200}


def act(action: ReplaceTasks = ACTION, **about: Any) -> RecoveryReport:
    return asyncio.run(actions.replace_tasks(action, {**ABOUT, **about}))


def described(cluster: Any, *arns: str) -> list[tuple[str, str]]:
    tasks = cluster.describe_tasks(cluster="prod", tasks=list(arns))["tasks"]
    return [(task["lastStatus"], task.get("stoppedReason", "")[:22]) for task in tasks]


def test_all_tasks_of_the_unit_are_stopped_and_no_others(cluster: Any) -> None:
    arns = [start(cluster, "big-0", "leader", 2), start(cluster, "big-0", "follower", 2)]
    other = start(cluster, "big-1", "leader", 1)
    report = act()
    assert (report.result, report.detail) == (RecoveryResult.OK, "stopped 2 of 2 tasks")
    assert sorted(report.output.splitlines()) == sorted(arns)
    assert described(cluster, *arns) == [("STOPPED", "cellgate big-0-7: gone")] * 2
    assert described(cluster, other)[0][0] != "STOPPED"


def test_a_unit_without_tasks_is_refused(cluster: Any) -> None:
    report = act()
    assert report.result is RecoveryResult.REFUSED
    assert report.detail == (
        "0 tasks with the tag cellgate:unit=big-0 in cluster prod, expected 1 to 256; nothing was done"
    )


class Refusing:
    """A client of which some calls are denied, after `granted` of them."""

    def __init__(self, client: Any, operation: str, granted: int = 0) -> None:
        self._client, self._operation, self._granted = client, operation, granted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def stop_task(self, **asked: Any) -> Any:
        if self._granted:
            self._granted -= 1
            return self._client.stop_task(**asked)
        code = {"Code": "AccessDeniedException", "Message": "User: gate is not authorized"}
        raise ClientError({"Error": code}, self._operation)


@pytest.mark.parametrize(
    ("granted", "result", "begin"),
    [
        (0, RecoveryResult.REFUSED, "stopped 0 of 2 tasks; "),
        (1, RecoveryResult.FAILED, "stopped 1 of 2 tasks; "),
    ],
)
def test_a_right_that_is_missing_is_named(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, granted: int, result: RecoveryResult, begin: str
) -> None:
    for role in ("leader", "follower"):
        start(cluster, "big-0", role, 2)
    monkeypatch.setattr(actions, "connect", lambda _: Refusing(cluster, "StopTask", granted))
    report = act()
    assert report.result is result
    assert report.detail.startswith(f"{begin}the gate's role lacks a right: allow ecs:StopTask (")


def service_task(service: str, definition: str) -> dict[str, Any]:
    arn = f"arn:aws:ecs:eu-west-1:1:task-definition/{definition}"
    tags = [{"key": "cellgate:unit", "value": "big-0"}]
    return {"taskArn": "arn", "group": f"service:{service}", "taskDefinitionArn": arn, "tags": tags}


def test_the_services_of_a_unit_get_the_newest_revision(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [
        service_task("lead", "engine:1"),
        service_task("follow", "engine:1"),
        service_task("follow", "engine:1"),
    ]
    for name in ("lead", "follow"):
        cluster.create_service(cluster="prod", serviceName=name, taskDefinition="engine:1", desiredCount=1)
    monkeypatch.setattr(actions, "running_tasks", lambda *_: tasks)
    asked: list[dict[str, Any]] = []
    real = orchestrators.connect("eu-west-1")
    real.meta.events.register(
        "provide-client-params.ecs.UpdateService", lambda params, **_: asked.append(params)
    )
    monkeypatch.setattr(actions, "connect", lambda _: real)
    report = act(DEPLOYMENT)
    assert (report.result, report.detail) == (RecoveryResult.OK, "deployed 2 of 2 services")
    common = {"cluster": "prod", "taskDefinition": "engine", "forceNewDeployment": True}
    assert asked == [{"service": "follow"} | common, {"service": "lead"} | common]


def test_a_task_of_no_service_cannot_be_deployed(cluster: Any) -> None:
    start(cluster, "big-0", "leader", 1)
    report = act(DEPLOYMENT)
    assert report.result is RecoveryResult.REFUSED
    assert "belongs to no service; nothing was done" in report.detail


def test_the_rights_in_deploy_are_exactly_those_that_are_used(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[str] = set()
    real = orchestrators.connect("eu-west-1")
    real.meta.events.register("before-call.ecs", lambda model, **_: used.add(f"ecs:{model.name}"))
    monkeypatch.setattr(actions, "connect", lambda _: real)
    start(cluster, "big-0", "leader", 1)
    act()
    assert used == allowed("recovery/ecs-recovery-role.json")
    monkeypatch.setattr(actions, "running_tasks", lambda *_: [service_task("lead", "engine:1")])
    cluster.create_service(cluster="prod", serviceName="lead", taskDefinition="engine:1", desiredCount=1)
    used.clear()
    act(DEPLOYMENT)
    assert used | {"ecs:ListTasks", "ecs:DescribeTasks", "iam:PassRole"} == allowed(
        "recovery/ecs-roll-role.json"
    )


def allowed(name: str) -> set[str]:
    policy = json.loads((DEPLOY / name).read_text())
    return {action for statement in policy["Statement"] for action in statement["Action"]}
