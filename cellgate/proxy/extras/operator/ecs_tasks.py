"""Acts on a unit in Amazon ECS: its tasks are stopped, or their services are deployed again.

The tasks of a unit are those with the tag `cellgate:unit`. A refused one spares no other: a unit is all of
its tasks or nothing. boto3 blocks, so everything runs in one thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from cellgate.proxy.config.action_settings import ReplaceTasks
from cellgate.proxy.extras.operator.plan import Incident, RecoveryReport, RecoveryResult
from cellgate.proxy.observe.text import one_line
from cellgate.proxy.orchestrators.ecs_api import (
    UNIT_TAG,
    AwsError,
    Task,
    connect,
    in_one_line,
    running_tasks,
    tags_of,
)

TASKS_MAX = 256
"""More tasks of one unit are a mistake."""
REASON_MAX = 255
"""The API's limit (StopTask)."""


async def replace_tasks(action: ReplaceTasks, about: Incident) -> RecoveryReport:
    """Act on the unit that `about` is about. Its caller bounds how long it takes."""
    return await asyncio.to_thread(_run, action, about)


def _run(action: ReplaceTasks, about: Incident) -> RecoveryReport:
    unit = about["unit"]
    try:
        client = connect(action.region)
        tasks = [
            task
            for task in running_tasks(client, action.cluster, action.services)
            if tags_of(task).get(UNIT_TAG) == unit
        ]
        if not 0 < len(tasks) <= TASKS_MAX:
            what = f"{len(tasks)} tasks with the tag {UNIT_TAG}={unit} in cluster {action.cluster}"
            raise AwsError(f"{what}, expected 1 to {TASKS_MAX}")
        if not action.deploy:
            reason = f"cellgate {about['id']}: {one_line(about['reason'])}"[:REASON_MAX]
            return _each("stopped", "tasks", tasks, lambda task: _stop(client, action, task, reason))
        services = services_of(tasks)
        return _each("deployed", "services", services, lambda service: _deploy(client, action, *service))
    except AwsError as error:
        return RecoveryReport(RecoveryResult.REFUSED, f"{error}; nothing was done")


def _stop(client: Any, action: ReplaceTasks, task: Task, reason: str) -> str:
    arn = str(task["taskArn"])
    with in_one_line():
        client.stop_task(cluster=action.cluster, task=arn, reason=reason)
    return arn


def _deploy(client: Any, action: ReplaceTasks, service: str, family: str) -> str:
    with in_one_line():
        client.update_service(
            cluster=action.cluster, service=service, taskDefinition=family, forceNewDeployment=True
        )
    return service


def _each(done: str, noun: str, things: Iterable[Any], act: Callable[[Any], str]) -> RecoveryReport:
    """Act on all; what is refused is reported."""
    well, refused, count = list[str](), list[str](), 0
    for thing in things:
        count += 1
        try:
            well.append(act(thing))
        except AwsError as error:
            refused.append(str(error))
    detail = "; ".join([f"{done} {len(well)} of {count} {noun}", *refused[:1]])
    output = "\n".join([*well, *refused])
    if not well:
        return RecoveryReport(RecoveryResult.REFUSED, detail, output)
    return RecoveryReport(RecoveryResult.FAILED if refused else RecoveryResult.OK, detail, output)


def services_of(tasks: Iterable[Task]) -> list[tuple[str, str]]:
    """The services of tasks, each with the family of its task definition; without a revision, a family means
    the newest one. Raises AwsError for a task that belongs to no service.
    """
    found = set[tuple[str, str]]()
    for task in tasks:
        kind, _, service = str(task.get("group", "")).partition(":")
        if kind != "service":
            raise AwsError(f"task {task['taskArn']} belongs to no service")
        found.add((service, str(task["taskDefinitionArn"]).rpartition("/")[2].rpartition(":")[0]))
    return sorted(found)
