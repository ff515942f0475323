"""The incident that a command or a webhook gets: JSON, and environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellgate.proxy.config.remedy import Remedy
from cellgate.proxy.logs.text import one_line, utc
from cellgate.proxy.recovery.nouns import Incident
from cellgate.router.nouns import Evidence
from cellgate.router.unit_state import UnitState

EVIDENCE_KEPT = 16
_REASON_MAX = 1024


def incident(
    state: UnitState, *, action_id: str, attempt: int, down_at: float, remedy: Remedy, now: float, wall: float
) -> Incident:
    """The case of a unit that is to be recovered, all its nodes as one. Times are ISO 8601 in UTC. `fence` is
    known once the attempt is claimed.
    """
    unit, because = state.unit, state.case.because
    words = sorted({*state.last_evidence.values(), *state.case.window}, key=lambda word: word.at)

    def at(moment: float) -> str:
        return utc(wall - (now - moment))

    def told(word: Evidence) -> dict[str, Any]:
        return {
            "time": at(word.at),
            "sign": word.sign.value,
            "strength": word.strength.name.lower(),
            "source": word.source,
            "node": word.node,
            "reason": word.reason,
        }

    return {
        "id": action_id,
        "unit": unit.name,
        "cell": unit.cell,
        "url": unit.url,
        "nodes": [{"name": node.name, "role": node.role.value, "agent": node.agent} for node in unit.nodes],
        "reason": because.reason if because is not None else "",
        "node": because.node if because is not None else None,
        "source": because.source if because is not None else "",
        "epoch": dict(sorted(state.case.epochs)),
        "since": at(down_at),
        "down_s": round(now - down_at, 3),
        "attempt": attempt,
        "attempts": remedy.attempts,
        "dry_run": remedy.dry_run,
        "fence": 0,
        "evidence": [told(word) for word in words[-EVIDENCE_KEPT:]],
    }


def environment(about: Incident, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a command: the gate's own without its secrets, and what it needs of the unit."""
    epoch = ",".join(f"{reader}={reading}" for reader, reading in about["epoch"].items())
    told = {
        "ID": about["id"],
        "UNIT": about["unit"],
        "CELL": about["cell"],
        "URL": about["url"],
        "NODES": ",".join(node["name"] for node in about["nodes"]),
        "REASON": one_line(about["reason"])[:_REASON_MAX],
        "NODE": about["node"] or "",
        "EPOCH": epoch,
        "SINCE": about["since"],
        "ATTEMPT": str(about["attempt"]),
        "FENCE": str(about["fence"]),
    }
    # Tokens and passwords of the gate are in such variables, too.
    kept = {name: value for name, value in base.items() if not name.startswith("CELLGATE_")}
    return kept | {f"CELLGATE_{name}": value for name, value in told.items()}
