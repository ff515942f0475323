"""Which unit is missed least: the one whose cache holds least that no other one of its pool holds. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from cellgate.router.cost_model import BLOCK_BYTES
from cellgate.router.unit_state import UnitState

BLOCKS_MAX = 512
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
    held = {state.unit.name: state.costs.prefixes.recent(BLOCKS_MAX) for state in fewest}
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
