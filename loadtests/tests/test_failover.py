"""The failover drill in small: real processes, one of them killed, every request accounted for."""

import asyncio

from loadtests.failover import Drill, run
from loadtests.kit.questions import End


def test_a_killed_leader_costs_no_request_that_had_shown_no_token() -> None:
    outcome = asyncio.run(run(Drill(streams=24, before_s=1.2, after_s=1.0)))

    assert outcome.problems() == []
    assert set(outcome.ends()) <= {End.WHOLE, End.BROKEN}
    assert outcome.moved > 0
