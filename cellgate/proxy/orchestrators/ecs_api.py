"""Amazon ECS: the running tasks of a cluster with their tags.

Tags of each task, from its service or its definition: `cellgate:unit` (the unit's name), `cellgate:role`
(leader or follower), `cellgate:size` (how many tasks make the unit), `cellgate:serves` (prefill, decode or
both; optional).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from cellgate.proxy.orchestrators import aws

UNIT_TAG, ROLE_TAG, SIZE_TAG = "cellgate:unit", "cellgate:role", "cellgate:size"
SERVES_TAG = "cellgate:serves"
DESCRIBED_AT_ONCE = 100
"""The API's limit (DescribeTasks)."""

Task = Mapping[str, Any]
"""A task as DescribeTasks has it."""


def connect(region: str) -> Any:
    """A client of boto3. Raises AwsError."""
    return aws.client(aws.ECS, region)


def running_tasks(client: Any, cluster: str, services: Sequence[str]) -> list[Task]:
    """The running tasks of these services (of all, without any). Raises AwsError."""
    tasks: list[Task] = []
    with in_one_line():
        arns = sorted(_arns(client, cluster, services))
        for first in range(0, len(arns), DESCRIBED_AT_ONCE):
            some = arns[first : first + DESCRIBED_AT_ONCE]
            tasks += client.describe_tasks(cluster=cluster, tasks=some, include=["TAGS"])["tasks"]
    return tasks


def tags_of(task: Task) -> dict[str, str]:
    """The tags of a task."""
    return {tag["key"]: tag.get("value", "") for tag in task.get("tags", ())}


def _arns(client: Any, cluster: str, services: Sequence[str]) -> Iterator[str]:
    pages = client.get_paginator("list_tasks")
    for service in services or (None,):
        only = {"serviceName": service} if service is not None else {}
        for page in pages.paginate(cluster=cluster, desiredStatus="RUNNING", **only):
            yield from page["taskArns"]


def in_one_line() -> AbstractContextManager[None]:
    """Turns what boto3 raises into AwsError."""
    return aws.told_plainly(aws.ECS)
