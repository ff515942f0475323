"""Random plans of faults, a few of the many that `python -m tests.scenarios.plans` plays."""

from __future__ import annotations

import pytest

from tests.scenarios.plans import ACTS, KINDS, STRIKES, Plan
from tests.scenarios.seeds import seeds


@pytest.mark.parametrize("seed", seeds(range(6)))
def test_whatever_is_dealt_nobody_is_lost_and_nobody_is_told_lies(seed: int) -> None:
    assert Plan(seed).wrong == []


def test_a_plan_deals_faults_to_users_of_all_kinds_and_its_seed_decides_it_all() -> None:
    plans = [Plan(seed) for seed in (3, 3, 4)]
    digests = [plan.stage.world.trace.digest for plan in plans]
    assert digests[0] == digests[1] != digests[2]
    assert plans[0].dealt.keys() & STRIKES.keys()
    assert plans[0].dealt.keys() & ACTS.keys()
    assert {kind for plan in plans for kind in plan.visits} == KINDS.keys()
