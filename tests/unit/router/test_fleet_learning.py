"""What the units of a large fleet learn of each other, some at a time."""

from __future__ import annotations

from math import ceil
from statistics import fmean
from types import SimpleNamespace
from typing import cast

import pytest

from cellgate.router.cost import NEW_EVICT_SHARE, WRITTEN_MOST
from cellgate.router.fleet_learning import COMPARED_AT_ONCE, comparing_speeds
from cellgate.router.nouns import Ask, Unit
from cellgate.router.outliers import STREAK, Outlier, Speed
from cellgate.router.unit_state import UnitState
from tests.unit.router.fleets import board_up, picked, router_over


class Working:
    """A unit at work whose tokens come so far apart."""

    def __init__(self, gap_s: float) -> None:
        self.unit, self.outlier, self._gap_s = SimpleNamespace(cell="c"), Outlier(), gap_s

    def speed(self) -> Speed:
        """As fast as it always is."""
        return Speed(self._gap_s, 1.0, 0.1, 1.0)


@pytest.mark.parametrize("units", [2, 3, 40, 1000])
def test_the_slow_one_of_any_number_of_units_is_found_and_no_other(units: int) -> None:
    fleet = [Working(0.06 if number == units // 2 else 0.02) for number in range(units)]
    changed = []
    for _ in range(STREAK):
        steps = list(comparing_speeds(cast("list[UnitState]", fleet)))
        changed += [state for step in steps for state in step]
        # Their speeds are read, then compared.
        assert len(steps) == ceil(2 * units / COMPARED_AT_ONCE)
    assert [id(state) for state in changed] == [id(fleet[units // 2])]
    assert [state.outlier.degraded > 0.0 for state in fleet].count(True) == 1


@pytest.mark.parametrize("units", [40, 100, 300])
def test_what_writing_into_a_prefix_cache_costs_is_known_at_once_after_a_quiet_time(units: int) -> None:
    """What is usual had been looked at in the quiet: for 30 s a unit that was given anything was avoided."""
    board = board_up(*(Unit(f"u{number}", "a", f"http://u{number}") for number in range(units)))
    router = router_over(board)
    for tick in range(60):
        now, leases = 3.0 + 0.25 * tick, []
        for number in range(units // 2 if tick > 20 else 1):
            ask = Ask("m", True, 500, prompt_bytes=2000, blocks=(tick * units + number, 1, 2, 3))
            leases.append(picked(router, ask, now))
            leases[-1].commit(now)
        board.tick(now + 0.2)
        for lease in leases:
            board.close(lease, now + 0.2)
    shares = [state.costs.cost_terms.evict_share for state in board]
    assert fmean(shares) == pytest.approx(NEW_EVICT_SHARE, rel=0.5)
    assert max(shares) <= WRITTEN_MOST * NEW_EVICT_SHARE


@pytest.mark.parametrize("units", [100, 300])
def test_what_the_first_units_of_a_large_fleet_show_is_soon_the_price_of_those_at_rest(units: int) -> None:
    """Those that had been given nothing seemed three times as slow, and got nothing for four minutes."""
    board = board_up(*(Unit(f"u{number}", "a", f"http://u{number}") for number in range(units)))
    for tick in range(4):
        board.tick(3.0 + 0.25 * tick)
    lease = picked(router_over(board), Ask("m", True, 500, prompt_bytes=2000), 4.0)
    for _ in range(30):
        lease.unit_state.costs.rates.prefilled(4096, 4096 / 44_000.0)
        lease.unit_state.costs.rates.steps.learn(0.005, 1.0)
    ticks = 0
    while min(state.costs.cost_terms.tokens_s for state in board) < 30_000.0:
        ticks += 1
        board.tick(4.0 + 0.25 * ticks)
    assert ticks <= 8 + units // 16
    assert {round(state.costs.cost_terms.step_s, 4) for state in board} == {0.005}
