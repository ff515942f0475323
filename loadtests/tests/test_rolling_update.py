"""The drill of a rolling update in small: a gate that discovers its units, and not a request lost."""

import asyncio

from loadtests.kit.questions import End
from loadtests.rolling_update import run


def test_an_update_and_a_deleted_follower_cost_no_request() -> None:
    outcome = asyncio.run(run(3, streams=12, grace_s=2.5))

    assert outcome.problems() == []
    assert set(outcome.ends()) == {End.WHOLE}
    assert [one.unit for one in outcome.replaced] == ["big-0", "big-1", "big-2", "big-2"]
