"""Units as a file has them: their keys and nodes and probes, and the Unit that they make.

The same in the configuration and in files that units are discovered from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING
from importlib.util import find_spec
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, create_model

from cellgate.probes import NODE_PROBES
from cellgate.probes.node import NodeProbe
from cellgate.proxy.config import probing, values
from cellgate.proxy.config.sources import KV_EVENTS_PACKAGES
from cellgate.proxy.config.values import MisfitError
from cellgate.router.nouns import KvEvents, Node, Role, Unit
from cellgate.router.split_nouns import ServingRole

T = TypeVar("T")

_NODE = Node(name="", role=Role.LEADER)
_UNIT = Unit(name="", cell="", url="")


class Keys(BaseModel):
    """A mapping of the file: these keys, and no other."""

    model_config = ConfigDict(extra="forbid", strict=True)


def section(noun: Callable[..., T], keys: type[Keys], fits: Callable[[Any], None] | None = None) -> Any:
    """The check that reads a mapping into its settings dataclass; `fits` looks at keys that go together."""

    def read(found: object) -> T:
        section = keys.model_validate(found)
        if fits is not None:
            fits(section)
        return noun(**dict(section))

    return PlainValidator(read)


class ProbeKeys(Keys):
    """One probe of a node: its kind, and the fields of that kind as keys."""

    probe: Annotated[str, PlainValidator(probing.probe)]
    url: Annotated[str | None, PlainValidator(values.page)] = None
    address: Annotated[str | None, PlainValidator(values.target)] = None
    expect: Annotated[tuple[int, ...] | None, PlainValidator(probing.statuses)] = None
    service: Annotated[str | None, PlainValidator(probing.service)] = None
    rule: Annotated[str | None, PlainValidator(probing.rule)] = None
    preset: Annotated[str | None, PlainValidator(probing.preset)] = None
    period_s: Annotated[float | None, PlainValidator(values.seconds)] = None
    timeout_s: Annotated[float | None, PlainValidator(values.seconds)] = None


def _node_probe(found: object) -> NodeProbe:
    keys = ProbeKeys.model_validate(found)
    kind = NODE_PROBES[keys.probe]
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    given = {key: value for key, value in keys if key in keys.model_fields_set and key != "probe"}
    if strange := [key for key in given if key not in fields]:
        raise ValueError(
            f"probe: {keys.probe} does not take {', '.join(strange)}; it takes {', '.join(fields)}"
        )
    if missing := [name for name, default in fields.items() if default is MISSING and name not in given]:
        raise ValueError(f"probe: {keys.probe} requires {' and '.join(missing)}")
    if "rule" in fields and ("rule" in given) == ("preset" in given):
        raise MisfitError("either rule or preset", found="both" if "rule" in given else "neither")
    return kind(**given)


def _each_of_its_own(probes: list[NodeProbe]) -> list[NodeProbe]:
    """Who said that a node is bad is known by its name, and has to take it back itself."""
    names = [probe.name for probe in probes]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ValueError(f"duplicate probe {twice!r}")
    return probes


def _one_leader(nodes: list[NodeKeys]) -> list[NodeKeys]:
    leaders = sum(node.role is Role.LEADER for node in nodes)
    if leaders != 1:
        raise MisfitError("exactly one node with role: leader", found=str(leaders))
    return nodes


class NodeKeys(Keys):
    """One node of a unit."""

    name: Annotated[str, PlainValidator(values.name)]
    role: Annotated[Role, PlainValidator(values.role)]
    agent: Annotated[str, PlainValidator(values.target)] = _NODE.agent
    probes: Annotated[
        list[Annotated[NodeProbe, PlainValidator(_node_probe)]], AfterValidator(_each_of_its_own)
    ] = []
    place: Annotated[tuple[str, ...], PlainValidator(values.place)] = _NODE.place


# `from` is no name in Python.
_kv_fields: dict[str, Any] = {
    "from": (Annotated[str, PlainValidator(values.kv_source)], ...),
    "endpoint": (Annotated[str, PlainValidator(values.zmq_endpoint)], ""),
    "replay_endpoint": (Annotated[str, PlainValidator(values.zmq_endpoint)], ""),
    "ranks": (Annotated[int, PlainValidator(values.count)], 1),
}
KvEventsKeys = create_model("KvEventsKeys", __base__=Keys, **_kv_fields)
"""Where a unit publishes its KV events."""


def _kv_events(found: object) -> KvEvents:
    given = dict(KvEventsKeys.model_validate(found))
    if not given["endpoint"] and (given["replay_endpoint"] or given["ranks"] > 1):
        raise ValueError("replay_endpoint and ranks require endpoint: without it the engine is asked for all")
    if missing := [package for package in KV_EVENTS_PACKAGES if find_spec(package) is None]:
        raise ValueError(f"{' and '.join(missing)} not installed: pip install 'cellgate[kv-events]'")
    return KvEvents(source=given.pop("from"), **given)


class UnitKeys(Keys):
    """One unit of a cell. No `nodes` means one leader with the unit's name; `api_key_file` is read here."""

    name: Annotated[str, PlainValidator(values.name)]
    url: Annotated[str, PlainValidator(values.url)]
    weight: Annotated[float, PlainValidator(values.weight)] = _UNIT.weight
    max_in_flight: Annotated[int, PlainValidator(values.count)] = _UNIT.max_in_flight
    models: Annotated[tuple[str, ...], PlainValidator(values.models)] = _UNIT.models
    engine: Annotated[str, PlainValidator(probing.engine)] = _UNIT.engine
    canary: Annotated[str, PlainValidator(probing.canary)] = _UNIT.canary
    metrics_url: Annotated[str, PlainValidator(values.page)] = _UNIT.metrics_url
    prefill_tokens_s: Annotated[float, PlainValidator(values.rate)] = _UNIT.prefill_tokens_s
    kv_tokens: Annotated[int, PlainValidator(values.count_or_0)] = _UNIT.kv_tokens
    kv_events: Annotated[KvEvents | None, PlainValidator(_kv_events)] = _UNIT.kv_events
    role: Annotated[ServingRole, PlainValidator(values.serving_role)] = _UNIT.role
    bootstrap_port: Annotated[int, PlainValidator(values.port)] = _UNIT.bootstrap_port
    api_key_file: Annotated[str | None, PlainValidator(values.token_in_file)] = Field(None, repr=False)
    nodes: Annotated[list[NodeKeys], AfterValidator(_one_leader)] = []


def unit_of(cell: str, unit: UnitKeys, api_key: str) -> Unit:
    """The unit that these keys make; `api_key` is what probes send where the unit has none of its own."""
    nodes = tuple(
        Node(node.name, node.role, node.agent, tuple(node.probes), node.place) for node in unit.nodes
    )
    return Unit(
        unit.name,
        cell,
        unit.url,
        unit.models,
        unit.weight,
        unit.max_in_flight,
        nodes or (Node(unit.name, Role.LEADER),),
        engine=unit.engine,
        canary=unit.canary,
        metrics_url=unit.metrics_url,
        api_key=unit.api_key_file or api_key,
        prefill_tokens_s=unit.prefill_tokens_s,
        kv_tokens=unit.kv_tokens,
        kv_events=unit.kv_events,
        role=unit.role,
        bootstrap_port=unit.bootstrap_port,
    )
