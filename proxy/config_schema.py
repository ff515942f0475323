"""What may stand in a configuration: its keys, their defaults, and what each value has to be.

Defaults come from proxy/settings.py and router/nouns.py and are stated nowhere else. A new field of Rules,
Limits, Timeouts or Tls is a new key by itself, checked by the unit in its name. A value that is not what it
has to be raises MisfitError; nothing is converted that could have been meant otherwise.
"""

from __future__ import annotations

import dataclasses
import ssl
from collections.abc import Callable
from dataclasses import MISSING
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, create_model

from probes import NODE_PROBES
from probes.node import NodeProbe
from proxy import config_probing as probing
from proxy import config_values as values
from proxy.config_values import MisfitError
from proxy.memory import quarter_of_memory
from proxy.settings import REDIS_PREFIX, Address, Limits, LogFormat, Settings, Timeouts, Tls
from router.nouns import Cell, Fleet, Node, Role, Rules, Unit

T = TypeVar("T")

_GIVEN = Settings(fleet=Fleet())
_CELL = Cell(name="")
_NODE = Node(name="", role=Role.LEADER)
_UNIT = Unit(name="", cell="", url="")


class Keys(BaseModel):
    """A mapping of the file: these keys, and no other."""

    model_config = ConfigDict(extra="forbid", strict=True)


# Sections: one mapping for each settings dataclass, with its fields as keys.

_MAY_BE_ZERO = {"drain_delay_s", "drain_s", "panic_max_s", "retry_min", "slow_start_s"}


def _check_of(name: str, kind: object) -> Any:
    """The check for a field of a settings dataclass, by the unit in its name, else by its type."""
    if name.endswith("_bytes"):
        return values.size
    if name.endswith("_s"):
        return values.seconds_or_0 if name in _MAY_BE_ZERO else values.seconds
    if name.endswith("_ratio"):
        return values.ratio
    if kind is int:
        return values.count_or_0 if name in _MAY_BE_ZERO else values.count
    return values.share if kind is float else values.readable_file


def _keys_of(noun: Any, **derived: Callable[[], object]) -> type[Keys]:
    """The mapping for a settings dataclass; `derived` defaults are worked out when they are needed."""
    kinds = get_type_hints(noun)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(noun):
        check = Annotated[Any, PlainValidator(_check_of(field.name, kinds[field.name]))]
        default = Field(default_factory=derived[field.name]) if field.name in derived else field.default
        fields[field.name] = (check, default)
    return create_model(noun.__name__, __base__=Keys, **fields)


def _section(noun: Callable[..., T], keys: type[Keys], fits: Callable[[Any], None] | None = None) -> Any:
    """Reads a mapping into its settings dataclass; `fits` looks at keys that have to go together."""

    def read(found: object) -> T:
        section = keys.model_validate(found)
        if fits is not None:
            fits(section)
        return noun(**dict(section))

    return PlainValidator(read)


def _one_body_fits(limits: Any) -> None:
    """A body allowed by itself must be allowed among all, or every request with it would be refused."""
    if limits.model_fields_set & {"body_bytes", "bodies_bytes"} and limits.body_bytes > limits.bodies_bytes:
        raise MisfitError(
            f"body_bytes of at most bodies_bytes ({limits.bodies_bytes} here)",
            "bodies_bytes is by default a quarter of memory",
            found=str(limits.body_bytes),
        )


def _pairs_load(tls: Any) -> None:
    """A certificate comes with its key, and both with an authority that can be read."""
    for one, other in (("cert", "key"), ("unit_cert", "unit_key")):
        cert, key = getattr(tls, one), getattr(tls, other)
        if (cert is None) != (key is None):
            alone = other if cert is None else one
            raise MisfitError(f"{one} and {other} together", found=f"{alone} alone")
        if cert is not None:
            with values.pem_errors(f"a certificate in {one} and its key in {other}, both PEM"):
                # Without a password OpenSSL would ask the terminal for that of an encrypted key.
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    if tls.ca is not None:
        with values.pem_errors("certificates of authorities in ca, PEM"):
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(tls.ca)


RulesKeys = _keys_of(Rules)
LimitsKeys = _keys_of(Limits, bodies_bytes=quarter_of_memory)
TimeoutsKeys = _keys_of(Timeouts)
TlsKeys = _keys_of(Tls)


# Cells, units, nodes, probes, and the file as a whole.


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
        raise MisfitError(f"keys that probe {keys.probe} has ({', '.join(fields)})", found=", ".join(strange))
    if missing := [name for name, default in fields.items() if default is MISSING and name not in given]:
        raise MisfitError(f"{' and '.join(missing)} beside probe: {keys.probe}", found="nothing")
    if "rule" in fields and ("rule" in given) == ("preset" in given):
        raise MisfitError("either rule or preset", found="both" if "rule" in given else "none of them")
    return kind(**given)


def _each_of_its_own(probes: list[NodeProbe]) -> list[NodeProbe]:
    """Who said that a node is bad is known by its name, and has to take it back itself."""
    names = [probe.name for probe in probes]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise MisfitError("probes of which no two look at the same thing", found=repr(twice))
    return probes


def _one_leader(nodes: list[NodeKeys]) -> list[NodeKeys]:
    leaders = sum(node.role is Role.LEADER for node in nodes)
    if leaders != 1:
        raise MisfitError("nodes of which exactly one has the role leader", found=f"{leaders} leaders")
    return nodes


class NodeKeys(Keys):
    """One node of a unit."""

    name: Annotated[str, PlainValidator(values.name)]
    role: Annotated[Role, PlainValidator(values.role)]
    agent: Annotated[str, PlainValidator(values.target)] = _NODE.agent
    probes: Annotated[
        list[Annotated[NodeProbe, PlainValidator(_node_probe)]], AfterValidator(_each_of_its_own)
    ] = []


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
    api_key_file: Annotated[str | None, PlainValidator(values.token_in_file)] = Field(None, repr=False)
    nodes: Annotated[list[NodeKeys], AfterValidator(_one_leader)] = []


class CellKeys(Keys):
    """One cell. A cell may have no unit for a while, a fleet may not."""

    name: Annotated[str, PlainValidator(values.name)]
    weight: Annotated[float, PlainValidator(values.weight)] = _CELL.weight
    units: list[UnitKeys]


def _some_unit(cells: list[CellKeys]) -> list[CellKeys]:
    if not any(cell.units for cell in cells):
        raise MisfitError(
            "at least one cell with a unit", "name units in the file, or with --unit URL", found="none"
        )
    return cells


class FileKeys(Keys):
    """The whole file. Files of secrets are read here, so that what a field holds is the secret.

    `redis` may be anything: a gate serves without it, and says what is wrong with it.
    """

    listen: Annotated[Address, PlainValidator(values.address)] = _GIVEN.listen
    admin: Annotated[Address, PlainValidator(values.address)] = _GIVEN.admin
    agent_check: Annotated[Address | None, PlainValidator(values.address)] = _GIVEN.agent_check
    trusted: Annotated[tuple[str, ...], PlainValidator(values.networks)] = _GIVEN.trusted
    redis: Annotated[str | None, PlainValidator(values.text)] = Field(None, repr=False)
    redis_username: Annotated[str | None, PlainValidator(values.redis_username)] = None
    redis_password_file: Annotated[str | None, PlainValidator(values.token_in_file)] = Field(None, repr=False)
    redis_prefix: Annotated[str, PlainValidator(values.redis_prefix)] = REDIS_PREFIX
    admin_token_file: Annotated[str | None, PlainValidator(values.token_in_file)] = Field(None, repr=False)
    policy: Annotated[str, PlainValidator(values.policy)] = _GIVEN.policy
    access_log: Annotated[LogFormat, PlainValidator(values.log_format)] = _GIVEN.access_log
    cells: Annotated[list[CellKeys], AfterValidator(_some_unit)] = Field([], validate_default=True)
    rules: Annotated[Rules, _section(Rules, RulesKeys)] = _GIVEN.rules
    limits: Annotated[Limits, _section(Limits, LimitsKeys, _one_body_fits)] = Field(
        default_factory=lambda: Limits(bodies_bytes=quarter_of_memory())
    )
    timeouts: Annotated[Timeouts, _section(Timeouts, TimeoutsKeys)] = _GIVEN.timeouts
    tls: Annotated[Tls, _section(Tls, TlsKeys, _pairs_load)] = _GIVEN.tls
    pass_unlisted: Annotated[bool, PlainValidator(values.flag)] = _GIVEN.pass_unlisted


SCHEMA: dict[str, type[Keys]] = {
    "": FileKeys,
    "cells[]": CellKeys,
    "cells[].units[]": UnitKeys,
    "cells[].units[].nodes[]": NodeKeys,
    "cells[].units[].nodes[].probes[]": ProbeKeys,
    "rules": RulesKeys,
    "limits": LimitsKeys,
    "timeouts": TimeoutsKeys,
    "tls": TlsKeys,
}
"""Every mapping of the file by its place: where the known keys and their defaults are looked up."""
