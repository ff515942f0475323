"""What gates tell each other of a unit: a JSON document per (unit, gate), its names in Redis, its reading.
Pure; docs/redis.md is its description.

1. Whatever stands in Redis, reading it raises nothing: what makes no sense is left out, field by field.
2. No clock is shared. Ages are as of the writing; how long ago that was follows from the time a key has left.
3. Of another version only `CORE` fields are read: these keep their meaning for ever.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import orjson

from cellgate.proxy.config.settings import REDIS_PREFIX
from cellgate.router.nouns import Strength, Verdict
from cellgate.router.unit_state import UnitState

VERSION = 1
CORE = ("unit", "cell", "gate", "verdict", "url", "in_flight", "gate_url")
HEARTBEAT_S = 0.25
EXPIRY_HEARTBEATS = 3
"""A document lives for so many heartbeats, and so many a reader waits before it misses one."""
DOCUMENT_MAX = 64 * 1024

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_URL = re.compile(r"https?://[A-Za-z0-9.\-\[\]:_]{1,255}")
_TEXT_MAX = 256
_MODELS_MAX = 256
_LARGEST = 1e12
_GRAIN_S = 0.001
"""What PTTL leaves out. A view must never seem newer than one that came after it."""


class Names:
    """The names of keys and channels under a prefix. Unit, cell and gate names have no colon."""

    def __init__(self, prefix: str = REDIS_PREFIX) -> None:
        self.prefix = prefix
        self.cells = f"{prefix}cells"
        """The set of cells."""
        self.flips = f"{prefix}flips"
        """The channel on which a document is published whenever its verdict has changed."""

        self.poison = f"{prefix}poison"
        """The set of prompts that are refused, by fingerprint."""

    def prefixes(self, gate: str) -> str:
        """The key of what a gate tells of prefix caches."""
        return f"{self.prefix}prefixes:{gate}"

    def ban(self, mark: str) -> str:
        """The key of the document of such a prompt."""
        return f"{self.prefix}poison:{mark}"

    def units_of(self, cell: str) -> str:
        """The set of `UNIT:GATE` that have been published of a cell."""
        return f"{self.prefix}cell:{cell}"

    def unit(self, unit: str, gate: str) -> str:
        """The key of a document."""
        return f"{self.prefix}unit:{unit}:{gate}"


# Not frozen, and nobody changes one: to make a frozen object of so many fields takes 3 us, and a gate before
# 200 units makes 800 a second.
@dataclass(slots=True)
class UnitReport:
    """What one gate says of one unit. None: it does not know.

    `fatal`: it is DOWN by a fact (an address refuses, a process is gone) and not by judgement; `life_age_s`:
    how long ago it last proved by work that it lives; `uncached_tokens`: prompts not yet computed;
    `gate_url`: where the gate takes requests for it (empty: nowhere); `stopping`: for a moment only.
    """

    unit: str
    cell: str
    gate: str
    verdict: Verdict
    url: str = ""
    in_flight: int = 0
    reason: str = ""
    fatal: bool = False
    drained: bool = False
    degraded: float = 0.0
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


class Seen(NamedTuple):
    """A view, and how long ago it was written."""

    report: UnitReport
    age_s: float


class MergedReport(NamedTuple):
    """What several gates together say of a unit: `view` decides, `in_flight` is that of all."""

    report: UnitReport
    in_flight: int


def written(report: UnitReport) -> bytes:
    """The document."""
    return b'{"v":%d,%b' % (VERSION, orjson.dumps(report)[1:])


def read_report(document: bytes) -> UnitReport | None:
    """The view in a document; None when it says nothing that can be used."""
    if len(document) > DOCUMENT_MAX:
        return None
    try:
        found = orjson.loads(document)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(found, dict):
        return None
    names = _FIELDS if found.get("v") == VERSION else CORE
    taken = {name: value for name in names if (value := _READERS[name](found.get(name))) is not None}
    return UnitReport(**taken) if taken.keys() >= {"unit", "cell", "gate", "verdict"} else None


def age_s(pttl_ms: int, expiry_s: float) -> float | None:
    """How long ago a key was written that was to live for `expiry_s`; None: it is gone, or not of ours."""
    left_s = pttl_ms / 1000.0
    # A PTTL of -1 is a key without expiry, -2 is no key. More left than there could be is another's writing.
    return None if pttl_ms < 0 or left_s > 10.0 * expiry_s else max(0.0, expiry_s - left_s) + _GRAIN_S


def merge_reports(seen: Sequence[Seen]) -> MergedReport | None:
    """What several gates together say of one unit: any fatal word, else the freshest. None of nobody."""
    if not seen:
        return None
    # The gate's name settles ties, so that all readers come to the same.
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
    """What a gate has to say of a unit now. `life_at` is when the gate itself last saw it live (0: never).
    `ttft_s` and `itl_s` are what is usual there of late: the time to first token and the gap between two,
    which are not for every heartbeat to find out.
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
        reason=case.because.reason[:_TEXT_MAX] if case.because is not None else "",
        fatal=case.verdict is Verdict.DOWN and is_fatal,
        drained=state.drained,
        degraded=round(state.outlier.degraded, 3),
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


def _models(found: Any) -> tuple[str, ...] | None:
    if not isinstance(found, list) or not all(isinstance(model, str) for model in found):
        return None
    return tuple(found[:_MODELS_MAX])


_VERDICTS = {verdict.value: verdict for verdict in Verdict}
_FIELDS = tuple(field.name for field in fields(UnitReport))
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "unit": _name,
    "cell": _name,
    "gate": _name,
    "verdict": _verdict,
    "url": _url,
    "in_flight": _count,
    "reason": _text,
    "fatal": _flag,
    "drained": _flag,
    "degraded": _share,
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
}
