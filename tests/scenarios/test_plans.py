"""Random plans of faults, a few of the many that `python -m tests.scenarios.plans` plays."""

from __future__ import annotations

import pytest

from tests.scenarios.plans import ACTS, KINDS, STRIKES, Plan
from tests.scenarios.seeds import seeds


@pytest.mark.parametrize("seed", seeds(range(6)))
def test_whatever_is_dealt_nobody_is_lost_and_nobody_is_told_lies(seed: int) -> None:
    assert Plan(seed).wrong == []


@pytest.mark.parametrize("seed", seeds(range(300)))
def test_units_that_answer_fast_and_wrong_win_few_requests_and_the_laws_hold(seed: int) -> None:
    assert Plan(seed, nonsense=True).wrong == []


@pytest.mark.parametrize(
    ("seed", "what"),
    [
        (2064, "a unit is well for less than a sample, passes its canary meanwhile, and is lost again"),
        (2161, "an idle unit hangs, and the next canary is the other gate's"),
    ],
)
def test_a_unit_is_picked_late_only_as_far_as_its_gate_could_not_know(seed: int, what: str) -> None:
    assert Plan(seed).wrong == [], what


def test_a_plan_deals_faults_to_users_of_all_kinds_and_its_seed_decides_it_all() -> None:
    plans = [Plan(seed) for seed in (3, 3, 4)]
    digests = [plan.stage.world.trace.digest for plan in plans]
    assert digests[0] == digests[1] != digests[2]
    assert plans[0].dealt.keys() & STRIKES.keys()
    assert plans[0].dealt.keys() & ACTS.keys()
    assert {kind for plan in plans for kind in plan.visits} == KINDS.keys()
