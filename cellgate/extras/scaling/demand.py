"""The demand of a pool: how long requests would wait with one unit more or fewer, by replaying the last ones.
Pure.

A unit of the replay computes one prompt after the other, and decodes as many sequences as it has seats. A
request goes to the unit that can begin first. What a step of decoding takes depends on how many sequences
share it (router/learning.py), and they are fewer with more units. The result is scaled by how far the same
replay, with as many units as there are, is from what was measured. `python -m loadtests.gym.scaling` compares
it with what comes true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from math import inf
from typing import NamedTuple

from cellgate.router.cost_model import BLOCK_BYTES
from cellgate.router.learning import Steps
from cellgate.router.unit_state import UnitState

WINDOW_S = 300.0
"""Older requests are not replayed."""
SAMPLED = 64
"""Of more units than these, every second, third ... says what they can do on average."""
ENOUGH = 20
"""Fewer requests predict nothing."""
SCALING_SHARE = 0.9
"""The quantile of what is predicted."""
CORRECTION_MOST = 4.0
"""By how much a replay is scaled at most, up or down."""
CALM = 0.7
"""The saturation up to which units may be left to fewer."""
AT_ONCE_S = 0.001
"""Between the first token and the end of a plain answer there is less."""
_SCALING_ROUNDS = 8
"""Batch and step agree to a few percent after so many."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The requests of a pool, in the order in which they came, and what its units can do.

    `step_s` is what a step takes with so many sequences, `latency_s` the time of a first token without work,
    `measured_s` the quantile of the waits as they were; None: not known.
    """

    arrivals: Sequence[Arrival]
    units: int
    slots: int
    step_s: Callable[[float], float]
    latency_s: float
    measured_s: float | None


class AnsweredRequest(NamedTuple):
    """A request that was answered: when its attempt was opened, showed its first token and ended, the tokens
    of its prompt that had to be computed, and its unit. `waited_s`: how long it had waited in the gate.
    """

    opened_at: float
    first_at: float
    ended_at: float
    uncached_tokens: int
    unit: str
    waited_s: float = 0.0

    @property
    def came_at(self) -> float:
        return self.opened_at - self.waited_s

    @property
    def wait_s(self) -> float:
        """Until its first token."""
        return self.first_at - self.came_at

    @property
    def is_stream(self) -> bool:
        """Whether it shows when its first token came: a plain answer comes at once."""
        return self.first_at < self.ended_at - AT_ONCE_S


class Arrival(NamedTuple):
    """A request of the replay: the seconds for its prompt, and those until its answer ends after that."""

    at: float
    prefill_s: float
    decode_s: float


class Waits(NamedTuple):
    """The 90th percentile of the time to a first token, in seconds, by the number of units; None: unknown."""

    fewer: float | None = None
    now: float | None = None
    more: float | None = None


def waits(demand: Demand) -> Waits:
    """With one unit fewer, as many as there are, and one more."""
    *_, found = waits_in_parts(demand)
    return found


def waits_in_parts(demand: Demand) -> Iterator[Waits]:
    """The same, one replay at a time; the last one is the result."""
    if len(demand.arrivals) < ENOUGH or not demand.units:
        yield Waits()
        return
    now_s = replay_s(demand, demand.units)
    factor = demand.measured_s / now_s if demand.measured_s is not None and now_s else 1.0
    factor = min(max(factor, 1.0 / CORRECTION_MOST), CORRECTION_MOST)
    found = Waits(now=demand.measured_s if demand.measured_s is not None else now_s)
    yield found
    if demand.units > 1:
        found = found._replace(fewer=replay_s(demand, demand.units - 1) * factor)
        yield found
    yield found._replace(more=replay_s(demand, demand.units + 1) * factor)


def replay_s(demand: Demand, units: int) -> float:
    """The quantile of the waits on so many units."""
    slower = _slower(demand, units)
    # When each unit can begin with another prompt, and the ends of what it decodes.
    free = [(-inf, unit) for unit in range(units)]
    ends: list[list[float]] = [[] for _ in range(units)]
    found = []
    for at, prefill_s, decode_s in demand.arrivals:
        free_at, unit = heappop(free)
        first_at = max(at, free_at) + prefill_s
        found.append(first_at - at)
        decoding, end_at = ends[unit], first_at + decode_s * slower
        if len(decoding) < demand.slots:
            heappush(decoding, end_at)
        else:
            heapreplace(decoding, end_at)
        slot_at = decoding[0] if len(decoding) == demand.slots else -inf
        heappush(free, (max(first_at, slot_at), unit))
    return quantile(found) + demand.latency_s


def _slower(demand: Demand, units: int) -> float:
    """How much longer decoding takes with so many units: the batch and its steps, until they agree."""
    arrivals = demand.arrivals
    span_s = max(arrivals[-1].at - arrivals[0].at, 1.0)
    sequences = sum(arrival.decode_s for arrival in arrivals) / span_s
    before_s = demand.step_s(min(sequences / demand.units, demand.slots))
    factor = 1.0
    for _ in range(_SCALING_ROUNDS if before_s else 0):
        factor = demand.step_s(min(sequences * factor / units, demand.slots)) / before_s
    return factor


def quantile(values: Iterable[float]) -> float:
    """That of `SHARE`; 0 without values."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * SCALING_SHARE), len(ordered) - 1)] if ordered else 0.0


def demand_of(served: Iterable[AnsweredRequest], states: Sequence[UnitState], now: float) -> Demand:
    """What came in the last minutes for these units of one pool, which are usable."""
    names = {state.unit.name for state in states}
    recent = [each for each in served if each.unit in names and now - each.came_at <= WINDOW_S]
    recent.sort(key=lambda each: each.came_at)
    some = states[:: len(states) // SAMPLED + 1]
    rate = _mean(state.costs.rates.prefill_tokens_s.value for state in some)
    # Requests that other gates send there take their part of each unit.
    own = sum(len(state.leases) for state in states)
    stretch = 1.0 + sum(state.foreign for state in states) / own if own else 1.0
    arrivals = [_arrival(each, rate, stretch) for each in recent]
    steps = [state.costs.rates.steps for state in some]
    base_s = _mean(each.base.value for each in steps)
    more_s = _mean(each.share * each.base.value for each in steps)
    streams = [each.wait_s for each in recent if each.is_stream]
    return Demand(
        arrivals,
        len(states),
        max(1, int(_mean(slots_of(state) for state in some))),
        lambda batch: min(base_s + more_s * batch, Steps.MAX_S),
        _mean(state.costs.rates.latency.without_work_s(rate) for state in some),
        quantile(streams) if len(streams) >= ENOUGH else None,
    )


def _arrival(served: AnsweredRequest, rate: float, stretch: float) -> Arrival:
    prefill_s = served.uncached_tokens / rate * stretch if rate else 0.0
    begun_at = served.first_at if served.is_stream else served.opened_at + prefill_s
    return Arrival(served.came_at, prefill_s, max(0.0, served.ended_at - begun_at) * stretch)


def slots_of(state: UnitState) -> float:
    """How many sequences a unit decodes at once."""
    return min(float(state.unit.max_in_flight), state.costs.slots.limit)


def saturation(states: Sequence[UnitState]) -> float:
    """The share of seats in use, or of the time in which units had prompts to compute, whichever is more."""
    slots = sum(slots_of(state) for state in states)
    if not slots:
        return 0.0
    return max(sum(state.batch for state in states) / slots, _mean(state.prefilling for state in states))


def desired_units(found: Waits, usable: int, all_units: int, goal_s: float, saturated: float) -> int:
    """How many units there should be for waits up to `goal_s`: one more, one fewer, or as many as now.

    Units that are not usable yet are on their way, so none is added. One goes only if without it the wait
    stays below half the goal and the others below `CALM`, because near saturation too little is predicted.
    """
    if found.now is None:
        return all_units
    if found.now > goal_s:
        return max(all_units, usable + 1)
    if usable < all_units or usable < 2 or found.fewer is None:
        return all_units
    is_calm = saturated * usable / (usable - 1) <= CALM
    return all_units - 1 if is_calm and found.fewer <= goal_s / 2.0 else all_units


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


# Which unit is missed least: the one whose cache holds least that no other one of its pool holds. Pure.


SCALING_BLOCKS_MAX = 512
"""Blocks of each cache that are looked at, those that were used last."""
UNITS_MAX = 16
"""Of more units, those with the fewest blocks are compared: to compare so many takes about 3 ms."""


class Valued(NamedTuple):
    """A unit, and the seconds of prefill that others would have to do again without it."""

    unit: str
    value_s: float


def least_valued(states: Sequence[UnitState]) -> Valued | None:
    """Of these units of one pool, drained ones excepted; None: at most one is left.

    One that is not usable is missed by nobody.
    """
    present = [state for state in states if not state.drained]
    if len(present) < 2:
        return None
    unusable = [state.unit.name for state in present if not state.is_usable()]
    if unusable:
        return Valued(min(unusable), 0.0)
    fewest = sorted(present, key=lambda state: len(state.costs.prefixes))[:UNITS_MAX]
    held = {state.unit.name: state.costs.prefixes.recent(SCALING_BLOCKS_MAX) for state in fewest}
    holders = Counter(block for blocks in held.values() for block in blocks)
    values = {
        state: _seconds(state, sum(holders[block] == 1 for block in held[state.unit.name]))
        for state in fewest
    }
    best = min(fewest, key=lambda state: (values[state], state.in_flight, state.unit.name))
    return Valued(best.unit.name, values[best])


def _seconds(state: UnitState, blocks: int) -> float:
    rates = state.costs.rates
    tokens = blocks * BLOCK_BYTES / max(rates.bytes_per_token.value, 1.0)
    return tokens / rates.prefill_tokens_s.value if rates.prefill_tokens_s.value else 0.0
