"""Every key of the configuration is documented with its default."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic_core import PydanticUndefined

from cellgate.proxy.config.actions import OPERATOR_SCHEMA
from cellgate.proxy.config.schema import SAID_ELSEWHERE, SCHEMA
from cellgate.proxy.config.settings import KIB, MIB
from tests.unit.config.files import ROOT

IN_WORDS = {
    "access_log": "`json`, on a terminal `console`",
    "advertise": "where it listens",
    "cells[].discover.host": "required with `dns`",
    "cells[].discover.server": "the system's",
    "cells[].discover.path": "required with `file`",
    "cells[].discover.name": "required with `lws`",
    "cells[].discover.namespace": "the gate's own, else `default`",
    "cells[].discover.kubeconfig": "the account of the gate's pod, else the user's file",
    "cells[].discover.cluster": "required with `ecs`",
    "cells[].discover.services": "all",
    "cells[].discover.region": "as boto3 finds it",
    "cells[].discover.port": "required with `lws`, `ecs`, `A` and `AAAA`",
    "cells[].discover.agent_port": "no agents",
    "recovery[].kubernetes.namespace": "the gate's own, else `default`",
    "recovery[].kubernetes.selector": "the group of a LeaderWorkerSet",
    "recovery[].kubernetes.kubeconfig": "the account of the gate's pod, else the user's file",
    "recovery[].ecs.services": "all",
    "recovery[].ecs.region": "as boto3 finds it",
    "roll.kubernetes.namespace": "the gate's own, else `default`",
    "roll.kubernetes.container": "the engine's",
    "roll.kubernetes.kubeconfig": "the account of the gate's pod, else the user's file",
    "alb.region": "as boto3 finds it",
    "leases.namespace": "the gate's own, else `default`",
    "leases.kubeconfig": "the account of the gate's pod, else the user's file",
    "roll.ecs.services": "all",
    "roll.ecs.region": "as boto3 finds it",
    "cells[].units[].engine": "detected",
    "cells[].units[].canary": "detected",
    "cells[].units[].metrics_url": "the engine's usual place",
    "cells[].units[].kv_events": "the unit is asked, if the packages are installed",
    "cells[].units[].kv_events.endpoint": "what the engine tells",
    "cells[].units[].nodes[].agent": "none",
    "cells[].units[].nodes[].probes": "none",
    "cells[].units[].nodes[].probes[].url": "required with `http` and `exporter`",
    "cells[].units[].nodes[].probes[].address": "required with `tcp` and `grpc`",
    "cells[].units[].nodes[].probes[].service": "the server as a whole",
    "cells[].units[].models": "asked of the unit",
    "cells[].units[].nodes": "one leader with the unit's name",
    "limits.bodies_bytes": "a quarter of memory",
    "models": "`none`",
    "fallback": "`none`",
}


def said(key: str, default: object) -> str:
    """A default as the documentation has it."""
    if key in IN_WORDS:
        return IN_WORDS[key]
    match default:
        case _ if default is PydanticUndefined:
            return "required"
        case None | "" | ():
            return "`none`"
        case bool():
            return f"`{str(default).lower()}`"
        case int() if key.endswith("_bytes"):
            return f"`{default // MIB}MiB`" if default % MIB == 0 else f"`{default // KIB}KiB`"
        case float():
            return f"`{default:g}`"
    return f"`{default}`"


@pytest.mark.parametrize(("page", "schema"), [("configuration.md", SCHEMA), ("operator.md", OPERATOR_SCHEMA)])
def test_every_key_is_documented_with_its_default(page: str, schema: dict[str, Any]) -> None:
    text = (ROOT / "docs" / page).read_text()
    sections = {level.removesuffix("[]") for level in schema if "." not in level and level}
    documented = dict(re.findall(r"^### `(.+?)`\n(?:(?!#).*\n)*?Default: (.+)$", text, re.MULTILINE))
    keys = {
        f"{level}.{key}".removeprefix("."): field.default
        for level, mapping in schema.items()
        for key, field in mapping.model_fields.items()
        if level not in SAID_ELSEWHERE
    }
    assert documented == {key: said(key, default) for key, default in keys.items() if key not in sections}
    assert set(re.findall(r"^## `(.+?)`$", text, re.MULTILINE)) == sections


def test_what_is_said_elsewhere_is_the_same_there() -> None:
    for place, other in SAID_ELSEWHERE.items():
        here, there = SCHEMA[place].model_fields, SCHEMA[other].model_fields
        assert {key: repr(field) for key, field in here.items()} == {key: repr(there[key]) for key in here}
