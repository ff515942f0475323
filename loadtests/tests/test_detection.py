"""The detection drill in small: real processes, one stopped and continued, no request forgotten."""

import asyncio

from loadtests.detection import Case, run


def test_a_stopped_leader_is_found_in_time_and_comes_back_when_it_continues() -> None:
    row = asyncio.run(run(Case("stop-leader", agent=False, load=True), rounds=1, streams=8))
    assert row.problems() == []
    (outcome,) = row.outcomes
    assert outcome.up_s is not None
