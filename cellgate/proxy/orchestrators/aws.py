"""Amazon's APIs: a client of boto3, and what is wrong in one line.

boto3 blocks, so it runs in a thread. It reads credentials, and the region where none is given, as it always
does.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


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
