"""A unit as the admin port shows it: its verdict, the evidence behind it, and its load. Pure.

`unit_view` is for the list of all units; `unit_page` has all details of one.
"""

from __future__ import annotations

from math import inf
from typing import Any

from cellgate.proxy.admin.explain import explain
from cellgate.proxy.admin.link_view import links_of
from cellgate.proxy.admin.remarks import answer_view, build_view
from cellgate.proxy.admin.rotation import Moment, is_held, silent_s
from cellgate.proxy.ingress.ready import why
from cellgate.router.board import Board
from cellgate.router.cost_model import CostModel
from cellgate.router.hold_nouns import Hold
from cellgate.router.nouns import Case, Evidence, Load
from cellgate.router.shared_fate import shared_fates
from cellgate.router.stall import stall_limit_s
from cellgate.router.unit_state import UnitState

EVIDENCE_SHOWN = 5


def unit_view(state: UnitState, now: float) -> dict[str, Any]:
    """The unit ready for JSON; ages in seconds before `now`."""
    unit = state.unit
    return {
        "name": unit.name,
        "cell": unit.cell,
        "url": unit.url,
        "verdict": state.case.verdict.value,
        "usable": state.is_usable(),
        "drained": state.drained,
        "hold": _hold(state.hold, now),
        "restart_suspected": state.is_restart_suspected(),
        "degraded": round(state.outlier.degraded, 3),
        "odd_answers": state.has_odd_answers(),
        "build": build_view(state),
        "since_s": _age(state.case.since, now),
        "reason": why(state),
        "evidence": [_evidence(e, now) for e in _behind(state.case)],
        "in_flight": state.in_flight,
        "max_in_flight": unit.max_in_flight,
        "weight": state.weight,
        "load": _load(state.load, now) if state.load is not None else None,
        "routing": _routing(state.costs, now),
        "models": sorted(state.models),
        "role": unit.role,
        "nodes": [{"name": node.name, "role": node.role.value} for node in unit.nodes],
    }


def unit_page(state: UnitState, board: Board, now: float, canary_s: float | None) -> dict[str, Any]:
    """`unit_view`, why it is so, and what comes next; `canary_s` as in `Moment`."""
    rules, case, quiet_s = board.rules, state.case, silent_s(state, now)
    page = unit_view(state, now)
    page["nodes"] = [node | {"news": _news(state, node["name"], now)} for node in page["nodes"]]
    return page | {
        "why": [*explain(state, Moment(now, rules, board.panic_at, canary_s)), *_shared(state, board)],
        "held_by_panic": is_held(state, board, now),
        "share": round(state.share(now, rules), 3),
        "faults": [{"node": node or None, "source": source} for node, source in sorted(case.faults)],
        "news": _news(state, None, now),
        "rank_findings": list(state.facts.ranks),
        "stacks": {name: dict(facts.stack) for name, facts in state.facts.nodes.items()},
        "engine": state.engine,
        "ranks": [
            {"rank": number, "in_flight": rank.in_flight, "running": rank.running, "waiting": rank.waiting}
            for number, rank in enumerate(state.ranks.ranks[: state.ranks.count])
        ],
        "adapters": {"bases": dict(state.adapters.bases), "loaded": state.adapters.loaded()},
        "links": links_of(board, state.unit.name, now),
        "known_answer": answer_view(state.answers, now),
        "epochs": dict(case.epochs),
        "silent_s": None if quiet_s is None else round(quiet_s, 3),
        "silent_limit_s": round(stall_limit_s(state, rules), 3),
        "next_canary_s": None if canary_s is None else round(canary_s, 3),
    }


def _shared(state: UnitState, board: Board) -> list[str]:
    """What all failing units share, for one of them."""
    return [fate.in_words() for fate in shared_fates(board) if state.unit.name in fate.units]


def _news(state: UnitState, of_node: str | None, now: float) -> dict[str, dict[str, Any]]:
    """The last evidence of each source about a node, or about the unit as a whole (None)."""
    return {
        source: {"sign": word.sign.value, "reason": word.reason, "age_s": _age(word.at, now)}
        for (node, source), word in state.last_evidence.items()
        if node == of_node
    }


def _behind(case: Case) -> list[Evidence]:
    """The last few pieces, newest first; the one that decided the verdict is always among them."""
    last = list(reversed(case.window[-EVIDENCE_SHOWN:]))
    return (
        last if case.because is None or case.because in last else [*last[: EVIDENCE_SHOWN - 1], case.because]
    )


def _hold(hold: Hold | None, now: float) -> dict[str, Any] | None:
    if hold is None:
        return None
    return {"kind": hold.kind.value, "since_s": _age(hold.since, now), "ended": bool(hold.ended_at)}


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


def _routing(costs: CostModel, now: float) -> dict[str, Any]:
    """What the router uses: measured rates, this gate's backlog there, prompts in the prefix cache."""
    rates, work, prefixes = costs.rates, costs.backlog, costs.prefixes
    return {
        "prefill_tokens_s": round(rates.prefill_tokens_s.value, 1),
        "latency_s": round(rates.latency.without_work_s(rates.prefill_tokens_s.value), 4),
        "prefill_samples": rates.prefill_tokens_s.seen,
        "step_s": round(rates.steps.at(work.batch), 5),
        "bytes_per_token": round(rates.bytes_per_token.value, 3),
        "seats": int(costs.seats.limit) if costs.seats.limit < inf else None,
        "kv_tokens": costs.kv_tokens,
        "queued_tokens": work.queued_tokens,
        "backlog_s": round(costs.backlog_s(now), 3),
        "prefix_blocks": len(prefixes),
        "prefix_blocks_max": prefixes.limit,
        "prefix_trust": round(prefixes.trust, 3),
        "error_share": round(costs.errors.share(now), 3),
    }


def _age(at: float, now: float) -> float:
    return round(now - at, 3)
