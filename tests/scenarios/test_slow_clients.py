"""Clients that read slowly or never, or ask faster than they are served: memory stays bounded."""

from __future__ import annotations

import asyncio
import math

import pytest

from cellgate.proxy.config.settings import Timeouts
from cellgate.router.nouns import Outcome
from tests.scenarios.harness import Stage
from tests.sim.client import Manner
from tests.sim.timing import Timing
from tests.sim.world import played

NEVER_READS = Manner(read_every_s=math.inf, leave_after_s=60.0)


@pytest.mark.parametrize("stream", [True, False])
@played(Stage, units=1, timing=Timing(step_s=0.001))
async def test_slow_readers_get_every_byte(stage: Stage, stream: bool) -> None:
    slow = Manner(read_every_s=0.5, timeout_s=600.0)
    # Two thousand words are 18 kB, but as a stream nearly half a megabyte.
    for visit in await stage.crowd(4, max_tokens=2000 if stream else 20_000, stream=stream, manner=slow):
        assert visit.is_answered
    assert stage.flips("a") == ["up"]


@played(Stage, units=1, timing=Timing(step_s=0.001), timeouts=Timeouts(answer_s=20.0))
async def test_a_client_that_never_reads_is_cut_off_in_the_end(stage: Stage) -> None:
    crowd = stage.crowd(4, max_tokens=5000, manner=NEVER_READS)
    await asyncio.sleep(20.0)
    assert stage.gate.board.in_flight == 4
    await stage.until(lambda: stage.gate.board.in_flight == 0, 20.0)
    await crowd
    assert stage.gate.outcomes == {Outcome.CLIENT_ERROR: 4}
    assert stage.flips("a") == ["up"]


@played(Stage, units=1, timing=Timing(step_s=0.0001))
async def test_a_connection_whose_last_read_met_a_slow_client_serves_the_next_request(stage: Stage) -> None:
    for size in range(10_000, 26_000, 2000):
        slow = Manner(read_every_s=0.2)
        assert (await stage.ask(stream=False, max_tokens=size, manner=slow)).is_answered
        visit = await stage.ask(stream=False)
        assert visit.is_answered
        assert visit.reply.ended_s - visit.reply.sent_s < 1.0
