"""What the units offer an ask: one row each, in predicted seconds, for a policy to rank. Pure.

Units that are SUSPECT, cool down or come up slowly are offered only when no other has room, SUSPECT ones
last. An ask may wait for a unit that has many prompts to compute: how long that takes can be told. For one
that has no place left it may not as long as others have one: nobody knows how long an answer will be.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from router.board import Board
from router.books import NOTHING_ELSEWHERE
from router.desk import Desk
from router.nouns import Ask, Candidate, Refusal, Verdict


@dataclass(frozen=True, slots=True)
class Bounds:
    """What counts as room. A unit with more than `backlog_s` seconds of our prompts to compute has none.

    `wait_s` is added to the cost of units without room: so long others come before the ask here. With
    `overcommit` (a share of max_in_flight) only places count, for work that is lost otherwise.
    """

    backlog_s: float
    wait_s: float = 0.0
    overcommit: float = 0.0
    chance: float = 0.0
    """0 to 1, drawn for the ask: a unit in slow start is considered for a share of them only."""


def offers(
    board: Board,
    ask: Ask,
    now: float,
    tried: Iterable[str],
    bounds: Bounds,
    among: Iterable[str] | None = None,
) -> tuple[list[Candidate], Refusal]:
    """The rows of the first kind of units of which one has room, and what to say when there is no row.

    `among`: only these are looked at.
    """
    up: list[Candidate] = []
    cooling: list[Candidate] = []
    suspect: list[Candidate] = []
    full: list[Candidate] = []
    unsure = False
    desks = board.desks
    for name, desk in desks.items() if among is None else [(n, desks[n]) for n in among if n in desks]:
        if not desk.is_usable() or name in tried or not desk.serves(ask):
            continue
        if desk.is_doubted():
            unsure = True
            continue
        has_place = desk.has_place(now, bounds.overcommit)
        row = _row(board, desk, ask, now, bounds, has_place=has_place)
        if not has_place:
            full.append(row)
        elif desk.case.verdict is not Verdict.UP:
            suspect.append(row)
        elif desk.cool_until > now or desk.ramp(now, board.rules) < bounds.chance:
            cooling.append(row)
        else:
            up.append(row)
    tiers = [tier for tier in (up, cooling, suspect, full) if tier]
    rows = next((tier for tier in tiers if any(row.has_room for row in tier)), tiers[0] if tiers else [])
    return rows, Refusal.UNSURE if unsure else Refusal.NO_UNIT


def _row(board: Board, desk: Desk, ask: Ask, now: float, bounds: Bounds, *, has_place: bool) -> Candidate:
    name, books, in_flight = desk.unit.name, desk.books, len(desk.leases)
    quote = books.quote(ask, now)
    cost_s, cached_tokens = quote.terms[0], quote.cached_tokens
    has_room = has_place and (bounds.overcommit > 0.0 or books.backlog_s(now) <= bounds.backlog_s)
    if not has_room:
        cost_s += bounds.wait_s
    blind_s = cost_s
    if cached_tokens:
        blind_s += cached_tokens * books.forecast.token_s * (1.0 + books.forecast.evict_share)
    # What the engine says counts others' requests as well, only older.
    load = in_flight + max(desk.foreign, board.others.get(name, NOTHING_ELSEWHERE).in_flight)
    return Candidate(name, in_flight, load, desk.steady_weight, cost_s, blind_s, has_room)
