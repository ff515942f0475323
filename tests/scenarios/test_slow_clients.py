"""Clients that read slowly or never, or ask faster than they are served: memory stays bounded."""

from __future__ import annotations

import asyncio
import math

import pytest

from cellgate.proxy.config.settings import Timeouts
from cellgate.proxy.http.server import PIPELINED_BYTES
from cellgate.router.nouns import Outcome
from tests.scenarios.harness import CHAT, LATENCY_S, Stage
from tests.scenarios.visit import chat, encode
from tests.sim.client import Manner
from tests.sim.conversation import End
from tests.sim.tcp import READ_SIZE, WINDOW
from tests.sim.timing import Timing
from tests.sim.world import played

NEVER_READS = Manner(read_every_s=math.inf, leave_after_s=60.0)


@pytest.mark.parametrize("stream", [True, False])
def test_slow_readers_get_every_byte(stream: bool) -> None:
    stage = Stage(units=1, timing=Timing(step_s=0.001))

    async def scenario() -> None:
        slow = Manner(read_every_s=0.5, timeout_s=600.0)
        # Two thousand words are 18 kB, but as a stream nearly half a megabyte.
        for visit in await stage.crowd(4, max_tokens=2000 if stream else 20_000, stream=stream, manner=slow):
            assert visit.is_answered

    stage.play(scenario())
    assert stage.flips("a") == ["up"]


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_never_read_hold_a_bounded_buffer_and_nothing_once_they_have_left(stream: bool) -> None:
    stage = Stage(units=1, timing=Timing(step_s=0.001))

    async def scenario() -> None:
        size = 5000 if stream else 60_000
        visits = await stage.crowd(8, max_tokens=size, stream=stream, manner=NEVER_READS)
        assert {visit.reply.end for visit in visits} == {End.LEFT}

    stage.play(scenario())
    assert stage.flips("a") == ["up"]


def test_a_client_that_never_reads_is_cut_off_in_the_end() -> None:
    stage = Stage(units=1, timing=Timing(step_s=0.001), timeouts=Timeouts(answer_s=20.0))

    async def scenario() -> None:
        crowd = stage.crowd(4, max_tokens=5000, manner=NEVER_READS)
        await asyncio.sleep(20.0)
        assert stage.gate.board.in_flight == 4
        await stage.until(lambda: stage.gate.board.in_flight == 0, 20.0)
        await crowd

    stage.play(scenario())
    assert stage.gate.outcomes == {Outcome.CLIENT_ERROR: 4}
    assert stage.flips("a") == ["up"]


@pytest.mark.parametrize("stream", [True, False])
@played(Stage, units=1, timing=Timing(step_s=0.0001))
async def test_a_client_that_pipelines_and_never_reads_holds_one_buffer_and_not_one_for_each_request(
    stage: Stage, stream: bool
) -> None:
    size = 600 if stream else 4500
    await stage.pipeline([chat("again", stream=stream, max_tokens=size) for _ in range(20)], NEVER_READS)


def test_a_client_that_pipelines_faster_than_it_is_served_is_held_back() -> None:
    stage = Stage(units=1, timing=Timing(prefill_s=1.0))
    requests = [stage.client.encode("POST", CHAT, encode(chat("again")))] * 5000

    async def scenario() -> None:
        conversation = await stage.client.connect()
        for _ in requests:
            conversation.expect("POST")
        conversation.transport.write(b"".join(requests))
        await asyncio.sleep(20.0)
        assert 10 < len(stage.gate.records) < 20
        unsent = conversation.transport.get_write_buffer_size()
        # What waits in the gate, one read above it, and what the network holds.
        assert sum(map(len, requests)) - unsent < PIPELINED_BYTES + READ_SIZE + 2 * WINDOW
        conversation.transport.abort()
        await asyncio.sleep(LATENCY_S)

    stage.play(scenario())


@played(Stage, units=1, timing=Timing(step_s=0.0001))
async def test_a_connection_whose_last_read_met_a_slow_client_serves_the_next_request(stage: Stage) -> None:
    for size in range(10_000, 26_000, 2000):
        slow = Manner(read_every_s=0.2)
        assert (await stage.ask(stream=False, max_tokens=size, manner=slow)).is_answered
        visit = await stage.ask(stream=False)
        assert visit.is_answered
        assert visit.reply.ended_s - visit.reply.sent_s < 1.0
