"""What units learn of each other: estimates from peers, costs beside others, and who is slower than its cell.

In this order: `Learning`, `foresee`, `comparing_speeds`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from math import inf

from cellgate.router.attention import USUAL_S, Attention
from cellgate.router.cost import cost_terms, usual_of, written_part
from cellgate.router.cost_model import ALL_BLOCKS, RATES, RemoteLoad, expected_s
from cellgate.router.error_share import ALSO_OF_OTHERS_S, Errors, compare_errors
from cellgate.router.learning import Peer, learn_of_peers, learning_of_peers
from cellgate.router.outliers import Speed, compare, fade
from cellgate.router.unit_state import UnitState

PEERS_S = 1.0
"""How often units take over estimates from their peers."""
NEW_RATES_S, ROUND_S, PRICED_S = 10.0, 240.0, 120.0
"""The same in a large fleet: where rates of some are new, where none are; and how often all are priced."""
WATCHED_AT_ONCE = 16
"""Of so many units gaps are counted in one look, first of those that have shown the least."""
COSTS_AT_ONCE = 64
"""Up to so many units, costs are computed again whenever one comes up. When the units of a larger fleet come
up together, that would take the loop for seconds: they wait for their turn.
"""


class Learning:
    """Has units take over estimates from peers, once in PEERS_S seconds; and at once when another rate of a
    unit was measured at all: beside that, the guesses for the others may be ten times off, and the rest of a
    burst would go to this one. In a large fleet rates that were measured for the first time are looked for
    every NEW_RATES_S seconds, and at once where no unit had measured them; otherwise units learn as often as
    they take turns, some on each tick. Then those at rest, too, are priced by what they have learnt.
    """

    def __init__(self) -> None:
        self._at = self._look_at = self._priced_at = -inf
        self._guesses = 0
        """How many rates of units were never measured, the last time."""
        self._fewest = RATES
        """In a large fleet: of the unit that has measured the most."""
        self._going_on: Iterator[None] | None = None
        """In a large fleet: what is left of it."""

    def tick(self, watched: Attention, now: float) -> None:
        """Learn, if it is due. To be called before costs are computed."""
        states = watched.fleet.values()
        if watched.is_large:
            self._tick_of_many(watched, now)
            return
        guesses = sum([state.costs.guesses() for state in states])
        if now - self._at >= PEERS_S or guesses < self._guesses:
            _watch(states)
            learn_of_peers([_peer(state) for state in states], now - max(self._at, 0.0))
            self._at = now
        self._guesses = guesses

    def _tick_of_many(self, watched: Attention, now: float) -> None:
        if self._going_on is not None:
            if next(self._going_on, self) is self:
                self._going_on = None
            return
        fewest = min([state.costs.guesses() for state in watched.due], default=RATES)
        if now < self._look_at and fewest >= self._fewest:
            return
        self._look_at, self._fewest = now + NEW_RATES_S, min(fewest, self._fewest)
        _watch(watched.units)
        new = [state.costs for state in watched.units if state.costs.guesses() != state.costs.known_guesses]
        for costs in new:
            costs.known_guesses = costs.guesses()
        if new or now - self._at >= ROUND_S:
            is_first, elapsed_s, self._at = self._at == -inf, now - max(self._at, 0.0), now
            peers = [_peer(state) for state in watched.fleet.values()]
            if is_first:
                learn_of_peers(peers, elapsed_s)
            else:
                self._going_on = chain(learning_of_peers(peers, elapsed_s), _pricing(watched))
        elif now - self._priced_at >= PRICED_S:
            self._priced_at, self._going_on = now, _pricing(watched)


def _peer(state: UnitState) -> Peer:
    return Peer(state.base_models(), state.weight, state.costs.rates)


def _watch(states: Iterable[UnitState]) -> None:
    """Have units of which no stream has ended lately learn steps from those that flow: an answer may take a
    minute, and a unit that was slow gets few of them. A gap is that between two events, which may bring
    several tokens.
    """
    stale = [state for state in states if state.leases and state.costs.rates.steps.is_stale()]
    stale.sort(key=lambda state: state.costs.rates.steps.seen)
    for state in stale[:WATCHED_AT_ONCE]:
        if state.speed() is not None:
            rates = state.costs.rates
            rates.steps.watch(state.step_times.mean_gap_s() / rates.event_tokens.value, state.batch)


def foresee(watched: Attention, others: Mapping[str, RemoteLoad], now: float) -> None:
    """Recompute the slow parts of the cost of these units. `others`: requests of other gates at each."""
    units = watched.fleet.values()
    is_due = not watched.is_large or watched.usual is None or now - watched.usual_at >= USUAL_S
    due = watched.due if watched.usual is not None or not watched.is_large else list(units)
    others_s = _others_s(watched.units, others, now) if others else {}
    _compare_errors(watched.units, now)
    is_sized, more = watched.usual is not None and watched.usual.is_sized, 0.0
    for state in due:
        more -= written_part(state.costs.facts, is_sized=is_sized)
        there, other_s = others.get(state.unit.name), others_s.get(state.unit.name, 0.0)
        state.costs.size(state.load, ALL_BLOCKS // max(len(units), 1))
        state.costs.learn_facts(state.load, there, other_s, state.far_s, now)
        more += written_part(state.costs.facts, is_sized=is_sized)
    if is_due or watched.usual is None:
        watched.usual, watched.usual_at = usual_of([state.costs.facts for state in units]), now
    else:
        # After a quiet time what all write grows a thousand times within seconds.
        watched.usual = watched.usual._replace(written=max(watched.usual.written + more / len(units), 0.0))
    facts = [state.costs.facts for state in due]
    for state, one in zip(due, cost_terms(facts, watched.usual), strict=True):
        state.costs.set_terms(one)


def _pricing(watched: Attention) -> Iterator[None]:
    """Price the units of a large fleet anew that know better than when they were priced, some at a time: who
    is at rest, and seems dear, would not be looked at.
    """
    states = list(watched.fleet.values())
    for at in range(0, len(states), COSTS_AT_ONCE):
        if (usual := watched.usual) is not None:
            some = [each.costs for each in states[at : at + COSTS_AT_ONCE] if each.costs.is_misjudged(usual)]
            for costs, one in zip(some, cost_terms([costs.facts for costs in some], usual), strict=True):
                costs.set_terms(one)
        yield


def _compare_errors(states: Iterable[UnitState], now: float) -> None:
    """Compare units with each other that serve the same, where several have failed lately."""
    pools: dict[tuple[str | None, frozenset[str]], list[tuple[Errors, int]]] = {}
    since = now - ALSO_OF_OTHERS_S
    # Nearly always none.
    failing = [state for state in states if state.costs.errors.failed_at >= since]
    counts = Counter([(state.unit.role, state.base_models()) for state in failing])
    kinds = {kind for kind, count in counts.items() if count > 1}
    for state in states if kinds else ():
        kind = state.unit.role, state.base_models()
        if kind in kinds and state.is_usable():
            pools.setdefault(kind, []).append((state.costs.errors, state.in_flight))
    for pool in pools.values():
        compare_errors(pool, now)


def _others_s(states: Iterable[UnitState], others: Mapping[str, RemoteLoad], now: float) -> dict[str, float]:
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


COMPARED_AT_ONCE, COMPARED_WITH = 128, 32
"""So many units are compared on a tick, each with so many others of its cell: all with all would stop the
loop for 0.1 s with 256 units at work, and for 1.5 s with 1,000.
"""


def comparing_speeds(states: Collection[UnitState]) -> Iterator[list[UnitState]]:
    """Compare the units of each cell with each other, some at each step; gives those whose `degraded` came or
    went.
    """
    each = _comparing(states)
    while step := list(islice(each, COMPARED_AT_ONCE)):
        yield [state for state, has_changed in step if has_changed]


def _comparing(states: Collection[UnitState]) -> Iterator[tuple[UnitState, bool]]:
    """Each unit when its speed is read, and when it is compared: whether its `degraded` came or went."""
    cells: dict[str, list[tuple[UnitState, Speed]]] = {}
    for state in states:
        was_degraded = bool(state.outlier.degraded)
        if (speed := state.speed()) is not None:
            cells.setdefault(state.unit.cell, []).append((state, speed))
        elif was_degraded:
            state.outlier = fade(state.outlier)
        yield state, was_degraded is not bool(state.outlier.degraded)
    for rows in cells.values():
        for number, (state, speed) in enumerate(rows if len(rows) > 1 else ()):
            before, state.outlier = state.outlier, compare(state.outlier, speed, _some_others(rows, number))
            yield state, bool(before.degraded) is not bool(state.outlier.degraded)


def _some_others(rows: Sequence[tuple[UnitState, Speed]], own: int) -> list[Speed]:
    """The speeds of other units; of many some, from everywhere among them."""
    step = max(1, len(rows) // (COMPARED_WITH + 1))
    count = min(COMPARED_WITH, len(rows) - 1)
    return [rows[(own + turn * step) % len(rows)][1] for turn in range(1, count + 1)]
