"""A unit as the admin port shows it: what is believed, the evidence behind it, and how busy it is. Pure."""

from __future__ import annotations

from typing import Any

from proxy.report.ready import why
from router.board import Desk
from router.nouns import Case, Evidence, Load

EVIDENCE_SHOWN = 5


def unit_view(desk: Desk, now: float) -> dict[str, Any]:
    """The unit ready for JSON; ages in seconds before `now`."""
    unit = desk.unit
    return {
        "name": unit.name,
        "cell": unit.cell,
        "url": unit.url,
        "verdict": desk.case.verdict.value,
        "usable": desk.is_usable(),
        "drained": desk.drained,
        "since_s": _age(desk.case.since, now),
        "reason": why(desk),
        "evidence": [_evidence(e, now) for e in _behind(desk.case)],
        "in_flight": desk.in_flight,
        "max_in_flight": unit.max_in_flight,
        "weight": desk.weight,
        "load": _load(desk.load, now) if desk.load is not None else None,
        "models": sorted(desk.models),
        "nodes": [{"name": node.name, "role": node.role.value} for node in unit.nodes],
    }


def _behind(case: Case) -> list[Evidence]:
    """The last few pieces, newest first; what the verdict was reached by is always among them."""
    last = list(reversed(case.window[-EVIDENCE_SHOWN:]))
    return (
        last if case.because is None or case.because in last else [*last[: EVIDENCE_SHOWN - 1], case.because]
    )


def _evidence(evidence: Evidence, now: float) -> dict[str, Any]:
    return {
        "sign": evidence.sign.value,
        "strength": evidence.strength.name.lower(),
        "source": evidence.source,
        "node": evidence.node,
        "reason": evidence.reason,
        "age_s": _age(evidence.at, now),
    }


def _load(load: Load, now: float) -> dict[str, Any]:
    return {
        "running": load.running,
        "waiting": load.waiting,
        "kv_use": round(load.kv_use, 4),
        "age_s": _age(load.at, now),
    }


def _age(at: float, now: float) -> float:
    return round(now - at, 3)
