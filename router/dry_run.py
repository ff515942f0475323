"""What would become of an ask now, and what each unit has to do with it: for people to read. Pure.

It follows the steps of `Router.pick` and `Router.wait` without taking any: no lease, no turn of a policy, no
place in the queue. Where chance has a say (ties, slow start) it is drawn from the caller's generator. It
looks at all units, also where the router would draw a few of them, and tries none for the sake of learning.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from copy import deepcopy
from math import inf
from typing import NamedTuple

from cellgate.router.backlog import Work
from cellgate.router.board import Board
from cellgate.router.candidates import Bounds, offers
from cellgate.router.cost import Cost, Expected, terms
from cellgate.router.deficit_round_robin import Place
from cellgate.router.nouns import Ask, Candidate, Refusal, Verdict
from cellgate.router.router import Router
from cellgate.router.unit_state import Desk, Lease


class Look(NamedTuple):
    """One unit, and what the ask would cost there. `why_not` is empty for a candidate, else a word."""

    desk: Desk
    cost: Cost
    prompt_tokens: float
    cached_tokens: float
    has_room: bool
    why_not: str


class Preview(NamedTuple):
    """`best` is the candidate that ranks first, if there is one. `refusal` is None when it would get the ask;
    `wait_s` None when the ask would not wait, else for how long, as far as can be foreseen.

    `looks` are all units: candidates in their rank, then the others.
    """

    best: str | None
    refusal: Refusal | None
    wait_s: float | None
    looks: list[Look]


def preview(
    router: Router, ask: Ask, now: float, rng: random.Random, *, tried: Collection[str] = (), size: int = 0
) -> Preview:
    """What would become of a new ask with a body of `size` bytes, or of one that has failed on `tried`."""
    board, policy = router.board, deepcopy(router.policy)
    rules = router.waiting.rules
    bounds = Bounds(
        rules.backlog_s, by_seconds=policy.by_seconds, by_cache=policy.by_cache, chance=rng.random()
    )
    offered = offers(board, ask, now, tried, bounds)
    rows, refusal = offered.rows, offered.refusal
    looks = _looks(board, ask, now, tried, bounds, rows, offered.expected)
    if not rows:
        if ask.model is not None and refusal is Refusal.NO_UNIT and board.knows_model(ask.model) is False:
            refusal = Refusal.UNKNOWN_MODEL
        return Preview(None, refusal, 0.0 if refusal is Refusal.UNSURE else None, list(looks.values()))
    if not policy.by_seconds:
        rows = [row for row in rows if row.has_room] or rows
    ranked = [row.unit for row in policy.rank(ask, rows, rng)]
    order = [looks.pop(name) for name in ranked] + list(looks.values())
    timely = [look for look in order[: len(ranked)] if not _is_late(look, ask, now)]
    if not timely:
        return Preview(ranked[0], Refusal.LATE, None, order)
    best = timely[0]
    if best.has_room and (tried or not router.comes_after(ask)):
        return Preview(best.desk.unit.name, None, None, order)
    return Preview(best.desk.unit.name, *_waits(router, ask, now, best, size), order)


def cost_of(lease: Lease) -> Cost:
    """What the attempt of a lease was taken to cost, to be asked for as soon as it has been opened."""
    books, bet, now = lease.desk.books, lease.bet, lease.opened_at
    work, before, expected = books.work, Work(), bet.expected
    own = max(bet.prompt_tokens - bet.cached_tokens, 1)
    if work.queued > 1:
        before.front_tokens, before.front_since = work.front_tokens, work.front_since
    before.queued_tokens = work.queued_tokens - own
    before.batch = work.batch - 1
    before.kv_tokens = work.kv_tokens - own - int(expected.answer_tokens)
    spared = books.spared_tokens(bet.held_blocks, expected)
    return Cost(
        *terms(
            books.forecast, before, bet.prompt_tokens, bet.cached_tokens, spared, expected.answer_tokens, now
        )
    )


def _is_late(look: Look, ask: Ask, now: float) -> bool:
    return ask.deadline_at < inf and look.desk.books.is_too_slow(ask, look.cost.ttft_s, now)


def _looks(
    board: Board,
    ask: Ask,
    now: float,
    tried: Collection[str],
    bounds: Bounds,
    rows: list[Candidate],
    expected: Expected,
) -> dict[str, Look]:
    offered = {row.unit: row for row in rows}
    looks = {}
    for name, desk in board.desks.items():
        held = board.held(desk, ask.blocks) if bounds.by_cache else 0
        quote, row = desk.books.quote(ask, held, expected, now), offered.get(name)
        has_room = desk.has_place(now, 0.0) and desk.books.backlog_s(now) <= bounds.backlog_s
        why_not = "" if row is not None else _why_not(desk, ask, now, tried)
        looks[name] = Look(
            desk, Cost(*quote.terms), quote.prompt_tokens, quote.cached_tokens, has_room, why_not
        )
    return looks


def _why_not(desk: Desk, ask: Ask, now: float, tried: Collection[str]) -> str:
    """Why a unit is no candidate; the last four are, when no other has room."""
    if desk.drained:
        return "drained"
    if not desk.is_usable():
        return desk.case.verdict.value
    if desk.unit.name in tried:
        return "tried"
    if ask.unit is not None and ask.unit != desk.unit.name:
        return "bound_elsewhere"
    if not desk.serves(ask):
        return "model"
    if desk.is_doubted():
        return "doubted"
    if not desk.has_place(now, 0.0):
        return "full"
    if desk.case.verdict is Verdict.SUSPECT:
        return "suspect"
    return "cooling" if desk.cool_until > now else "slow_start"


def _waits(router: Router, ask: Ask, now: float, best: Look, size: int) -> tuple[Refusal, float | None]:
    """Whether the queue would take it, and for how long."""
    pool = router.board.pools.of(ask.model)
    fair, rules, tokens_s = router.waiting.pool(pool).fair, router.waiting.rules, router.board.tokens_s(pool)
    tokens = max(int(best.prompt_tokens - best.cached_tokens), 1)
    expires_at = min(now + rules.max_wait_s, ask.deadline_at)
    place: Place[None] = Place(
        None,
        ask.tenant,
        ask.priority,
        tokens,
        size,
        now,
        expires_at,
        None,
        (rules.due_at(tokens, now), 1 << 62),
    )
    wait_s = fair.wait_s(place, tokens_s)  # type: ignore[arg-type]
    if now + wait_s > expires_at and router.board.is_sure_of(pool):
        return Refusal.LATE, None
    # With that many, it may still push out the last one of who holds more than its share.
    is_full = len(fair) >= rules.limit or fair.size + size > rules.limit_bytes
    return Refusal.FULL, None if is_full or wait_s == inf else wait_s
