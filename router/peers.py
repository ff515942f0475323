"""Units beside each other: what each costs, what they learn of each other, who is slower than its cell."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from cellgate.router.cost import COSTS, forecast
from cellgate.router.cost_model import ALL_BLOCKS, Elsewhere
from cellgate.router.nouns import Rules
from cellgate.router.outliers import Speed, compare, fade
from cellgate.router.rates import learn_of_peers
from cellgate.router.unit_state import Desk
from cellgate.router.weights import shares


def learn(desks: Iterable[Desk], since_s: float) -> None:
    """Let units take over from peers what they have not seen themselves, `since_s` after the last time."""
    learn_of_peers([((d.models, d.weight, d.unit.prefill_tokens_s), d.books.rates) for d in desks], since_s)


def foresee(desks: Collection[Desk], others: Mapping[str, Elsewhere], now: float) -> None:
    """Work out anew what changes slowly in the cost of each unit. `others`: requests of other gates there."""
    share = ALL_BLOCKS // max(len(desks), 1)
    for desk in desks:
        desk.books.size(desk.unit, desk.load, share)
    facts = [
        d.books.facts(d.load, others.get(d.unit.name), part, d.far_s, now)
        for d, part in zip(desks, shares([(d.weight, d.books.rates.speed) for d in desks]), strict=True)
    ]
    for desk, one in zip(desks, forecast(facts, COSTS), strict=True):
        desk.books.foresee(one)


def compare_speeds(desks: Collection[Desk], rules: Rules) -> list[Desk]:
    """Compare the units of each cell with each other; returns those whose `degraded` came or went."""
    cells: dict[str, list[tuple[Desk, Speed]]] = {}
    for desk in desks:
        if (speed := desk.speed()) is not None:
            cells.setdefault(desk.unit.cell, []).append((desk, speed))
    changed = [desk for desk in desks if desk.slowness.degraded and desk.speed() is None]
    for desk in changed:
        desk.slowness = fade(desk.slowness)
    changed = [desk for desk in changed if not desk.slowness.degraded]
    for rows in cells.values():
        for desk, speed in rows if len(rows) > 1 else ():
            others = [other for known, other in rows if known is not desk]
            before, desk.slowness = desk.slowness, compare(desk.slowness, speed, others, rules)
            if bool(before.degraded) is not bool(desk.slowness.degraded):
                changed.append(desk)
    return changed
