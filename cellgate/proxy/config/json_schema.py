"""The JSON Schema of the configuration, for editors: made of the models that check it.

It knows keys, kinds of values, choices and defaults. What needs the machine or other keys (files, names that
must be unique) only `cellgate check` knows, so whatever this schema refuses, the gate refuses as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, get_args

from pydantic import PlainValidator
from pydantic.fields import FieldInfo

from cellgate.policies import POLICIES
from cellgate.probes import NODE_PROBES
from cellgate.probes.apis import CANARIES
from cellgate.probes.engines import ENGINES
from cellgate.probes.presets import PRESETS
from cellgate.proxy.config import (
    discovery,
    entry_values,
    model_aliases,
    probing,
    recovery,
    schema,
    unit_action_keys,
    values,
)
from cellgate.proxy.config.settings import (
    Address,
    GuardrailAnswer,
    GuardrailFail,
    LogFormat,
    OnRevoke,
    PerUnit,
    ShownTo,
)
from cellgate.proxy.config.sources import SOURCES
from cellgate.router.nouns import Role
from cellgate.router.split_nouns import ServingRole, Transfer

Json = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_VARIABLE: Json = {"type": "string", "pattern": r"\$\{"}
"""Any value may come from the environment: config/variables.py."""


def _kind(name: str, told: str = "", **bounds: object) -> Json:
    return {"type": name, **bounds} | ({"description": told} if told else {})


def _one_of(words: Sequence[str]) -> Json:
    return {"enum": list(words)}


def _list_of(item: Json) -> Json:
    return {"type": "array", "items": item}


def _map_of(value: Json) -> Json:
    return {"type": "object", "additionalProperties": value}


_STRING = _kind("string")
_ADDRESS = _kind("string", "HOST:PORT, with an IPv6 host in brackets")
_PAGE = _kind("string", "http://HOST:PORT/PATH or https://HOST:PORT/PATH")
_FILE = _kind("string", "a file name")
_PORT = _kind("integer", "a port", minimum=1, maximum=65535)
_SIZE: Json = {
    "description": "bytes, or a string like 64MiB",
    "anyOf": [_kind("integer", minimum=1), _kind("string", pattern=r"^\d{1,9} ?(KiB|MiB|GiB)$"), _VARIABLE],
}
_LOG_FORMATS: Json = {"enum": [*get_args(LogFormat), False], "description": "false is how YAML reads off"}

KINDS: dict[Callable[..., Any], Json] = {
    values.version: {"const": 1},
    values.seconds: _kind("number", "seconds", exclusiveMinimum=0),
    values.seconds_or_0: _kind("number", "seconds", minimum=0),
    values.share: _kind("number", "a share from 0 to 1", minimum=0, maximum=1),
    values.ratio: _kind("number", "a ratio", exclusiveMinimum=1),
    values.weight: _kind("number", "1 is usual", exclusiveMinimum=0),
    values.rate: _kind("number", "a number a second", minimum=0),
    values.count: _kind("integer", minimum=1),
    values.count_or_0: _kind("integer", minimum=0),
    values.size: _SIZE,
    values.text: _STRING,
    values.header: _kind("string", "the name of a header line"),
    values.flag: _kind("boolean"),
    values.policy: _one_of(sorted(POLICIES)),
    values.role: _one_of([role.value for role in Role]),
    values.serving_role: _one_of(get_args(ServingRole)),
    values.transfer: _one_of(get_args(Transfer)),
    values.log_format: _LOG_FORMATS,
    values.per_unit: _one_of(get_args(PerUnit)),
    entry_values.guardrail_url: _kind("string", "http://HOST:PORT/PATH or unix:///PATH"),
    entry_values.guardrail_answer: {"enum": [*get_args(GuardrailAnswer), False]},
    entry_values.guardrail_fail: _one_of(get_args(GuardrailFail)),
    entry_values.shown_to: _one_of(get_args(ShownTo)),
    entry_values.origins: _list_of(_kind("string", "an origin like https://app.example.com, or *")),
    values.name: _kind("string", "letters, digits, '.', '_' and '-'", pattern=r"^[A-Za-z0-9$]"),
    values.models: _list_of(_STRING),
    values.place: _list_of(_STRING),
    model_aliases.model_names: _map_of({"anyOf": [_STRING, _map_of(_kind("number", exclusiveMinimum=0))]}),
    model_aliases.fallbacks: _map_of({"anyOf": [_STRING, _list_of(_STRING)]}),
    values.address: _ADDRESS,
    values.target: _ADDRESS,
    values.redis_username: _STRING,
    values.redis_prefix: _STRING,
    values.networks: _list_of(_kind("string", "a network like 10.0.0.0/8, or an address")),
    values.page: _PAGE,
    values.otlp_traces: _PAGE,
    values.otlp_metrics: _PAGE,
    values.url: _kind("string", "http://HOST:PORT or https://HOST:PORT without a path"),
    values.zmq_endpoint: _kind("string", "tcp://HOST:PORT"),
    values.kv_source: _one_of(["vllm", "sglang"]),
    values.readable_file: _FILE,
    recovery.log_file: _FILE,
    values.on_revoke: _one_of(get_args(OnRevoke)),
    values.token_in_file: _kind("string", "a file that holds the secret alone"),
    probing.engine: _one_of(sorted(ENGINES)),
    probing.canary: _one_of(sorted(CANARIES)),
    probing.probe: _one_of(sorted(NODE_PROBES)),
    probing.preset: _one_of(sorted(PRESETS)),
    probing.rule: _kind("string", "a rule such as node_load1 > 100"),
    probing.service: _STRING,
    probing.statuses: _list_of(_kind("integer", minimum=200, maximum=599)),
    unit_action_keys.run_command: _list_of(_STRING),
    unit_action_keys.call_webhook: _PAGE,
    unit_action_keys.unit_selector: _kind(
        "string", "labels, with {unit} for the unit's name", pattern=r"\{unit\}|\$\{"
    ),
    unit_action_keys.systemd_service: _kind("string", "a service with {unit}", pattern=r"\{unit\}|\$\{"),
    discovery.source: _one_of(sorted(SOURCES)),
    discovery.record: _one_of(["A", "AAAA", "SRV"]),
    discovery.scheme: _one_of(["http", "https"]),
    values.port: _PORT,
    schema.fleet_source: _one_of(["redis"]),
}
"""What each check takes. A new check needs a line here."""

_MADE = {"word.<locals>.check": _STRING, "words.<locals>.check": _list_of(_STRING)}
"""The same of checks that word_values.py makes."""


def json_schema() -> Json:
    """The schema of the whole file."""
    return {"$schema": DIALECT, "title": "The configuration of Cellgate", **_mapping("")}


def _mapping(place: str) -> Json:
    """A mapping of `schema.SCHEMA`, by its place."""
    fields = schema.SCHEMA[place].model_fields
    made: Json = {
        "type": "object",
        "additionalProperties": False,
        "properties": {key: _property(f"{place}.{key}".lstrip("."), field) for key, field in fields.items()},
    }
    # The units of a cell may be discovered.
    required = [key for key, f in fields.items() if f.is_required() and (place, key) != ("cells[]", "units")]
    return made | ({"required": required} if required else {})


def _property(place: str, field: FieldInfo) -> Json:
    if place in schema.SCHEMA:
        return _mapping(place)
    if f"{place}[]" in schema.SCHEMA:
        return _list_of(_mapping(f"{place}[]"))
    [check] = [each.func for each in field.metadata if isinstance(each, PlainValidator)]
    kind = KINDS.get(check) or _MADE[check.__qualname__]
    takes_variables = kind.get("type") in ("string", "array") or "anyOf" in kind
    taken = kind if takes_variables else {"anyOf": [kind, _VARIABLE]}
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
