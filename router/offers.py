"""What the units offer an ask: one row each, in predicted seconds, for a policy to rank. Pure.

Units that cool down or come up slowly are offered only when no other has room, SUSPECT ones only when no
other has a place. An ask may wait for a unit that has many prompts to compute: how long that takes can be
told. For one that has no place left it may not as long as others have one: nobody knows how long an answer
will be.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from router.board import Board
from router.nouns import Ask, Candidate, Refusal, Verdict

_UP = Verdict.UP
_USABLE = (_UP, Verdict.SUSPECT)
_NO_UNIT = Refusal.NO_UNIT
_new = tuple.__new__
"""What a named tuple's own constructor calls: half as long for a row."""


class Bounds(NamedTuple):
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
    desks, others, model, only = board.desks, board.others, ask.model, ask.unit
    slow_start_s, (backlog_s, wait_s, overcommit, chance) = board.rules.slow_start_s, bounds
    # Desk.is_usable, serves, is_doubted, has_place and steady_weight, without the calls: this is for each
    # unit and ask, and a call takes as long as all that it would look up.
    spread = 1.0 + overcommit
    for name, desk in desks.items() if among is None else [(n, desks[n]) for n in among if n in desks]:
        verdict, models = desk.case.verdict, desk.models
        if verdict not in _USABLE or desk.drained or desk.retired or name in tried:
            continue
        if (model is not None and models and model not in models) or (only is not None and only != name):
            continue
        if desk.doubted_at >= desk.life_at:
            unsure = True
            continue
        in_flight = len(desk.leases)
        has_place = in_flight < desk.limit * spread and now >= desk.shut_until
        cost_s, blind_s, busy_s = desk.books.offer(ask, now)
        has_room = has_place and (busy_s <= backlog_s or overcommit > 0.0)
        if not has_room:
            cost_s += wait_s
            blind_s += wait_s
        # What the engine says counts others' requests as well, only older.
        foreign = max(desk.foreign, others[name].in_flight) if name in others else desk.foreign
        weight = desk.weight * (1.0 - desk.slowness.degraded)
        row = _new(Candidate, (name, in_flight, in_flight + foreign, weight, cost_s, blind_s, has_room))
        if not has_place:
            full.append(row)
        elif verdict is not _UP:
            suspect.append(row)
        elif desk.cool_until > now or (
            now - desk.risen_at < slow_start_s and desk.ramp(now, board.rules) < chance
        ):
            cooling.append(row)
        else:
            up.append(row)
    refusal = Refusal.UNSURE if unsure else _NO_UNIT
    for tier in (up, cooling):
        for row in tier:
            if row[6]:
                return tier, refusal
    return up or cooling or suspect or full, refusal
