"""A unit as the admin port shows it: what is believed, the evidence behind it, and how busy it is. Pure.

`unit_view` is what the list of all units has of each; `unit_page` is all there is to know of one.
"""

from __future__ import annotations

from math import inf
from typing import Any

from cellgate.proxy.admin.explain import explain
from cellgate.proxy.admin.rotation import Moment, is_held, silent_s
from cellgate.proxy.ingress.ready import why
from cellgate.router.board import Board
from cellgate.router.cost_model import Books
from cellgate.router.nouns import Case, Evidence, Load
from cellgate.router.stall import silent_limit_s
from cellgate.router.unit_state import Desk

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
        "doubted": desk.is_doubted(),
        "degraded": round(desk.slowness.degraded, 3),
        "since_s": _age(desk.case.since, now),
        "reason": why(desk),
        "evidence": [_evidence(e, now) for e in _behind(desk.case)],
        "in_flight": desk.in_flight,
        "max_in_flight": unit.max_in_flight,
        "weight": desk.weight,
        "load": _load(desk.load, now) if desk.load is not None else None,
        "routing": _routing(desk.books, now),
        "models": sorted(desk.models),
        "nodes": [{"name": node.name, "role": node.role.value} for node in unit.nodes],
    }


def unit_page(desk: Desk, board: Board, now: float, canary_s: float | None) -> dict[str, Any]:
    """`unit_view`, why it is so, and what comes next; `canary_s` as in `Moment`."""
    rules, case, quiet_s = board.rules, desk.case, silent_s(desk, now)
    page = unit_view(desk, now)
    page["nodes"] = [node | {"news": _news(desk, node["name"], now)} for node in page["nodes"]]
    return page | {
        "why": explain(desk, Moment(now, rules, board.panic_at, canary_s)),
        "held_by_panic": is_held(desk, board, now),
        "share": round(desk.share(now, rules), 3),
        "faults": [{"node": node, "source": source} for node, source in sorted(case.faults)],
        "news": _news(desk, None, now),
        "engine": desk.engine,
        "epochs": dict(case.epochs),
        "silent_s": None if quiet_s is None else round(quiet_s, 3),
        "silent_limit_s": round(silent_limit_s(desk, rules), 3),
        "next_canary_s": None if canary_s is None else round(canary_s, 3),
    }


def _news(desk: Desk, of_node: str | None, now: float) -> dict[str, dict[str, Any]]:
    """The last word of each source about a node, or about the unit as a whole (None)."""
    return {
        source: {"sign": word.sign.value, "reason": word.reason, "age_s": _age(word.at, now)}
        for (node, source), word in desk.news.items()
        if node == of_node
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


def _routing(books: Books, now: float) -> dict[str, Any]:
    """What the router reckons with: rates as learnt, this gate's own work there, what is held of prompts."""
    rates, work, prefixes = books.rates, books.work, books.prefixes
    return {
        "prefill_tokens_s": round(rates.prefill_tokens_s.value, 1),
        "latency_s": round(rates.latency.without_work_s(rates.prefill_tokens_s.value), 4),
        "prefill_samples": rates.prefill_tokens_s.seen,
        "step_s": round(rates.steps.at(work.batch), 5),
        "bytes_per_token": round(rates.bytes_per_token.value, 3),
        "seats": int(books.seats.limit) if books.seats.limit < inf else None,
        "kv_tokens": books.kv_tokens,
        "queued_tokens": work.queued_tokens,
        "backlog_s": round(books.backlog_s(now), 3),
        "prefix_blocks": len(prefixes),
        "prefix_blocks_max": prefixes.limit,
        "prefix_trust": round(prefixes.trust, 3),
        "error_share": round(books.errors.share(now), 3),
    }


def _age(at: float, now: float) -> float:
    return round(now - at, 3)
