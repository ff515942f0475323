"""The report of a unit that gates share: a JSON document for each (unit, gate), its keys in Redis, its
parsing. Pure; docs/redis.md describes it.

1. Reading never raises, whatever is in Redis: invalid fields are ignored one by one.
2. Clocks are not shared. Ages are as of the writing; its time follows from the time to live of the key.
3. Of another version only `CORE` fields are read: these never change their meaning.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, get_args

import orjson

from cellgate.proxy.config.settings import REDIS_PREFIX
from cellgate.router.hold import is_on
from cellgate.router.hold_nouns import HoldKind
from cellgate.router.nouns import Strength, Verdict
from cellgate.router.split_nouns import ServingRole
from cellgate.router.unit_state import UnitState

VERSION = 1
CORE = ("unit", "cell", "gate", "verdict", "url", "in_flight", "gate_url")
HEARTBEAT_S = 0.25
EXPIRY_HEARTBEATS = 3
"""A beat expires after this many heartbeats, and a reader waits as long before it counts as missing."""
DOCUMENT_BEATS = 10
"""A document is written once in so many heartbeats, in turns; it expires after three times that."""
DOCUMENT_MAX = 64 * 1024

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_URL = re.compile(r"https?://[A-Za-z0-9.\-\[\]:_]{1,255}")
_TEXT_MAX = 256
_MODELS_MAX = 256
_LARGEST = 1e12
_GRAIN_S = 0.001
"""The inaccuracy of PTTL. A report must never seem newer than a later one."""


class Names:
    """The names of keys and channels under a prefix. Unit, cell and gate names have no colon."""

    def __init__(self, prefix: str = REDIS_PREFIX) -> None:
        self.prefix = prefix
        self.cells = f"{prefix}cells"
        """The set of cells."""
        self.flips = f"{prefix}flips"
        """The channel on which a document is published after each change of verdict."""

        self.poison = f"{prefix}poison"
        """The set of prompts that are refused, by fingerprint."""

    def beat(self, gate: str) -> str:
        """The key of a gate's heartbeat."""
        return f"{self.prefix}beat:{gate}"

    def prefixes(self, gate: str) -> str:
        """The key of a gate's hashes of cached prompts."""
        return f"{self.prefix}prefixes:{gate}"

    def limit(self, counter: str) -> str:
        """The key of the counter of one limit in one window of the clock."""
        return f"{self.prefix}limit:{counter}"

    def ban(self, mark: str) -> str:
        """The key of the document of a refused prompt."""
        return f"{self.prefix}poison:{mark}"

    def units_of(self, cell: str) -> str:
        """The set of `UNIT:GATE` that have been published of a cell."""
        return f"{self.prefix}cell:{cell}"

    def acting(self, cell: str) -> str:
        """The key of what gates agree on about a cell: which of them acts, and on what."""
        return f"{self.prefix}acting:{cell}"

    def unit(self, unit: str, gate: str) -> str:
        """The key of a document."""
        return f"{self.prefix}unit:{unit}:{gate}"


# Not frozen, although never changed: creating a frozen object with so many fields takes 3 us, and a gate with
# 200 units creates 800 a second.
@dataclass(slots=True)
class UnitReport:
    """The report of one gate on one unit. None: unknown.

    `fatal`: it is DOWN by a fact (an address refuses, a process has ended) and not by judgement;
    `life_age_s`: how long ago it last made progress; `prefilling` of those in flight have prompts that are
    not computed yet, of `uncached_tokens` in all;
    `gate_url`: where the gate takes requests for it (empty: nowhere); `stopping`: the gate is stopping;
    `hold`: why its engine stands still on purpose; `role`: what it does for requests; `beats`: the gate has a
    heartbeat, and without it is gone.
    """

    unit: str
    cell: str
    gate: str
    verdict: Verdict
    url: str = ""
    in_flight: int = 0
    prefilling: int = 0
    reason: str = ""
    fatal: bool = False
    drained: bool = False
    degraded: float = 0.0
    errors: float = 0.0
    epoch: str = ""
    weight: float = 1.0
    max_in_flight: int = 0
    models: tuple[str, ...] = ()
    uncached_tokens: int = 0
    life_age_s: float | None = None
    load_age_s: float | None = None
    running: int | None = None
    waiting: int | None = None
    kv_use: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    prefill_tokens_per_s: float | None = None
    gate_url: str = ""
    stopping: bool = False
    engine: str = ""
    hold: HoldKind | None = None
    role: ServingRole = "both"
    beats: bool = True


class Seen(NamedTuple):
    """A report, and how long ago it was written."""

    report: UnitReport
    age_s: float


class MergedReport(NamedTuple):
    """The combined report of several gates: `view` decides, `in_flight` is the sum."""

    report: UnitReport
    in_flight: int


def written(report: UnitReport) -> bytes:
    """The document."""
    return b'{"v":%d,%b' % (VERSION, orjson.dumps(report)[1:])


def read_report(document: bytes) -> UnitReport | None:
    """The report in a document; None when it is invalid."""
    if len(document) > DOCUMENT_MAX:
        return None
    try:
        found = orjson.loads(document)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(found, dict):
        return None
    names = _FIELDS if found.get("v") == VERSION else CORE
    taken = {name: value for name in names if (value := READERS[name](found.get(name))) is not None}
    # Gates of an earlier version say nothing of beats.
    return (
        UnitReport(**{"beats": False} | taken)
        if taken.keys() >= {"unit", "cell", "gate", "verdict"}
        else None
    )


def age_s(pttl_ms: int, expiry_s: float) -> float | None:
    """How long ago a key with the expiry `expiry_s` was written; None: it is gone, or not a gate's."""
    left_s = pttl_ms / 1000.0
    # A PTTL of -1 is a key without expiry, -2 is no key. A larger one than `expiry_s` was not written by a
    # gate.
    return None if pttl_ms < 0 or left_s > 10.0 * expiry_s else max(0.0, expiry_s - left_s) + _GRAIN_S


def merge_reports(seen: Sequence[Seen]) -> MergedReport | None:
    """The combined report on one unit: any fatal one, else the most recent. None without reports."""
    if not seen:
        return None
    # The gate's name breaks ties, so that all readers agree.
    ranked = sorted(seen, key=lambda one: (not one.report.fatal, one.age_s, one.report.gate))
    return MergedReport(ranked[0].report, sum(one.report.in_flight for one in seen))


def report_of(
    state: UnitState,
    gate: str,
    now: float,
    *,
    life_at: float = 0.0,
    ttft_s: float | None = None,
    itl_s: float | None = None,
    gate_url: str = "",
    stopping: bool = False,
) -> UnitReport:
    """The report of a gate on a unit now. `life_at` is when the gate itself last saw progress (0: never).
    `ttft_s` and `itl_s` are the recent time to first token and gap between tokens, which are not computed in
    every heartbeat.
    """
    case, load, unit = state.case, state.load, state.unit
    is_fatal = case.because is not None and case.because.strength is Strength.FATAL
    return UnitReport(
        unit=unit.name,
        cell=unit.cell,
        gate=gate,
        verdict=case.verdict,
        url=unit.url,
        in_flight=state.in_flight,
        prefilling=state.costs.backlog.queued,
        reason=case.because.reason[:_TEXT_MAX] if case.because is not None else "",
        fatal=case.verdict is Verdict.DOWN and is_fatal,
        drained=state.drained,
        degraded=round(state.outlier.degraded, 3),
        errors=round(state.costs.errors.share(now), 3),
        epoch=",".join(epoch for _, epoch in case.epochs)[:_TEXT_MAX],
        weight=state.weight,
        max_in_flight=unit.max_in_flight,
        models=tuple(sorted(state.models)[:_MODELS_MAX]),
        uncached_tokens=state.costs.backlog.queued_tokens,
        life_age_s=round(now - life_at, 3) if life_at else None,
        load_age_s=round(now - load.at, 3) if load is not None else None,
        running=load.running if load is not None else None,
        waiting=load.waiting if load is not None else None,
        kv_use=round(load.kv_use, 4) if load is not None else None,
        ttft_s=ttft_s,
        itl_s=itl_s,
        prefill_tokens_per_s=round(state.costs.rates.prefill_tokens_s.value, 1),
        gate_url=gate_url,
        stopping=stopping,
        engine=state.engine,
        hold=state.hold.kind if state.hold is not None and is_on(state.hold) else None,
        role=unit.role,
    )


def _name(found: Any) -> str | None:
    return found if isinstance(found, str) and _NAME.fullmatch(found) else None


def _url(found: Any) -> str | None:
    return found if isinstance(found, str) and _URL.fullmatch(found) else None


def _text(found: Any) -> str | None:
    return found[:_TEXT_MAX] if isinstance(found, str) else None


def _flag(found: Any) -> bool | None:
    return found if isinstance(found, bool) else None


def _number(found: Any) -> float | None:
    """A number from 0. JSON has no others than finite ones, but orjson's own ints go further than floats."""
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        return None
    return float(found) if 0 <= found <= _LARGEST and math.isfinite(found) else None


def _share(found: Any) -> float | None:
    number = _number(found)
    return number if number is not None and number <= 1.0 else None


def _count(found: Any) -> int | None:
    return found if isinstance(found, int) and _number(found) is not None else None


def _verdict(found: Any) -> Verdict | None:
    return _VERDICTS.get(found) if isinstance(found, str) else None


def _hold(found: Any) -> HoldKind | None:
    return _HOLDS.get(found) if isinstance(found, str) else None


def _role(found: Any) -> ServingRole | None:
    return next((role for role in get_args(ServingRole) if role == found), None)


def _models(found: Any) -> tuple[str, ...] | None:
    if not isinstance(found, list) or not all(isinstance(model, str) for model in found):
        return None
    return tuple(found[:_MODELS_MAX])


_HOLDS = {kind.value: kind for kind in HoldKind}
_VERDICTS = {verdict.value: verdict for verdict in Verdict}
_FIELDS = tuple(field.name for field in fields(UnitReport))
READERS: Mapping[str, Callable[[Any], Any]] = {
    "unit": _name,
    "cell": _name,
    "gate": _name,
    "verdict": _verdict,
    "url": _url,
    "in_flight": _count,
    "prefilling": _count,
    "reason": _text,
    "fatal": _flag,
    "drained": _flag,
    "degraded": _share,
    "errors": _share,
    "epoch": _text,
    "weight": _number,
    "max_in_flight": _count,
    "models": _models,
    "uncached_tokens": _count,
    "life_age_s": _number,
    "load_age_s": _number,
    "running": _count,
    "waiting": _count,
    "kv_use": _number,
    "ttft_s": _number,
    "itl_s": _number,
    "prefill_tokens_per_s": _number,
    "gate_url": _url,
    "stopping": _flag,
    "engine": _text,
    "hold": _hold,
    "role": _role,
    "beats": _flag,
}
