"""Units as a file has them: their engines, keys, nodes and probes, and the Unit that they make.

The same in the configuration and in files that units are discovered from.

In this order: `Keys`, `Discover`, `model_names`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, create_model

from cellgate.extras import part_of, require
from cellgate.probes import MORE_NODE_PROBES, NODE_PROBES
from cellgate.probes.engines import CANARIES, ENGINES
from cellgate.probes.nodes import NodeProbe
from cellgate.proxy.config import checks
from cellgate.proxy.config.checks import InvalidValueError, OneOf, weight, word, words
from cellgate.proxy.config.extras import how_to_install
from cellgate.proxy.config.settings import KV_EVENTS_PACKAGES, Split
from cellgate.proxy.config.sources import CLUSTER_SOURCES, PACKAGES, SOURCES, Source
from cellgate.router.nouns import KvEvents, Node, Role, ServingRole, Unit

an_engine = OneOf("an engine", sorted(ENGINES))
a_canary = OneOf("a canary", sorted(CANARIES))
a_probe = OneOf("a probe", sorted([*NODE_PROBES, *MORE_NODE_PROBES]))
a_preset = OneOf("a preset", ("dcgm", "neuron", "node"))


def a_rule(found: object) -> str:
    """A rule on the samples of an exporter."""
    expected = 'a rule such as node_load1 > 100 or increase(errors_total{type="hardware"}) > 0'
    if not isinstance(found, str):
        raise InvalidValueError(expected)
    exporter = part_of("node_probes", "exporter")
    try:
        return str(exporter.parse(found).text)
    except exporter.RuleError as error:
        raise InvalidValueError(expected, error.hint) from None


def a_service(found: object) -> str:
    """The name of a gRPC service, as its health service knows it."""
    if isinstance(found, str) and re.fullmatch(r"[!-~]{1,256}", found):
        return found
    raise InvalidValueError("a service name, such as inference.GRPCInferenceService")


class Keys(BaseModel):
    """A mapping of the file: these keys, and no other.

    `of` is the dataclass that it becomes: its defaults are those of keys that have none here.
    """

    became: ClassVar[Any] = None
    """That dataclass."""
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    def __init_subclass__(cls, of: Any = None, **options: Any) -> None:
        super().__init_subclass__(**options)

    @classmethod
    def __pydantic_init_subclass__(cls, of: Any = None, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        cls.became = of
        for given in dataclasses.fields(of) if of is not None else ():
            key = cls.model_fields.get(given.name)
            if key is not None and key.is_required():
                if given.default_factory is not MISSING:
                    key.default_factory = given.default_factory
                elif given.default is not MISSING:
                    key.default = given.default


def all_but(keys: Keys, *names: str) -> dict[str, Any]:
    """What is said under all keys but these."""
    return {key: value for key, value in keys if key not in names}


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

    probe: Annotated[str, PlainValidator(a_probe)]
    url: Annotated[str | None, PlainValidator(checks.page)] = None
    address: Annotated[str | None, PlainValidator(checks.target)] = None
    service: Annotated[str | None, PlainValidator(a_service)] = None
    rule: Annotated[str | None, PlainValidator(a_rule)] = None
    preset: Annotated[str | None, PlainValidator(a_preset)] = None


def _node_probe(found: object) -> NodeProbe:
    keys = ProbeKeys.model_validate(found)
    kind = _kind_of_node_probe(keys.probe)
    fields = {
        field.name: field.default
        for field in dataclasses.fields(kind)
        if field.name in ProbeKeys.model_fields
    }
    given = {key: value for key, value in keys if key in keys.model_fields_set and key != "probe"}
    if strange := [key for key in given if key not in fields]:
        raise ValueError(
            f"probe: {keys.probe} does not take {', '.join(strange)}; it takes {', '.join(fields)}"
        )
    if missing := [name for name, default in fields.items() if default is MISSING and name not in given]:
        raise ValueError(f"probe: {keys.probe} requires {' and '.join(missing)}")
    if "rule" in fields and ("rule" in given) == ("preset" in given):
        raise InvalidValueError("either rule or preset", found="both" if "rule" in given else "neither")
    return kind(**given)


def _kind_of_node_probe(name: str) -> type[NodeProbe]:
    if name in NODE_PROBES:
        return NODE_PROBES[name]
    kind: type[NodeProbe] = getattr(part_of("node_probes", name), f"{name.title()}Probe")
    return kind


def _each_of_its_own(probes: list[NodeProbe]) -> list[NodeProbe]:
    """Who said that a node is bad is known by its name, and has to take it back itself."""
    names = [probe.name for probe in probes]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ValueError(f"duplicate probe {twice!r}")
    return probes


def _one_leader(nodes: list[NodeKeys]) -> list[NodeKeys]:
    leaders = sum(node.role is Role.LEADER for node in nodes)
    if leaders != 1:
        raise InvalidValueError("exactly one node with role: leader", found=str(leaders))
    return nodes


class NodeKeys(Keys, of=Node):
    """One node of a unit."""

    name: Annotated[str, PlainValidator(checks.name)]
    role: Annotated[Role, PlainValidator(checks.node_role), AfterValidator(Role)]
    agent: Annotated[str, PlainValidator(checks.target)]
    probes: Annotated[
        list[Annotated[NodeProbe, PlainValidator(_node_probe)]], AfterValidator(_each_of_its_own)
    ]
    place: Annotated[tuple[str, ...], PlainValidator(checks.place)]


# `from` is no name in Python.
_kv_fields: dict[str, Any] = {
    "from": (Annotated[str, PlainValidator(checks.kv_source)], ...),
    "endpoint": (Annotated[str, PlainValidator(checks.zmq_endpoint)], ""),
    "replay_endpoint": (Annotated[str, PlainValidator(checks.zmq_endpoint)], ""),
    "ranks": (Annotated[int, PlainValidator(checks.count)], 1),
}
KvEventsKeys = create_model("KvEventsKeys", __base__=Keys, **_kv_fields)
"""Where a unit publishes its KV events."""


def _kv_events(found: object) -> KvEvents:
    given = dict(KvEventsKeys.model_validate(found))
    if not given["endpoint"] and (given["replay_endpoint"] or given["ranks"] > 1):
        raise ValueError("replay_endpoint and ranks require endpoint: without it the engine is asked for all")
    require("kv_events")
    if missing := [package for package in KV_EVENTS_PACKAGES if find_spec(package) is None]:
        raise ValueError(f"{' and '.join(missing)} not installed: {how_to_install('kv-events')}")
    return KvEvents(source=given.pop("from"), **given)


class LikeKeys(Keys, of=Unit):
    """What all units of a source may have in common, under `unit` of it; each unit may have it as well."""

    weight: Annotated[float, PlainValidator(checks.weight)]
    max_in_flight: Annotated[int, PlainValidator(checks.count)]
    models: Annotated[tuple[str, ...], PlainValidator(checks.models)]
    engine: Annotated[str, PlainValidator(an_engine)]
    canary: Annotated[str, PlainValidator(a_canary)]
    role: Annotated[ServingRole, PlainValidator(checks.serving_role)]
    bootstrap_port: Annotated[int, PlainValidator(checks.port)]
    api_key_file: Annotated[str | None, PlainValidator(checks.token_in_file)] = Field(None, repr=False)


class UnitKeys(LikeKeys, of=Unit):
    """One unit of a cell. No `nodes` means one leader with the unit's name; `api_key_file` is read here."""

    name: Annotated[str, PlainValidator(checks.name)]
    url: Annotated[str, PlainValidator(checks.url)]
    metrics_url: Annotated[str, PlainValidator(checks.page)]
    kv_events: Annotated[KvEvents | None, PlainValidator(_kv_events)]
    nodes: Annotated[list[NodeKeys], AfterValidator(_one_leader)]


def unit_of(cell: str, unit: UnitKeys, api_key: str) -> Unit:
    """The unit that these keys make; `api_key` is what probes send where the unit has none of its own."""
    nodes = tuple(Node(**{**dict(node), "probes": tuple(node.probes)}) for node in unit.nodes)
    return Unit(
        cell=cell,
        nodes=nodes or (Node(unit.name, Role.LEADER),),
        api_key=unit.api_key_file or api_key,
        **all_but(unit, "nodes", "api_key_file"),
    )


# What the values of a configuration that are about probing have to be (see proxy/config/checks.py).


T = TypeVar("T")
_SELECTOR = re.compile(r"[\w./() !=,-]{1,1024}", re.ASCII)


# What may stand under `discover` of a cell: the name of a source, its keys, and those of all its units.


source = OneOf("a source", sorted(SOURCES))


def selector(found: object) -> str:
    """A label selector, as `kubectl -l` takes it."""
    if not isinstance(found, str) or not _SELECTOR.fullmatch(found):
        raise InvalidValueError("labels of pods, such as app=vllm,role=decode")
    return found


def _given(kind: Any) -> Any:
    return Annotated[Any, PlainValidator(kind)]


_CHECKS: dict[str, Any] = {
    "host": word("the name to resolve"),
    "record": OneOf("a record type", ("A", "AAAA", "SRV")),
    "server": checks.target,
    "path": word("a file name"),
    "name": word("the name of a LeaderWorkerSet"),
    "selector": selector,
    "pool": word("the name of an InferencePool"),
    "namespace": word("the name of a namespace"),
    "kubeconfig": checks.readable_file,
    "places": checks.flag,
    "cluster": word("the name or ARN of a cluster"),
    "services": words("a list of service names"),
    "region": word("the name of a region"),
    "port": checks.port,
    "agent_port": checks.port,
    "scheme": OneOf("a scheme", ("http", "https")),
}


def _default(key: str) -> object:
    """What the sources that have this key take for it, where they agree; only shown."""
    given = {f.default for kind in SOURCES.values() for f in dataclasses.fields(kind) if f.name == key}
    return given.pop() if len(given) == 1 and MISSING not in given else None


_fields: dict[str, Any] = {"from": (_given(source), ...)}
_fields |= {key: (_given(check), _default(key)) for key, check in _CHECKS.items()}
_fields["unit"] = (LikeKeys, None)
DiscoverKeys = create_model("DiscoverKeys", __base__=Keys, **_fields)


@dataclass(frozen=True, slots=True)
class Discover:
    """A source whose cell is not set yet."""

    kind: str
    fields: Mapping[str, object]
    like: LikeKeys

    def source(self, cell: str, api_key: str) -> Source:
        """The source of this cell; `api_key` is what probes send where the file names none."""
        common = all_but(self.like, "api_key_file")
        like = Unit(name="", cell=cell, url="", api_key=self.like.api_key_file or api_key, **common)
        return SOURCES[self.kind](like, **self.fields)  # type: ignore[arg-type]


def discovered_by(found: object) -> Discover:
    """Reads the mapping under `discover`."""
    keys = DiscoverKeys.model_validate(found)
    given = {key: value for key, value in keys if key in keys.model_fields_set}
    name, like = given.pop("from"), given.pop("unit", LikeKeys.model_validate({}))
    fields = {f.name: f.default for f in dataclasses.fields(SOURCES[name]) if f.name in _CHECKS}
    # Units of a file have all their keys there.
    known = ", ".join(fields if name == "file" else [*fields, "unit"])
    if strange := [key for key in keys.model_fields_set if key not in known.split(", ") and key != "from"]:
        raise ValueError(f"from: {name} does not take {', '.join(strange)}; it takes {known}")
    if missing := [key for key, default in fields.items() if default is MISSING and key not in given]:
        raise ValueError(f"from: {name} requires {' and '.join(missing)}")
    if name == "dns" and ("port" in given) == (given.get("record") == "SRV"):
        raise ValueError(
            "record: SRV does not take port: each record has its own"
            if "port" in given
            else "from: dns requires port, except with record: SRV"
        )
    if name == "pods" and ("selector" in given) == ("pool" in given):
        raise ValueError("from: pods requires either selector or pool")
    if name == "pods" and "selector" in given and "port" not in given:
        raise ValueError("from: pods requires port, except with pool")
    if name in CLUSTER_SOURCES:
        require("clusters")
    package, extra = PACKAGES.get(name, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        raise ValueError(f"from: {name} requires a package that is not installed: {how_to_install(extra)}")
    return Discover(name, given, like)


# Names that clients use for models: aliases, splits between versions, and what to fall back to.


_SPLIT = "the name of a model, or models with weights such as {v1: 95, v2: 5}"


def model_names(found: object) -> Mapping[str, Split]:
    """What serves each name. A name may stand for a model of the same name, and not for another name."""
    if not isinstance(found, dict) or not all(isinstance(name, str) and name for name in found):
        raise InvalidValueError("a mapping of names, each with " + _SPLIT)
    splits = {name: _split(name, value) for name, value in found.items()}
    for name, split in splits.items():
        for model, _ in split:
            if model != name and model in splits:
                raise ValueError(
                    f"{name}: {model!r} is a name of this list as well; name the models of units here"
                )
    return splits


def _split(name: str, found: object) -> Split:
    if isinstance(found, str) and found:
        return ((found, 1.0),)
    if not isinstance(found, dict) or not found or not all(isinstance(m, str) and m for m in found):
        raise ValueError(f"{name}: expected {_SPLIT}")
    try:
        return tuple((model, weight(share)) for model, share in found.items())
    except InvalidValueError as error:
        raise ValueError(f"{name}: expected {error.expected} for each model") from None


def fallbacks(found: object) -> Mapping[str, tuple[str, ...]]:
    """The models to try, in order, when no unit can serve a name."""
    if not isinstance(found, dict):
        raise InvalidValueError("a mapping of names, each with a list of names to fall back to")
    made: dict[str, tuple[str, ...]] = {}
    for name, others in found.items():
        listed = [others] if isinstance(others, str) else others
        if not isinstance(listed, list) or not all(isinstance(other, str) and other for other in listed):
            raise ValueError(f"{name}: expected a list of names")
        if name in listed or len(set(listed)) != len(listed):
            raise ValueError(f"{name}: expected each name once, and not {name!r} itself")
        made[str(name)] = tuple(listed)
    return made
