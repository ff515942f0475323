"""Units from Amazon ECS: the running tasks that have the same value of a tag are one.

1. Tags of each task, from its service or its definition: `cellgate:unit` (the unit's name), `cellgate:role`
   (leader or follower), `cellgate:size` (how many tasks make the unit). Tasks without the first are ignored.
2. ECS is polled, because it has no watch. A stopping task leaves the list of running ones at once.
3. The client is boto3, which blocks: it runs in a thread, and reads credentials and the region as boto3 does.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cellgate.proxy.config.sources import EcsSource
from cellgate.proxy.discovery.base import Found, SourceError, named
from cellgate.proxy.discovery.groups import Group, Member, NodePorts, together

UNIT_TAG, ROLE_TAG, SIZE_TAG = "cellgate:unit", "cellgate:role", "cellgate:size"
DESCRIBED_AT_ONCE = 100
"""The API's limit (DescribeTasks)."""

_RANKS = {"leader": 0, "follower": None}


async def follow(source: EcsSource) -> AsyncGenerator[Found, None]:
    """The units at each poll."""
    client = await asyncio.to_thread(_client, source.region)
    ports = NodePorts(source.port, source.agent_port, source.scheme)
    while True:
        tasks = await asyncio.to_thread(_tasks, source, client)
        yield together([group.found(source.like, ports) for group in groups(tasks)])
        await asyncio.sleep(source.period_s)


def _client(region: str) -> Any:
    boto3: Any = importlib.import_module("boto3")
    config: Any = importlib.import_module("botocore.config")
    limits = config.Config(connect_timeout=3, read_timeout=5, retries={"total_max_attempts": 2})
    with _losses():
        return boto3.session.Session(region_name=region or None).client("ecs", config=limits)


def _tasks(source: EcsSource, client: Any) -> list[Mapping[str, Any]]:
    """The running tasks, with their tags."""
    tasks: list[Mapping[str, Any]] = []
    with _losses():
        arns = sorted(_arns(source, client))
        for first in range(0, len(arns), DESCRIBED_AT_ONCE):
            some = arns[first : first + DESCRIBED_AT_ONCE]
            page = client.describe_tasks(cluster=source.cluster, tasks=some, include=["TAGS"])
            tasks += page["tasks"]
    return tasks


def _arns(source: EcsSource, client: Any) -> Iterator[str]:
    pages = client.get_paginator("list_tasks")
    for service in source.services or (None,):
        only = {"serviceName": service} if service is not None else {}
        for page in pages.paginate(cluster=source.cluster, desiredStatus="RUNNING", **only):
            yield from page["taskArns"]


@contextmanager
def _losses() -> Iterator[None]:
    """Turns what boto3 raises into SourceError."""
    errors: Any = importlib.import_module("botocore.exceptions")
    try:
        yield
    except (errors.BotoCoreError, errors.ClientError) as error:
        raise SourceError(f"ECS cannot be reached: {' '.join(str(error).split())}") from None


def groups(tasks: Iterable[Mapping[str, Any]]) -> list[Group]:
    """The groups that these tasks make, by name. `tasks` are as the API describes them."""
    members: dict[str, list[Member]] = {}
    for task in tasks:
        tags = {tag["key"]: tag.get("value", "") for tag in task.get("tags", ())}
        if name := tags.get(UNIT_TAG):
            members.setdefault(name, []).append(member(task, tags))
    return [Group(named(name), "task", tuple(members[name])) for name in sorted(members)]


def member(task: Mapping[str, Any], tags: Mapping[str, str]) -> Member:
    """What a task is in its unit."""
    arn, size = task["taskArn"], tags.get(SIZE_TAG, "")
    trouble, fatal = _trouble(task, tags)
    return Member(
        name=named(f"{tags.get(ROLE_TAG, 'task')}-{arn.rpartition('/')[2][:8]}"),
        incarnation=arn,
        rank=_RANKS.get(tags.get(ROLE_TAG, "")),
        size=int(size) if size.isascii() and size.isdigit() else None,
        address=_address(task),
        trouble=trouble,
        fatal=fatal,
    )


def _trouble(task: Mapping[str, Any], tags: Mapping[str, str]) -> tuple[str, bool]:
    """The fault of a task, and whether it is certain."""
    if tags.get(ROLE_TAG) not in _RANKS:
        return f"its tag {ROLE_TAG} is neither leader nor follower", True
    if task.get("desiredStatus") == "STOPPED" or task.get("lastStatus") != "RUNNING":
        why = f" ({task['stoppedReason']})" if task.get("stoppedReason") else ""
        return f"its task is {str(task.get('lastStatus', 'unknown')).lower()}{why}", True
    if task.get("healthStatus") == "UNHEALTHY":
        return "the health check of its container fails", False
    return "", False


def _address(task: Mapping[str, Any]) -> str:
    """The private address of a task's own network interface (network mode awsvpc); empty without one."""
    for attachment in task.get("attachments", ()):
        for detail in attachment.get("details", ()):
            if detail.get("name") == "privateIPv4Address":
                return str(detail["value"])
    for container in task.get("containers", ()):
        for interface in container.get("networkInterfaces", ()):
            if interface.get("privateIpv4Address"):
                return str(interface["privateIpv4Address"])
    return ""
