"""The limits of one key or tenant, and what it has used of them. Pure."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from cellgate.proxy.config.keys import LimitRules
from cellgate.proxy.doors.meters import Meter, Period

MICRO = 1_000_000
"""Money is counted in millionths."""


class Measure(IntEnum):
    """What a limit counts: the place in an `Amounts`."""

    REQUESTS = 0
    TOKENS = 1
    MONEY = 2


Amounts = tuple[int, int, int]
"""Requests, tokens, money."""


class MeterKind(NamedTuple):
    """What a field of `LimitRules` limits."""

    field: str
    measure: Measure
    period: Period


METERS = (
    MeterKind("requests_per_minute", Measure.REQUESTS, Period.MINUTE),
    MeterKind("tokens_per_minute", Measure.TOKENS, Period.MINUTE),
    MeterKind("tokens_per_day", Measure.TOKENS, Period.DAY),
    MeterKind("tokens_per_month", Measure.TOKENS, Period.MONTH),
    MeterKind("cost_per_day", Measure.MONEY, Period.DAY),
    MeterKind("cost_per_month", Measure.MONEY, Period.MONTH),
)


class Account:
    """`title` says whose limits they are: `key NAME` or `tenant NAME`. `gates` share them; 0: none do.

    `in_flight` is counted where it is limited.
    """

    __slots__ = ("in_flight", "in_flight_max", "meters", "title")

    def __init__(self, title: str, rules: LimitRules, at: float, gates: int) -> None:
        self.title = title
        self.in_flight = 0
        self.meters: dict[MeterKind, Meter] = {}
        self.configure(rules, at, gates)

    def configure(self, rules: LimitRules, at: float, gates: int) -> None:
        """Apply these limits; what was used of them stays used."""
        before, self.meters = self.meters, {}
        self.in_flight_max = rules.in_flight
        for kind in METERS:
            limit = getattr(rules, kind.field)
            if limit is not None:
                limit = round(limit * MICRO) if kind.measure is Measure.MONEY else limit
                self.meters[kind] = before.get(kind) or Meter(limit, kind.period, at, gates)
                self.meters[kind].change(limit)
