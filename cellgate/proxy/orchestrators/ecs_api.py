"""Amazon ECS: the running tasks of a cluster with their tags.

Tags of each task, from its service or its definition: `cellgate:unit` (the unit's name), `cellgate:role`
(leader or follower), `cellgate:size` (how many tasks make the unit), `cellgate:serves` (prefill, decode or
both; optional).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

# Amazon's APIs: a client of boto3, and what is wrong in one line.
#
# boto3 blocks, so it runs in a thread. It reads credentials, and the region where none is given, as it always
# does.


class Service(NamedTuple):
    """One API: what people call it, what boto3 does, and what policies do."""

    spoken: str
    name: str
    policy: str


ECS = Service("ECS", "ecs", "ecs")
ELB = Service("the load balancer's API", "elbv2", "elasticloadbalancing")
_DENIED = ("AccessDeniedException", "AccessDenied")


class AwsError(Exception):
    """A call failed; its text is one line."""


def client(service: Service, region: str) -> Any:
    """A client. Raises AwsError."""
    boto3: Any = importlib.import_module("boto3")
    config: Any = importlib.import_module("botocore.config")
    limits = config.Config(connect_timeout=3, read_timeout=5, retries={"total_max_attempts": 2})
    with told_plainly(service):
        return boto3.session.Session(region_name=region or None).client(service.name, config=limits)


@contextmanager
def told_plainly(service: Service) -> Iterator[None]:
    """Turns what boto3 raises into AwsError; what was denied is named as policies name it."""
    errors: Any = importlib.import_module("botocore.exceptions")
    try:
        yield
    except errors.ClientError as error:
        text = " ".join(str(error).split())
        if error.response.get("Error", {}).get("Code") in _DENIED:
            action = f"{service.policy}:{error.operation_name}"
            raise AwsError(f"the gate's role lacks a right: allow {action} ({text})") from None
        raise AwsError(f"{service.spoken} refuses: {text}") from None
    except errors.BotoCoreError as error:
        raise AwsError(f"{service.spoken} cannot be reached: {' '.join(str(error).split())}") from None


UNIT_TAG, ROLE_TAG, SIZE_TAG = "cellgate:unit", "cellgate:role", "cellgate:size"
SERVES_TAG = "cellgate:serves"
DESCRIBED_AT_ONCE = 100
"""The API's limit (DescribeTasks)."""

Task = Mapping[str, Any]
"""A task as DescribeTasks has it."""


def connect(region: str) -> Any:
    """A client of boto3. Raises AwsError."""
    return client(ECS, region)


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
    return told_plainly(ECS)
