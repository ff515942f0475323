"""What the units of a large fleet learn of each other, some at a time."""

from __future__ import annotations

from math import ceil
from types import SimpleNamespace
from typing import cast

import pytest

from cellgate.router.fleet_learning import COMPARED_AT_ONCE, comparing_speeds
from cellgate.router.outliers import STREAK, Outlier, Speed
from cellgate.router.unit_state import UnitState


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
