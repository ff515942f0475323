"""A dry run of an ask: what would happen now, and the state of each unit for it. Pure.

It follows the steps of `Router.pick` and `Router.wait` without side effects: no lease, no turn of a policy,
no place in the queue. Random choices (ties, slow start) use the caller's generator. It covers all units, also
where the router would sample some, and never explores.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from copy import deepcopy
from math import inf
from typing import NamedTuple

from cellgate.router.backlog import Backlog
from cellgate.router.board import Board
from cellgate.router.cost import Cost, Expected, terms
from cellgate.router.nouns import Ask, Candidate, Refusal, Verdict
from cellgate.router.pick import Bounds, Router, adapter_s, find_candidates
from cellgate.router.prefill_decode import Weighed
from cellgate.router.queue import Entry
from cellgate.router.unit_state import Lease, UnitState


class UnitCost(NamedTuple):
    """One unit, and the cost of the ask there. `why_not` is empty for a candidate, else the reason.

    `adapter_s` is what loading its LoRA adapter costs, on top of `cost`.
    """

    unit_state: UnitState
    cost: Cost
    adapter_s: float
    prompt_tokens: float
    cached_tokens: float
    has_room: bool
    why_not: str
    weighed: Weighed | None = None
    """Of a candidate: what it costs if another unit computes the prompt."""


class DryRun(NamedTuple):
    """`best` is the candidate that ranks first, if there is one. `refusal` is None when it would get the ask;
    `wait_s` None when the ask would not wait, else for how long, as far as can be foreseen.

    `looks` are all units: candidates in their rank, then the others.
    """

    best: str | None
    refusal: Refusal | None
    wait_s: float | None
    units: list[UnitCost]


def dry_run(
    router: Router, ask: Ask, now: float, rng: random.Random, *, tried: Collection[str] = (), size: int = 0
) -> DryRun:
    """The result for a new ask with a body of `size` bytes, or for one that has failed on `tried`."""
    board, policy = router.board, deepcopy(router.policy)
    rules = router.queue.rules
    bounds = Bounds(rules.backlog_s, by_seconds=policy.by_seconds, by_cache=policy.by_cache)
    found = find_candidates(board, ask, now, tried, bounds, chance=rng.random())
    rows, refusal = found.rows, found.refusal
    unit_costs = _unit_costs(board, ask, now, tried, bounds, rows, found.expected)
    if not rows:
        if ask.model is not None and refusal is Refusal.NO_UNIT and board.knows_model(ask.model) is False:
            refusal = Refusal.UNKNOWN_MODEL
        waits = refusal in (Refusal.UNSURE, Refusal.ON_HOLD)
        return DryRun(None, refusal, 0.0 if waits else None, list(unit_costs.values()))
    if not policy.by_seconds:
        rows = [row for row in rows if row.has_room] or rows
    ranked = [row.unit for row in policy.rank(ask, rows, rng)]
    order = [unit_costs.pop(name) for name in ranked] + list(unit_costs.values())
    timely = [unit_cost for unit_cost in order[: len(ranked)] if not _is_late(unit_cost, ask, now)]
    if not timely:
        return DryRun(ranked[0], Refusal.LATE, None, order)
    best = timely[0]
    if best.has_room and (tried or not router.comes_after(ask)):
        return DryRun(best.unit_state.unit.name, None, None, order)
    return DryRun(best.unit_state.unit.name, *_waits(router, ask, now, best, size), order)


def cost_of(lease: Lease) -> Cost:
    """The predicted cost of a lease; must be called as soon as it was opened."""
    costs, job, now = lease.unit_state.costs, lease.job, lease.opened_at
    backlog, before = costs.backlog, Backlog()
    if backlog.queued > 1:
        before.front_tokens, before.front_since = backlog.front_tokens, backlog.front_since
    before.queued_tokens = backlog.queued_tokens - job.uncached_tokens
    before.batch = backlog.batch - 1
    before.kv_tokens = backlog.kv_tokens - job.kv_tokens
    expected = Expected(job.answer_tokens, job.shared_blocks, job.charged)
    spared = costs.spared_tokens(job.held_blocks, expected)
    return Cost(
        *terms(
            *(costs.forecast, before, job.prompt_tokens, job.cached_tokens, spared, job.answer_tokens, now)
        )
    )


def _is_late(unit_cost: UnitCost, ask: Ask, now: float) -> bool:
    return ask.deadline_at < inf and unit_cost.unit_state.costs.is_too_slow(ask, unit_cost.cost.ttft_s, now)


def _unit_costs(
    board: Board,
    ask: Ask,
    now: float,
    tried: Collection[str],
    bounds: Bounds,
    rows: list[Candidate],
    expected: Expected,
) -> dict[str, UnitCost]:
    candidates = {row.unit: row for row in rows}
    unit_costs = {}
    for name, state in board.units.items():
        held = board.held(state, ask.blocks) if bounds.by_cache else 0
        quote, row = state.costs.quote(ask, held, expected, now), candidates.get(name)
        is_free = state.unit.role == "prefill" or state.costs.backlog_s(now) <= bounds.backlog_s
        has_room = state.has_room(now, 0.0) and is_free
        why_not = "" if row is not None else _why_not(state, ask, now, tried)
        unit_costs[name] = UnitCost(
            state,
            Cost(*quote.terms),
            adapter_s(state, ask, expected),
            quote.prompt_tokens,
            quote.cached_tokens,
            has_room,
            why_not,
            _weigh(board, ask, row, quote.terms[0], expected, now) if row is not None else None,
        )
    return unit_costs


def _weigh(
    board: Board, ask: Ask, row: Candidate, whole_s: float, expected: Expected, now: float
) -> Weighed | None:
    if not board.pairs.prefillers:
        return None
    # A row that would be split has that price already.
    whole = row._replace(cost_s=whole_s)
    return board.pairs.weigh(ask, whole, board.units[row.unit], expected, now)


def _why_not(state: UnitState, ask: Ask, now: float, tried: Collection[str]) -> str:
    """Why a unit is no candidate; the last four are, when no other has room."""
    if state.drained:
        return "drained"
    if state.hold is not None:
        return "on_hold"
    if not state.is_usable():
        return state.case.verdict.value
    if state.unit.name in tried:
        return "tried"
    if ask.unit is not None and ask.unit != state.unit.name:
        return "bound_elsewhere"
    if not state.serves(ask):
        return "model"
    if state.is_restart_suspected():
        return "restart_suspected"
    if not state.has_room(now, 0.0):
        return "full"
    if state.case.verdict is Verdict.SUSPECT:
        return "suspect"
    return "cooling" if state.cool_until > now else "slow_start"


def _waits(router: Router, ask: Ask, now: float, best: UnitCost, size: int) -> tuple[Refusal, float | None]:
    """Whether the queue would take it, and for how long."""
    pool = router.board.pools.of(ask.model)
    fair, rules, tokens_s = (
        router.queue.pool(pool).fair_queue,
        router.queue.rules,
        router.board.tokens_s(pool),
    )
    tokens = max(int(best.prompt_tokens - best.cached_tokens), 1)
    expires_at = min(now + rules.max_wait_s, ask.deadline_at)
    entry: Entry[None] = Entry(
        None,
        ask.tenant,
        ask.priority,
        tokens,
        size,
        now,
        expires_at,
        None,
        (0, rules.due_at(tokens, now), 1 << 62),
    )
    wait_s = fair.wait_s(entry, tokens_s)  # type: ignore[arg-type]
    if now + wait_s > expires_at and router.board.is_sure_of(pool):
        return Refusal.LATE, None
    # In a full queue it may still displace the last ask of a tenant with more than its share.
    is_full = len(fair) >= rules.limit or fair.size + size > rules.limit_bytes
    return Refusal.FULL, None if is_full or wait_s == inf else wait_s
