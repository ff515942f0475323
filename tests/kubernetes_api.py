"""What tests of Kubernetes share: an API server, and which rights were used there and are given."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from loadtests.kit.fake_kubernetes import FakeKubernetes


@asynccontextmanager
async def kubernetes_api(**options: Any) -> AsyncIterator[FakeKubernetes]:
    """An API server."""
    api = await FakeKubernetes(**options).start()
    try:
        yield api
    finally:
        await api.stop()


def rights_used(api: FakeKubernetes) -> set[tuple[str, str, str]]:
    """What the API server was asked for: verb, group, resource."""
    return {(what.verb, what.group, what.resource) for what in api.asked}


def rights_given(rules: Path) -> set[tuple[str, str, str]]:
    """What the roles in a file allow."""
    return {
        (verb, group, resource)
        for role in yaml.safe_load_all(rules.read_text())
        for rule in role.get("rules", ())
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
