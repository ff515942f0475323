"""Follows Amazon ECS: the running tasks that have the same value of a tag are one unit.

1. The tags are those in orchestrators.py. Tasks without `cellgate:unit` are ignored.
2. ECS is polled, because it has no watch. A stopping task leaves the list of running ones at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any

from cellgate.extras.clusters.groups import Group, Member, NodePorts, together
from cellgate.extras.orchestrators import (
    ROLE_TAG,
    SERVES_TAG,
    SIZE_TAG,
    UNIT_TAG,
    AwsError,
    connect,
    running_tasks,
    tags_of,
)
from cellgate.proxy.config.sources import EcsSource
from cellgate.proxy.discovery.base import Found, SourceError, named

_RANKS = {"leader": 0, "follower": None}


async def follow(source: EcsSource) -> AsyncGenerator[Found, None]:
    """The units at each poll."""
    ports = NodePorts(source.port, source.agent_port, source.scheme)
    try:
        client = await asyncio.to_thread(connect, source.region)
        while True:
            tasks = await asyncio.to_thread(running_tasks, client, source.cluster, source.services)
            yield together([group.found(source.like, ports) for group in groups(tasks)])
            await asyncio.sleep(source.period_s)
    except AwsError as error:
        raise SourceError(str(error)) from None


def groups(tasks: Iterable[Mapping[str, Any]]) -> list[Group]:
    """The groups that these tasks make, by name. `tasks` are as the API describes them."""
    members: dict[str, list[Member]] = {}
    for task in tasks:
        tags = tags_of(task)
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
        serves=tags.get(SERVES_TAG, ""),
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
