"""What the file of keys says: who may come in, as whom, and how much each may use. Immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

PRIORITY_LAST = 1_000_000
"""The priority that goes last; less than nothing goes before, down to minus as much."""


@dataclass(frozen=True, slots=True)
class LimitRules:
    """How much may be used; None: as much as one likes. Money is in the currency of the prices.

    `requests_per_minute` and `tokens_per_minute` count in minutes of the clock (UTC), the others in its days
    and months; `in_flight` are requests at a time.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    in_flight: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    cost_per_day: float | None = None
    cost_per_month: float | None = None


@dataclass(frozen=True, slots=True)
class TenantRules:
    """Those who share the queue as one, and these limits. `models` None: all; lower priorities go first."""

    name: str
    models: frozenset[str] | None = None
    priority: tuple[int, int] = (0, PRIORITY_LAST)
    limits: LimitRules = LimitRules()


@dataclass(frozen=True, slots=True)
class Key:
    """One key, without itself. `name` is empty for bearers of a JWT: they have the limits of their tenant
    only. `expires_at`: seconds since 1970.
    """

    name: str
    tenant: TenantRules
    models: frozenset[str] | None = None
    priority: tuple[int, int] = (0, PRIORITY_LAST)
    limits: LimitRules = LimitRules()
    expires_at: float = inf


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """What a million tokens of a model cost."""

    prompt: float = 0.0
    completion: float = 0.0


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All keys, by the SHA-256 of each; tenants and prices by their names."""

    keys: Mapping[bytes, Key] = field(default_factory=dict)
    tenants: Mapping[str, TenantRules] = field(default_factory=dict)
    prices: Mapping[str, TokenPrice] = field(default_factory=dict)
