"""Streams that a unit breaks in the middle: another one goes on with them, and their clients cannot tell."""

from __future__ import annotations

import pytest

from tests.scenarios.harness import Stage
from tests.scenarios.visit import Visit
from tests.sim.behaviour import Behaviour, Break

LONG = {"max_tokens": 40, "stream_options": {"include_usage": True}}


def results(stage: Stage) -> dict[str, int]:
    """What became of the streams that were broken."""
    counts: dict[str, int] = {}
    for tally in stage.gate.metrics.tallies.values():
        for result, count in tally.continuations.items():
            if count:
                counts[result.value] = counts.get(result.value, 0) + count
    return counts


def first(stage: Stage, visit: Visit) -> str:
    assert visit.unit is not None
    return visit.unit


@pytest.mark.parametrize("how", [Break.ERROR, Break.TRUNCATE], ids=str)
@pytest.mark.parametrize("path", ["/v1/chat/completions"])
def test_a_stream_that_breaks_is_continued_and_its_bytes_are_those_of_one_unit(how: Break, path: str) -> None:
    stage = Stage(units=2)

    async def scenario() -> None:
        stage.engines["a"].behaviour = Behaviour(breaks=how, breaks_after_events=7)
        visits = await stage.crowd(8, **LONG)
        assert all(visit.is_answered for visit in visits)
        assert all(visit.reply.body == visit.expected() for visit in visits)

    stage.play(scenario())
    assert results(stage)["continued"] >= 1
