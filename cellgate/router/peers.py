"""Compares units: their costs, estimates from peers, and units that are slower than their cell."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice

from cellgate.router.cost import COSTS, forecast
from cellgate.router.cost_model import ALL_BLOCKS
from cellgate.router.nouns import Rules
from cellgate.router.other_gates import Elsewhere, expected_s
from cellgate.router.outliers import Speed, compare, fade
from cellgate.router.peer_rates import Peer, learn_of_peers
from cellgate.router.unit_state import UnitState

PEERS_S = 1.0
"""How often units take over estimates from their peers."""
AT_ONCE = 64
"""Up to so many units, costs are computed anew whenever one comes up. When the units of a larger fleet come
up together, that would take the loop for seconds: they wait for the next tick.
"""
TURNS = 4
"""A unit without requests in a larger fleet is priced once in so many ticks."""


class Learning:
    """Has units take over estimates from peers, once in PEERS_S seconds; and at once when another rate of a
    unit was measured at all: beside that, the guesses for the others may be ten times off, and the rest of a
    burst would go to this one.
    """

    def __init__(self) -> None:
        self._at = 0.0
        self._guesses = 0
        """How many rates of units were never measured, the last time."""

    def tick(self, states: Collection[UnitState], now: float) -> None:
        """Learn, if it is due. To be called before costs are computed."""
        guesses = self._guesses
        if len(states) <= AT_ONCE:
            guesses = sum(len(state.costs.guessed()) for state in states)
        if now - self._at >= PEERS_S or guesses < self._guesses:
            _watch(states)
            learn_of_peers([_peer(state) for state in states], now - self._at)
            self._at = now
        self._guesses = guesses


def _peer(state: UnitState) -> Peer:
    return Peer((state.base_models(), state.unit.prefill_tokens_s), state.weight, state.costs.rates)


def _watch(states: Iterable[UnitState]) -> None:
    """Have units without a measured step learn one from the gaps of streams that have not ended yet: the
    first answers may take a minute.
    """
    new = (state for state in states if state.leases and not state.costs.rates.steps.seen)
    for state in islice(new, AT_ONCE):
        if (speed := state.speed()) is not None:
            state.costs.rates.steps.learn(speed.gap_s, speed.batch)


def foresee(states: Collection[UnitState], others: Mapping[str, Elsewhere], now: float) -> None:
    """Recompute the slow parts of the cost of each unit. `others`: requests of other gates there.

    Of a large fleet, units without requests take turns.
    """
    share, turn = ALL_BLOCKS // max(len(states), 1), int(now * TURNS) % TURNS
    others_s = _others_s(states, others, now) if others else {}
    due, facts = [], []
    for place, state in enumerate(states):
        costs, there = state.costs, others.get(state.unit.name)
        in_use = bool(state.leases) or (there is not None and there.in_flight > 0)
        if in_use or len(states) <= AT_ONCE or place % TURNS == turn:
            costs.size(state.unit, state.load, share)
            costs.learn_facts(state.load, there, others_s.get(state.unit.name, 0.0), state.far_s, now)
            due.append((place, costs))
        facts.append(costs.facts)
    for (_, costs), one in zip(due, forecast(facts, COSTS, [place for place, _ in due]), strict=True):
        costs.set_forecast(one)


def _others_s(states: Iterable[UnitState], others: Mapping[str, Elsewhere], now: float) -> dict[str, float]:
    """Seconds of other gates' prompts at each unit that is in rotation."""
    pools: dict[tuple[str | None, frozenset[str]], list[UnitState]] = {}
    for state in states:
        if state.is_usable():
            pools.setdefault((state.unit.role, state.base_models()), []).append(state)
    found: dict[str, float] = {}
    for pool in pools.values():
        lines = [state.costs.line(others.get(state.unit.name), now) for state in pool]
        found.update(zip((state.unit.name for state in pool), expected_s(lines), strict=True))
    return found


def compare_speeds(states: Collection[UnitState], rules: Rules) -> list[UnitState]:
    """Compare the units of each cell with each other; returns those whose `degraded` came or went."""
    cells: dict[str, list[tuple[UnitState, Speed]]] = {}
    for state in states:
        if (speed := state.speed()) is not None:
            cells.setdefault(state.unit.cell, []).append((state, speed))
    changed = [state for state in states if state.outlier.degraded and state.speed() is None]
    for state in changed:
        state.outlier = fade(state.outlier)
    changed = [state for state in changed if not state.outlier.degraded]
    for rows in cells.values():
        for state, speed in rows if len(rows) > 1 else ():
            others = [other for known, other in rows if known is not state]
            before, state.outlier = state.outlier, compare(state.outlier, speed, others, rules)
            if bool(before.degraded) is not bool(state.outlier.degraded):
                changed.append(state)
    return changed
