"""Each fault is found in time and costs no request that had shown no token. More seeds: detection.py."""

from __future__ import annotations

import pytest

from tests.scenarios.detection import CASES, Case, run

SEEDS_IDLE = (1, 2, 3)
SEED_UNDER_LOAD = 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fault_is_found_in_time_and_loses_nothing(case: Case) -> None:
    seeds = (SEED_UNDER_LOAD,) if case.load else SEEDS_IDLE
    bad = [line for seed in seeds for line in run(case, seed).bad]
    assert not bad
