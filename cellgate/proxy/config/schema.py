"""The schema of the configuration: its keys, their defaults, and the check of each value.

Defaults come from settings.py and router/nouns.py and are stated nowhere else. A new field of Rules,
Limits, Timeouts or Tls is a new key by itself, checked by the unit in its name. A value that is not what it
has to be raises MisfitError; nothing is converted that could have been meant otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

from pydantic import AfterValidator, Field, PlainValidator, ValidationInfo, create_model, model_validator

from cellgate.proxy.config import entry_values, values
from cellgate.proxy.config.alb import AlbTarget
from cellgate.proxy.config.alb_keys import AlbKeys, alb_target
from cellgate.proxy.config.certificates import check_certificates
from cellgate.proxy.config.cgroup import quarter_of_memory
from cellgate.proxy.config.discovery import Discover, DiscoverKeys, LikeKeys, discovered_by
from cellgate.proxy.config.model_aliases import fallbacks, model_names
from cellgate.proxy.config.recovery import (
    LeaseKeys,
    RecoveryKeys,
    RollKeys,
    lease_place,
    log_file,
    remedy,
    roll_policy,
)
from cellgate.proxy.config.remedy import LeasePlace, Remedy
from cellgate.proxy.config.roll_policy import RollPolicy
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
    OtlpMetrics,
    PerUnit,
    Poison,
    Settings,
    ShownTo,
    Split,
    Timeouts,
    Tls,
    TracingSettings,
)
from cellgate.proxy.config.unit_action_keys import ImageKeys, PodsKeys, TasksKeys
from cellgate.proxy.config.units import Keys, KvEventsKeys, NodeKeys, ProbeKeys, UnitKeys, section
from cellgate.proxy.config.values import MisfitError
from cellgate.router.fair_queue import FairRules
from cellgate.router.known_answers import KnownAnswerRules
from cellgate.router.nouns import Cell, Fleet, Rules
from cellgate.router.split_nouns import Transfer

_GIVEN = Settings(fleet=Fleet())
_CELL = Cell(name="")
_CORS = Cors(())
_GUARDRAIL = GuardrailSettings("")
_TRACING = TracingSettings(endpoint="")
_OTLP_METRICS = OtlpMetrics(endpoint="")
_KEYS = KeySettings(file="")
_JWT = JwtSettings(issuer="", audience="", jwks_url="")


# Sections: one mapping for each settings dataclass, with its fields as keys.

_MAY_BE_ZERO = {
    "ban_s",
    "drain_delay_s",
    "drain_s",
    "every_s",
    "limit",
    "panic_max_s",
    "retry_min",
    "slow_start_s",
}


def _check_of(name: str, kind: object) -> Any:
    """The check for a field of a settings dataclass, by the unit in its name, else by its type."""
    if name.endswith("_bytes"):
        return values.size
    if kind is str:
        return values.header
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
HeadersKeys = _keys_of(HeaderNames)
PoisonKeys = _keys_of(Poison)
KnownAnswerKeys = _keys_of(KnownAnswerRules)


class TracingKeys(Keys):
    """Where spans go, and of which share of the requests."""

    endpoint: Annotated[str, PlainValidator(values.otlp_traces)]
    sample_ratio: Annotated[float, PlainValidator(values.share)] = _TRACING.sample_ratio


class CorsKeys(Keys):
    """The pages that may use the gate."""

    origins: Annotated[tuple[str, ...], PlainValidator(entry_values.origins)]
    max_age_s: Annotated[float, PlainValidator(values.seconds_or_0)] = _CORS.max_age_s


class OtlpMetricsKeys(Keys):
    """Where metrics go, and how often."""

    endpoint: Annotated[str, PlainValidator(values.otlp_metrics)]
    every_s: Annotated[float, PlainValidator(values.seconds)] = _OTLP_METRICS.every_s


class JwtKeys(Keys):
    """Whose tokens count."""

    issuer: Annotated[str, PlainValidator(values.text)]
    audience: Annotated[str, PlainValidator(values.text)]
    jwks_url: Annotated[str, PlainValidator(values.page)]
    tenant_claim: Annotated[str, PlainValidator(values.text)] = _JWT.tenant_claim


class KeyFileKeys(Keys):
    """Who may come in. What the file says is checked where it is read, config/key_file.py."""

    file: Annotated[str, PlainValidator(values.readable_file)]
    on_revoke: Annotated[OnRevoke, PlainValidator(values.on_revoke)] = _KEYS.on_revoke
    jwt: Annotated[JwtSettings | None, section(JwtSettings, JwtKeys)] = None


class GuardrailKeys(Keys):
    """A program that is asked about requests and answers."""

    url: Annotated[str, PlainValidator(entry_values.guardrail_url)]
    request: Annotated[bool, PlainValidator(values.flag)] = _GUARDRAIL.request
    answer: Annotated[GuardrailAnswer, PlainValidator(entry_values.guardrail_answer)] = _GUARDRAIL.answer
    window_bytes: Annotated[int, PlainValidator(values.size)] = _GUARDRAIL.window_bytes
    window_s: Annotated[float, PlainValidator(values.seconds)] = _GUARDRAIL.window_s
    timeout_s: Annotated[float, PlainValidator(values.seconds)] = _GUARDRAIL.timeout_s
    fail: Annotated[GuardrailFail, PlainValidator(entry_values.guardrail_fail)] = _GUARDRAIL.fail


# Cells, and the file as a whole.


class CellKeys(Keys):
    """One cell. A cell may have no unit for a while, a fleet may not."""

    name: Annotated[str, PlainValidator(values.name)]
    weight: Annotated[float, PlainValidator(values.weight)] = _CELL.weight
    spill_s: Annotated[float, PlainValidator(values.seconds_or_0)] = _CELL.spill_s
    transfer: Annotated[Transfer, PlainValidator(values.transfer)] = _CELL.transfer
    recovery: Annotated[Remedy | None, PlainValidator(remedy)] = None
    discover: Annotated[Discover | None, PlainValidator(discovered_by)] = None
    units: list[UnitKeys]

    @model_validator(mode="before")
    @classmethod
    def _units_may_be_discovered(cls, found: object) -> object:
        return {"units": [], **found} if isinstance(found, dict) and "discover" in found else found


def fleet_source(found: object, info: ValidationInfo) -> str:
    found = values.choice("a source of all units", found, ["redis"])
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
        raise MisfitError(
            "at least one cell with a unit", "add units to the file, or use --unit URL", found="none"
        )
    return cells


def _leases_or_redis(found: LeasePlace | None, info: ValidationInfo) -> LeasePlace | None:
    if found is not None and info.data.get("redis") is not None:
        raise ValueError("with redis, gates agree there on who acts: take one of them out")
    return found


class FileKeys(Keys):
    """The whole file. Files of secrets are read here, so that what a field holds is the secret.

    `redis` may be anything: a gate serves without it, and says what is wrong with it.
    """

    version: Annotated[int, PlainValidator(values.version)] = 1
    listen: Annotated[Address, PlainValidator(values.address)] = _GIVEN.listen
    admin: Annotated[Address, PlainValidator(values.address)] = _GIVEN.admin
    workers: Annotated[int, PlainValidator(values.count)] = _GIVEN.workers
    agent_check: Annotated[Address | None, PlainValidator(values.address)] = _GIVEN.agent_check
    alb: Annotated[AlbTarget | None, PlainValidator(alb_target)] = _GIVEN.alb
    trusted: Annotated[tuple[str, ...], PlainValidator(values.networks)] = _GIVEN.trusted
    redis: Annotated[str | None, PlainValidator(values.text)] = Field(None, repr=False)
    redis_username: Annotated[str | None, PlainValidator(values.redis_username)] = None
    redis_password_file: Annotated[str | None, PlainValidator(values.token_in_file)] = Field(None, repr=False)
    redis_prefix: Annotated[str, PlainValidator(values.redis_prefix)] = REDIS_PREFIX
    leases: Annotated[LeasePlace | None, PlainValidator(lease_place), AfterValidator(_leases_or_redis)] = None
    advertise: Annotated[str, PlainValidator(values.url)] = _GIVEN.advertise
    discovery: Annotated[str, PlainValidator(fleet_source)] = ""
    admin_token_file: Annotated[str | None, PlainValidator(values.token_in_file)] = Field(None, repr=False)
    policy: Annotated[str, PlainValidator(values.policy)] = _GIVEN.policy
    access_log: Annotated[LogFormat, PlainValidator(values.log_format)] = _GIVEN.access_log
    keys: Annotated[KeySettings | None, section(KeySettings, KeyFileKeys)] = _GIVEN.keys
    usage_log: Annotated[str | None, PlainValidator(log_file), AfterValidator(_usage_needs_keys)] = (
        _GIVEN.usage_log
    )
    tracing: Annotated[TracingSettings | None, section(TracingSettings, TracingKeys)] = _GIVEN.tracing
    otlp_metrics: Annotated[OtlpMetrics | None, section(OtlpMetrics, OtlpMetricsKeys)] = _GIVEN.otlp_metrics
    pool_metrics: Annotated[bool, PlainValidator(values.flag)] = _GIVEN.pool_metrics
    per_unit_metrics: Annotated[PerUnit, PlainValidator(values.per_unit)] = _GIVEN.per_unit_metrics
    cells: Annotated[list[CellKeys], AfterValidator(_some_unit)] = Field([], validate_default=True)
    rules: Annotated[Rules, section(Rules, RulesKeys)] = _GIVEN.rules
    limits: Annotated[Limits, section(Limits, LimitsKeys, _one_body_fits)] = Field(
        default_factory=lambda: Limits(bodies_bytes=quarter_of_memory())
    )
    timeouts: Annotated[Timeouts, section(Timeouts, TimeoutsKeys)] = _GIVEN.timeouts
    tls: Annotated[Tls, section(Tls, TlsKeys, check_certificates)] = _GIVEN.tls
    queue: Annotated[FairRules, section(FairRules, QueueKeys)] = _GIVEN.queue
    headers: Annotated[HeaderNames, section(HeaderNames, HeadersKeys)] = _GIVEN.headers
    poison: Annotated[Poison, section(Poison, PoisonKeys)] = _GIVEN.poison
    guardrail: Annotated[GuardrailSettings | None, section(GuardrailSettings, GuardrailKeys)] = (
        _GIVEN.guardrail
    )
    cors: Annotated[Cors | None, section(Cors, CorsKeys)] = _GIVEN.cors
    realtime: Annotated[bool, PlainValidator(values.flag)] = _GIVEN.realtime
    internal_headers: Annotated[ShownTo, PlainValidator(entry_values.shown_to)] = _GIVEN.internal_headers
    roll: Annotated[RollPolicy | None, PlainValidator(roll_policy)] = _GIVEN.roll
    pass_unlisted: Annotated[bool, PlainValidator(values.flag)] = _GIVEN.pass_unlisted
    models: Annotated[Mapping[str, Split], PlainValidator(model_names)] = {}
    fallback: Annotated[Mapping[str, tuple[str, ...]], PlainValidator(fallbacks)] = {}
    no_continuation: Annotated[tuple[str, ...], PlainValidator(values.models)] = _GIVEN.no_continuation
    continue_across_builds: Annotated[bool, PlainValidator(values.flag)] = _GIVEN.continue_across_builds
    resume_s: Annotated[float, PlainValidator(values.seconds_or_0)] = _GIVEN.resume_s
    known_answer: Annotated[KnownAnswerRules, section(KnownAnswerRules, KnownAnswerKeys)] = (
        _GIVEN.known_answer
    )


SCHEMA: dict[str, type[Keys]] = {
    "": FileKeys,
    "cells[]": CellKeys,
    "cells[].recovery": RecoveryKeys,
    "cells[].recovery.kubernetes": PodsKeys,
    "cells[].recovery.ecs": TasksKeys,
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
    "headers": HeadersKeys,
    "poison": PoisonKeys,
    "leases": LeaseKeys,
    "alb": AlbKeys,
    "roll": RollKeys,
    "roll.kubernetes": ImageKeys,
    "roll.ecs": TasksKeys,
    "keys": KeyFileKeys,
    "keys.jwt": JwtKeys,
    "known_answer": KnownAnswerKeys,
    "guardrail": GuardrailKeys,
    "cors": CorsKeys,
    "tracing": TracingKeys,
    "otlp_metrics": OtlpMetricsKeys,
}
"""Every mapping of the file by its place: where the known keys and their defaults are looked up."""
