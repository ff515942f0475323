"""The schema of the configuration: its keys, their defaults, and the check of each value.

Defaults come from settings.py and router/nouns.py and are stated nowhere else. A new field of Rules,
Limits, Timeouts or Tls is a new key by itself, checked by the unit in its name. A value that is not what it
has to be raises MisfitError; nothing is converted that could have been meant otherwise.
"""

from __future__ import annotations

import dataclasses
import ssl
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import AfterValidator, Field, PlainValidator, ValidationInfo, create_model, model_validator

from cellgate.proxy.config import values
from cellgate.proxy.config.cgroup import quarter_of_memory
from cellgate.proxy.config.discovery import Discover, DiscoverKeys, LikeKeys, discovered_by
from cellgate.proxy.config.recovery import RecoveryKeys, remedy
from cellgate.proxy.config.remedy import Remedy
from cellgate.proxy.config.settings import (
    REDIS_PREFIX,
    Address,
    HeaderNames,
    Limits,
    LogFormat,
    PerUnit,
    Poison,
    Settings,
    Timeouts,
    Tls,
    TracingSettings,
)
from cellgate.proxy.config.units import Keys, KvEventsKeys, NodeKeys, ProbeKeys, UnitKeys
from cellgate.proxy.config.values import MisfitError
from cellgate.router.fair_queue import FairRules
from cellgate.router.known_answers import KnownAnswerRules
from cellgate.router.nouns import Cell, Fleet, Rules

T = TypeVar("T")

_GIVEN = Settings(fleet=Fleet())
_CELL = Cell(name="")
_TRACING = TracingSettings(endpoint="")


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
        raise ValueError(
            f"body_bytes ({limits.body_bytes}) must not be larger than bodies_bytes ({limits.bodies_bytes}), "
            "which is a quarter of memory by default"
        )


def _pairs_load(tls: Any) -> None:
    """A certificate comes with its key, and both with an authority that can be read."""
    for one, other in (("cert", "key"), ("unit_cert", "unit_key")):
        cert, key = getattr(tls, one), getattr(tls, other)
        if (cert is None) != (key is None):
            missing = one if cert is None else other
            raise ValueError(f"{one} and {other} must be given together: {missing} is missing")
        if cert is not None:
            with values.pem_errors(f"a certificate in {one} and its key in {other}, in PEM format"):
                # Without a password OpenSSL would ask the terminal for that of an encrypted key.
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    if tls.ca is not None:
        with values.pem_errors("CA certificates in ca, in PEM format"):
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(tls.ca)


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

    endpoint: Annotated[str, PlainValidator(values.otlp)]
    sample_ratio: Annotated[float, PlainValidator(values.share)] = _TRACING.sample_ratio


# Cells, and the file as a whole.


class CellKeys(Keys):
    """One cell. A cell may have no unit for a while, a fleet may not."""

    name: Annotated[str, PlainValidator(values.name)]
    weight: Annotated[float, PlainValidator(values.weight)] = _CELL.weight
    spill_s: Annotated[float, PlainValidator(values.seconds_or_0)] = _CELL.spill_s
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


def _some_unit(cells: list[CellKeys], info: ValidationInfo) -> list[CellKeys]:
    if info.data.get("discovery"):
        if any(cell.units or cell.discover for cell in cells):
            raise ValueError("with discovery: redis, cells must not have units of their own")
    elif not any(cell.units or cell.discover for cell in cells):
        raise MisfitError(
            "at least one cell with a unit", "add units to the file, or use --unit URL", found="none"
        )
    return cells


class FileKeys(Keys):
    """The whole file. Files of secrets are read here, so that what a field holds is the secret.

    `redis` may be anything: a gate serves without it, and says what is wrong with it.
    """

    version: Annotated[int, PlainValidator(values.version)] = 1
    listen: Annotated[Address, PlainValidator(values.address)] = _GIVEN.listen
    admin: Annotated[Address, PlainValidator(values.address)] = _GIVEN.admin
    workers: Annotated[int, PlainValidator(values.count)] = _GIVEN.workers
    agent_check: Annotated[Address | None, PlainValidator(values.address)] = _GIVEN.agent_check
    trusted: Annotated[tuple[str, ...], PlainValidator(values.networks)] = _GIVEN.trusted
    redis: Annotated[str | None, PlainValidator(values.text)] = Field(None, repr=False)
    redis_username: Annotated[str | None, PlainValidator(values.redis_username)] = None
    redis_password_file: Annotated[str | None, PlainValidator(values.token_in_file)] = Field(None, repr=False)
    redis_prefix: Annotated[str, PlainValidator(values.redis_prefix)] = REDIS_PREFIX
    advertise: Annotated[str, PlainValidator(values.url)] = _GIVEN.advertise
    discovery: Annotated[str, PlainValidator(fleet_source)] = ""
    admin_token_file: Annotated[str | None, PlainValidator(values.token_in_file)] = Field(None, repr=False)
    policy: Annotated[str, PlainValidator(values.policy)] = _GIVEN.policy
    access_log: Annotated[LogFormat, PlainValidator(values.log_format)] = _GIVEN.access_log
    tracing: Annotated[TracingSettings | None, _section(TracingSettings, TracingKeys)] = _GIVEN.tracing
    pool_metrics: Annotated[bool, PlainValidator(values.flag)] = _GIVEN.pool_metrics
    per_unit_metrics: Annotated[PerUnit, PlainValidator(values.per_unit)] = _GIVEN.per_unit_metrics
    cells: Annotated[list[CellKeys], AfterValidator(_some_unit)] = Field([], validate_default=True)
    rules: Annotated[Rules, _section(Rules, RulesKeys)] = _GIVEN.rules
    limits: Annotated[Limits, _section(Limits, LimitsKeys, _one_body_fits)] = Field(
        default_factory=lambda: Limits(bodies_bytes=quarter_of_memory())
    )
    timeouts: Annotated[Timeouts, _section(Timeouts, TimeoutsKeys)] = _GIVEN.timeouts
    tls: Annotated[Tls, _section(Tls, TlsKeys, _pairs_load)] = _GIVEN.tls
    queue: Annotated[FairRules, _section(FairRules, QueueKeys)] = _GIVEN.queue
    headers: Annotated[HeaderNames, _section(HeaderNames, HeadersKeys)] = _GIVEN.headers
    poison: Annotated[Poison, _section(Poison, PoisonKeys)] = _GIVEN.poison
    pass_unlisted: Annotated[bool, PlainValidator(values.flag)] = _GIVEN.pass_unlisted
    no_continuation: Annotated[tuple[str, ...], PlainValidator(values.models)] = _GIVEN.no_continuation
    continue_across_builds: Annotated[bool, PlainValidator(values.flag)] = _GIVEN.continue_across_builds
    known_answer: Annotated[KnownAnswerRules, _section(KnownAnswerRules, KnownAnswerKeys)] = (
        _GIVEN.known_answer
    )


SCHEMA: dict[str, type[Keys]] = {
    "": FileKeys,
    "cells[]": CellKeys,
    "cells[].recovery": RecoveryKeys,
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
    "known_answer": KnownAnswerKeys,
    "tracing": TracingKeys,
}
"""Every mapping of the file by its place: where the known keys and their defaults are looked up."""
