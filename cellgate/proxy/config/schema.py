"""The schema of the configuration: its keys, their defaults, and the check of each value.

Defaults come from settings.py and router/nouns.py and are stated nowhere else. A new field of Rules,
Limits, Timeouts or Tls is a new key by itself, checked by the unit in its name. A key at the top is the
field of Settings that has its name: without such a field nothing is loaded. A value that is not what it has
to be raises InvalidValueError; nothing is converted that could have been meant otherwise.

In this order: `GuardrailKeys`, `FileKeys`, `json_schema`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

from pydantic import AfterValidator, Field, PlainValidator, ValidationInfo, create_model, model_validator
from pydantic.fields import FieldInfo

from cellgate.proxy.config import checks, units
from cellgate.proxy.config.checks import InvalidValueError, check_certificates, quarter_of_memory
from cellgate.proxy.config.settings import (
    REDIS_PREFIX,
    Address,
    Cors,
    GuardrailAnswer,
    GuardrailFail,
    GuardrailSettings,
    HeaderNames,
    JwtSettings,
    KeySettings,
    Limits,
    LogFormat,
    OnRevoke,
    Poison,
    Settings,
    ShownTo,
    Split,
    Timeouts,
    Tls,
    TracingSettings,
)
from cellgate.proxy.config.units import (
    Discover,
    DiscoverKeys,
    Keys,
    KvEventsKeys,
    LikeKeys,
    NodeKeys,
    ProbeKeys,
    UnitKeys,
    discovered_by,
    fallbacks,
    model_names,
    section,
)
from cellgate.router.known_answers import KnownAnswerRules
from cellgate.router.nouns import FIXED, Cell, Rules, Transfer
from cellgate.router.queue import FairRules

_MAY_BE_ZERO = {"ban_s", "drain_delay_s", "drain_s", "every_s", "limit", "slow_start_s"}


def _check_of(name: str, kind: object) -> Any:
    """The check for a field of a settings dataclass, by the unit in its name, else by its type."""
    if name.endswith("_bytes"):
        return checks.size
    if name.endswith("_s"):
        return checks.seconds_or_0 if name in _MAY_BE_ZERO else checks.seconds
    if kind is int:
        return checks.count_or_0 if name in _MAY_BE_ZERO else checks.count
    return checks.share if kind is float else checks.readable_file


def _keys_of(noun: Any, **derived: Callable[[], object]) -> type[Keys]:
    """The mapping for a settings dataclass; `derived` defaults are worked out when they are needed."""
    kinds = get_type_hints(noun)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(noun):
        if field.metadata == FIXED:
            continue
        check = Annotated[Any, PlainValidator(_check_of(field.name, kinds[field.name]))]
        default = Field(default_factory=derived[field.name]) if field.name in derived else field.default
        fields[field.name] = (check, default)
    made = create_model(noun.__name__, __base__=Keys, **fields)
    made.became = noun
    return made


def _one_body_fits(limits: Any) -> None:
    """A body allowed by itself must be allowed among all, or every request with it would be refused."""
    if limits.model_fields_set & {"body_bytes", "bodies_bytes"} and limits.body_bytes > limits.bodies_bytes:
        raise ValueError(
            f"body_bytes ({limits.body_bytes}) must not be larger than bodies_bytes ({limits.bodies_bytes}), "
            "which is a quarter of memory by default"
        )


RulesKeys = _keys_of(Rules)
LimitsKeys = _keys_of(Limits, bodies_bytes=quarter_of_memory)
TimeoutsKeys = _keys_of(Timeouts)
TlsKeys = _keys_of(Tls)
QueueKeys = _keys_of(FairRules)
PoisonKeys = _keys_of(Poison)
KnownAnswerKeys = _keys_of(KnownAnswerRules)


class TracingKeys(Keys, of=TracingSettings):
    """Where spans go, and of which share of the requests."""

    endpoint: Annotated[str, PlainValidator(checks.otlp_traces)]
    sample_ratio: Annotated[float, PlainValidator(checks.share)]


class CorsKeys(Keys, of=Cors):
    """The pages that may use the gate."""

    origins: Annotated[tuple[str, ...], PlainValidator(checks.origins)]


class JwtKeys(Keys, of=JwtSettings):
    """Whose tokens count."""

    issuer: Annotated[str, PlainValidator(checks.text)]
    audience: Annotated[str, PlainValidator(checks.text)]
    jwks_url: Annotated[str, PlainValidator(checks.page)]
    tenant_claim: Annotated[str, PlainValidator(checks.text)]


class KeyFileKeys(Keys, of=KeySettings):
    """Who may come in. What the file says is checked where it is read, config/key_file.py."""

    file: Annotated[str, PlainValidator(checks.readable_file)]
    on_revoke: Annotated[OnRevoke, PlainValidator(checks.on_revoke)]
    jwt: Annotated[
        JwtSettings | None, section(JwtSettings, JwtKeys), AfterValidator(checks.with_extra("web_tokens"))
    ]


class GuardrailKeys(Keys, of=GuardrailSettings):
    """A program that is asked about requests and answers."""

    url: Annotated[str, PlainValidator(checks.guardrail_url)]
    request: Annotated[bool, PlainValidator(checks.flag)]
    answer: Annotated[GuardrailAnswer, PlainValidator(checks.guardrail_answer)]
    timeout_s: Annotated[float, PlainValidator(checks.seconds)]
    fail: Annotated[GuardrailFail, PlainValidator(checks.guardrail_fail)]


class CellKeys(Keys, of=Cell):
    """One cell. A cell may have no unit for a while, a fleet may not."""

    name: Annotated[str, PlainValidator(checks.name)]
    weight: Annotated[float, PlainValidator(checks.weight)]
    spill_s: Annotated[float, PlainValidator(checks.seconds_or_0)]
    transfer: Annotated[Transfer, PlainValidator(checks.transfer)]
    discover: Annotated[Discover | None, PlainValidator(discovered_by)] = None
    units: list[UnitKeys]

    @model_validator(mode="before")
    @classmethod
    def _units_may_be_discovered(cls, found: object) -> object:
        return {"units": [], **found} if isinstance(found, dict) and "discover" in found else found


_FLEET_SOURCE = checks.OneOf("a source of all units", ["redis"])


def fleet_source(found: object, info: ValidationInfo) -> str:
    found = _FLEET_SOURCE(found)
    if info.data.get("redis") is None:
        raise ValueError("requires the key redis as well")
    return found


def _usage_needs_keys(found: str | None, info: ValidationInfo) -> str | None:
    if found is not None and info.data.get("keys") is None:
        raise ValueError("requires the key keys as well")
    return found


def _some_unit(cells: list[CellKeys], info: ValidationInfo) -> list[CellKeys]:
    if info.data.get("discovery"):
        if any(cell.units or cell.discover for cell in cells):
            raise ValueError("with discovery: redis, cells must not have units of their own")
    elif not any(cell.units or cell.discover for cell in cells):
        raise InvalidValueError(
            "at least one cell with a unit", "add units to the file, or use --unit URL", found="none"
        )
    return cells


class FileKeys(Keys, of=Settings):
    """The whole file. Files of secrets are read here, so that what a field holds is the secret.

    `redis` may be anything: a gate serves without it, and says what is wrong with it.
    """

    listen: Annotated[Address, PlainValidator(checks.address)]
    admin: Annotated[Address, PlainValidator(checks.address)]
    workers: Annotated[int, PlainValidator(checks.count), AfterValidator(checks.with_extra("workers", 1))]
    agent_check: Annotated[Address | None, PlainValidator(checks.address)]
    trusted: Annotated[tuple[str, ...], PlainValidator(checks.networks)]
    redis: Annotated[str | None, PlainValidator(checks.text), AfterValidator(checks.with_extra("redis"))] = (
        Field(None, repr=False)
    )
    redis_password_file: Annotated[str | None, PlainValidator(checks.token_in_file)] = Field(None, repr=False)
    redis_prefix: Annotated[str, PlainValidator(checks.redis_prefix)] = REDIS_PREFIX
    advertise: Annotated[str, PlainValidator(checks.url)]
    discovery: Annotated[str, PlainValidator(fleet_source)] = ""
    admin_token_file: Annotated[str | None, PlainValidator(checks.admin_token_file)] = Field(None, repr=False)
    agent_token_file: Annotated[str | None, PlainValidator(checks.token_in_file)] = Field(None, repr=False)
    fleet_secret_file: Annotated[str | None, PlainValidator(checks.token_in_file)] = Field(None, repr=False)
    policy: Annotated[str, PlainValidator(checks.policy)]
    access_log: Annotated[LogFormat, PlainValidator(checks.log_format)]
    keys: Annotated[KeySettings | None, section(KeySettings, KeyFileKeys)]
    usage_log: Annotated[str | None, PlainValidator(checks.log_file), AfterValidator(_usage_needs_keys)]
    tracing: Annotated[
        TracingSettings | None,
        section(TracingSettings, TracingKeys),
        AfterValidator(checks.with_extra("otlp")),
    ]
    otlp_metrics: Annotated[
        str | None, PlainValidator(checks.otlp_metrics), AfterValidator(checks.with_extra("otlp"))
    ]
    cells: Annotated[list[CellKeys], AfterValidator(_some_unit)] = Field([], validate_default=True)
    rules: Annotated[Rules, section(Rules, RulesKeys)]
    limits: Annotated[Limits, section(Limits, LimitsKeys, _one_body_fits)] = Field(
        default_factory=lambda: Limits(bodies_bytes=quarter_of_memory())
    )
    timeouts: Annotated[Timeouts, section(Timeouts, TimeoutsKeys)]
    tls: Annotated[Tls, section(Tls, TlsKeys, check_certificates)]
    queue: Annotated[FairRules, section(FairRules, QueueKeys)]
    session_headers: Annotated[tuple[str, ...], PlainValidator(checks.headers)] = HeaderNames().sessions
    poison: Annotated[Poison, section(Poison, PoisonKeys)]
    guardrail: Annotated[
        GuardrailSettings | None,
        section(GuardrailSettings, GuardrailKeys),
        AfterValidator(checks.with_extra("guardrail")),
    ]
    cors: Annotated[Cors | None, section(Cors, CorsKeys)]
    realtime: Annotated[bool, PlainValidator(checks.flag), AfterValidator(checks.with_extra("realtime"))]
    internal_headers: Annotated[ShownTo, PlainValidator(checks.shown_to)]
    operator: Annotated[
        str | None, PlainValidator(checks.readable_file), AfterValidator(checks.with_extra("operator"))
    ] = None
    pass_unlisted: Annotated[bool, PlainValidator(checks.flag)]
    models: Annotated[Mapping[str, Split], PlainValidator(model_names)]
    fallback: Annotated[Mapping[str, tuple[str, ...]], PlainValidator(fallbacks)]
    no_continuation: Annotated[tuple[str, ...], PlainValidator(checks.models)]
    continue_across_builds: Annotated[bool, PlainValidator(checks.flag)]
    known_answer: Annotated[KnownAnswerRules, section(KnownAnswerRules, KnownAnswerKeys)]


INGREDIENTS = (
    "cells",
    "discovery",
    "operator",
    "redis_password_file",
    "redis_prefix",
    "admin_token_file",
    "agent_token_file",
    "fleet_secret_file",
    "session_headers",
)
"""Keys that settings of other names are made of; every other key is the setting of its name."""

SCHEMA: dict[str, type[Keys]] = {
    "": FileKeys,
    "cells[]": CellKeys,
    "cells[].discover": DiscoverKeys,
    "cells[].discover.unit": LikeKeys,
    "cells[].units[]": UnitKeys,
    "cells[].units[].kv_events": KvEventsKeys,
    "cells[].units[].nodes[]": NodeKeys,
    "cells[].units[].nodes[].probes[]": ProbeKeys,
    "rules": RulesKeys,
    "limits": LimitsKeys,
    "timeouts": TimeoutsKeys,
    "tls": TlsKeys,
    "queue": QueueKeys,
    "poison": PoisonKeys,
    "keys": KeyFileKeys,
    "keys.jwt": JwtKeys,
    "known_answer": KnownAnswerKeys,
    "guardrail": GuardrailKeys,
    "cors": CorsKeys,
    "tracing": TracingKeys,
}
"""Every mapping of the file by its place: where the known keys and their defaults are looked up."""


# The JSON Schema of the configuration, for editors: made of the models that check it.
#
# It knows keys, kinds of values, choices and defaults. What needs the machine or other keys (files, names
# that must be unique) only `cellgate check` knows, so whatever this schema refuses, the gate refuses as well.


Json = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SCHEMA_VARIABLE: Json = {"type": "string", "pattern": r"\$\{"}
"""Any value may come from the environment: config/yaml_file.py."""


def _kind(name: str, meaning: str = "", **bounds: object) -> Json:
    return {"type": name, **bounds} | ({"description": meaning} if meaning else {})


def _list_of(item: Json) -> Json:
    return {"type": "array", "items": item}


def _map_of(value: Json) -> Json:
    return {"type": "object", "additionalProperties": value}


_STRING = _kind("string")
_SCHEMA_ADDRESS = _kind("string", "HOST:PORT, with an IPv6 host in brackets")
_PAGE = _kind("string", "http://HOST:PORT/PATH or https://HOST:PORT/PATH")
_FILE = _kind("string", "a file name")
_PORT = _kind("integer", "a port", minimum=1, maximum=65535)
_SCHEMA_SIZE: Json = {
    "description": "bytes, or a string like 64MiB",
    "anyOf": [
        _kind("integer", minimum=1),
        _kind("string", pattern=r"^\d{1,9} ?(KiB|MiB|GiB)$"),
        _SCHEMA_VARIABLE,
    ],
}
KINDS: dict[Callable[..., Any], Json] = {
    checks.seconds: _kind("number", "seconds", exclusiveMinimum=0),
    checks.seconds_or_0: _kind("number", "seconds", minimum=0),
    checks.share: _kind("number", "a share from 0 to 1", minimum=0, maximum=1),
    checks.weight: _kind("number", "1 is usual", exclusiveMinimum=0),
    checks.count: _kind("integer", minimum=1),
    checks.count_or_0: _kind("integer", minimum=0),
    checks.size: _SCHEMA_SIZE,
    checks.text: _STRING,
    checks.headers: _list_of(_kind("string", "the name of a header line")),
    checks.flag: _kind("boolean"),
    checks.guardrail_url: _kind("string", "http://HOST:PORT/PATH or unix:///PATH"),
    checks.origins: _list_of(_kind("string", "an origin like https://app.example.com, or *")),
    checks.name: _kind("string", "letters, digits, '.', '_' and '-'", pattern=r"^[A-Za-z0-9$]"),
    checks.models: _list_of(_STRING),
    checks.place: _list_of(_STRING),
    units.model_names: _map_of({"anyOf": [_STRING, _map_of(_kind("number", exclusiveMinimum=0))]}),
    units.fallbacks: _map_of({"anyOf": [_STRING, _list_of(_STRING)]}),
    checks.address: _SCHEMA_ADDRESS,
    checks.target: _SCHEMA_ADDRESS,
    checks.redis_prefix: _STRING,
    checks.networks: _list_of(_kind("string", "a network like 10.0.0.0/8, or an address")),
    checks.page: _PAGE,
    checks.otlp_traces: _PAGE,
    checks.otlp_metrics: _PAGE,
    checks.url: _kind("string", "http://HOST:PORT or https://HOST:PORT without a path"),
    checks.zmq_endpoint: _kind("string", "tcp://HOST:PORT"),
    checks.readable_file: _FILE,
    checks.log_file: _FILE,
    checks.token_in_file: _kind("string", "a file that holds the secret alone"),
    checks.admin_token_file: _kind("string", "a file that holds the token alone, or its hash"),
    units.a_rule: _kind("string", "a rule such as node_load1 > 100"),
    units.a_service: _STRING,
    units.selector: _STRING,
    checks.port: _PORT,
    fleet_source: _FLEET_SOURCE.kind(),
}
"""What each check takes, if it is not one of some words. A new check needs a line here."""

_MADE = {"word.<locals>.check": _STRING, "words.<locals>.check": _list_of(_STRING)}
"""The same of checks that checks.py makes."""


def json_schema(
    schema: Mapping[str, type[Keys]] = SCHEMA,
    more: Mapping[Callable[..., Any], Json] = MappingProxyType({}),
    title: str = "The configuration of Cellgate",
) -> Json:
    """The schema of a whole file, by default the gate's; `more` are kinds that only it has."""
    return {"$schema": DIALECT, "title": title, **_mapping(schema, {**KINDS, **more}, "")}


def _mapping(schema: Mapping[str, type[Keys]], kinds: Mapping[Callable[..., Any], Json], place: str) -> Json:
    """A mapping of the schema, by its place."""
    fields = schema[place].model_fields
    properties = {
        key: _property(schema, kinds, f"{place}.{key}".lstrip("."), field) for key, field in fields.items()
    }
    made: Json = {"type": "object", "additionalProperties": False, "properties": properties}
    # The units of a cell may be discovered.
    required = [key for key, f in fields.items() if f.is_required() and (place, key) != ("cells[]", "units")]
    return made | ({"required": required} if required else {})


def _property(
    schema: Mapping[str, type[Keys]], kinds: Mapping[Callable[..., Any], Json], place: str, field: FieldInfo
) -> Json:
    if place in schema:
        return _mapping(schema, kinds, place)
    if f"{place}[]" in schema:
        return _list_of(_mapping(schema, kinds, f"{place}[]"))
    [check] = [each.func for each in field.metadata if isinstance(each, PlainValidator)]
    kind = check.kind() if isinstance(check, checks.OneOf) else kinds.get(check) or _MADE[check.__qualname__]
    takes_variables = kind.get("type") in ("string", "array") or "anyOf" in kind
    taken = kind if takes_variables else {"anyOf": [kind, _SCHEMA_VARIABLE]}
    default = _shown(field.default)
    return taken if default is None else taken | {"default": default}


def _shown(default: object) -> object:
    """A default as a file has it; None where there is none to show."""
    match default:
        case Address():
            return str(default)
        case Enum():
            return default.value
        case bool() | int() | float():
            return default
        case str() if default:
            return default
    return None
