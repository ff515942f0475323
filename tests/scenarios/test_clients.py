"""What clients do: leave, err, pipeline, speak HTTP/1.0, wait. None of it harms a unit."""

from __future__ import annotations

import asyncio
import math

import pytest

from cellgate.proxy.config.limits import LIMITS, REACHED
from cellgate.proxy.config.settings import Timeouts
from cellgate.router.nouns import Outcome
from tests.scenarios.harness import LATENCY_S, Stage
from tests.scenarios.visit import Visit, chat
from tests.sim.client import Manner
from tests.sim.conversation import End
from tests.sim.sequence import Served
from tests.sim.timing import Timing
from tests.sim.world import played


def served(stage: Stage, visit: Visit) -> list[Served]:
    """What became of a request at the units that got it."""
    return [one for engine in stage.engines.values() for one in engine.served.get(visit.request_id, [])]


# -- clients that leave ------------------------------------------------------------------------------------


@pytest.mark.parametrize("leave_after_s", [0.3, 1.5], ids=["before its first token", "in mid-stream"])
@pytest.mark.parametrize("stream", [True, False])
@played(Stage, timing=Timing(prefill_s=1.0))
async def test_a_client_that_leaves_frees_its_unit_within_100_ms(
    stage: Stage, leave_after_s: float, stream: bool
) -> None:
    visits = await stage.crowd(8, max_tokens=200, stream=stream, manner=Manner(leave_after_s=leave_after_s))
    assert {visit.reply.end for visit in visits} == {End.LEFT}
    tried = [one for visit in visits for one in served(stage, visit)]
    await stage.until(lambda: all(one.outcome for one in tried), 0.1)
    assert [one.outcome for one in tried] == ["aborted"] * 8
    assert stage.gate.outcomes == {Outcome.CLIENT_LEFT: 8}
    assert stage.flips("a") == stage.flips("b") == ["up"]


@played(Stage, units=1, timing=Timing(prefill_s=1.0))
async def test_a_client_that_leaves_while_its_request_waits_for_a_unit_is_forgotten(stage: Stage) -> None:
    crowd = stage.crowd(4, manner=Manner(leave_after_s=2.0))
    await asyncio.sleep(0.5)
    stage.add_engine("b")
    # The only other unit is starting, so the requests that lost theirs wait for it.
    stage.gate.plane.configure(stage.fleet("a", "b"))
    stage.engines["b"].behaviour.wedged = True
    stage.engines["a"].die()
    await stage.until(lambda: len(stage.gate.router.queue) == 4, LATENCY_S)
    await crowd
    await stage.until(lambda: len(stage.gate.router.queue) == 0, LATENCY_S)


# -- requests that are wrong -------------------------------------------------------------------------------


@played(Stage)
async def test_units_that_are_alike_say_themselves_what_they_do_not_serve_and_503_is_said_for_them_when_down(
    stage: Stage,
) -> None:
    visit = await stage.ask(model="huge")
    assert visit.reply.status == 404
    assert "huge" in visit.reply.json["error"]["message"], "all units are alike, so they say it themselves"
    assert all(stage.flips(name) == ["up"] for name in stage.engines)
    for engine in stage.engines.values():
        engine.die()
    await asyncio.sleep(5.0)
    visit = await stage.ask(model="tiny")
    assert (visit.reply.status, visit.code) == (503, "no_unit")
    assert (await stage.ask(model="huge")).reply.status == 503, "who knows what they would say"


# -- connections -------------------------------------------------------------------------------------------


@played(Stage, units=1)
async def test_a_pipelined_body_that_the_gate_itself_keeps_waiting_is_not_too_late(stage: Stage) -> None:
    long = chat("first", max_tokens=5000)
    large = chat("second", padding="x" * 300_000)
    visits = await stage.pipeline([long, large], Manner(timeout_s=300.0))
    assert visits[0].reply.ended_s - visits[0].reply.sent_s > 90.0
    assert [visit.reply.status for visit in visits] == [200, 200]


# -- patience ----------------------------------------------------------------------------------------------


@played(Stage, timing=Timing(prefill_s=25.0))
async def test_a_long_prefill_is_bridged_with_comments_and_can_still_move(stage: Stage) -> None:
    crowd = stage.crowd(8)
    await asyncio.sleep(15.0)
    assert all(client.peer for client in stage.gate.clients)
    stage.engines["a"].die()
    visits = await crowd
    assert all(visit.is_answered for visit in visits)
    assert all(visit.reply.comments >= 2 for visit in visits)
    assert {visit.reply.headers["x-cellgate-unit"] for visit in visits} == {"a", "b"}


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


@played(Stage, units=1, timing=Timing(step_s=0.001), max_in_flight=4)
async def test_streams_whose_units_wait_for_their_clients_hold_no_slot(stage: Stage) -> None:
    crowd = stage.crowd(4, max_tokens=9000, manner=NEVER_READS)
    state = stage.gate.board.units["a"]
    await stage.until(lambda: len(state.held_back) == 4, 10.0)
    await asyncio.sleep(2.0)
    assert (state.in_flight, len(state.leases)) == (0, 4)
    visits = await stage.crowd(4, max_tokens=20)
    # Those who wait for a slot wait for seconds; a packet that is lost twice takes 0.06 s.
    assert all(visit.is_answered and visit.reply.ttft_s < 0.15 for visit in visits)
    await crowd
    assert (state.parked, state.limit) == (0, 4.0)
    assert stage.flips("a") == ["up"]


@played(Stage, units=1, timing=Timing(step_s=0.01), max_in_flight=4)
async def test_who_reads_nothing_gives_its_slot_soon_to_whoever_waits_and_keeps_it_if_nobody_does(
    stage: Stage,
) -> None:
    crowd = stage.crowd(4, max_tokens=20_000, manner=NEVER_READS)
    before = REACHED["slow_reader_awaited_s"]
    await asyncio.sleep(10.0)
    assert len(stage.engines["a"].running) == 4
    visit = await stage.ask(max_tokens=4)
    assert visit.is_answered
    assert visit.reply.ttft_s < LIMITS.slow_reader_awaited_s + 0.5
    assert REACHED["slow_reader_awaited_s"] > before
    assert stage.gate.board.units["a"].in_flight < 4
    await crowd


@played(Stage, units=1, timing=Timing(step_s=0.01), max_in_flight=8)
async def test_a_client_whose_answers_are_short_does_not_wait_for_long_ones_of_its_own_address(
    stage: Stage,
) -> None:
    shorts = asyncio.ensure_future(stage.pipeline([chat("short", max_tokens=20)] * 3))
    await asyncio.sleep(0.05)
    crowd = stage.crowd(9, max_tokens=1000)
    assert all(visit.is_answered for visit in await shorts)
    assert max(visit.reply.ended_s for visit in await shorts) - stage.visits[0].reply.sent_s < 1.0
    ends = [visit.reply.ended_s for visit in await crowd]
    assert max(ends) - min(ends) > 5.0, "one of them had to wait"


@played(Stage, units=1, timing=Timing(step_s=0.0001))
async def test_a_connection_whose_last_read_met_a_slow_client_serves_the_next_request(stage: Stage) -> None:
    for size in range(10_000, 26_000, 2000):
        slow = Manner(read_every_s=0.2)
        assert (await stage.ask(stream=False, max_tokens=size, manner=slow)).is_answered
        visit = await stage.ask(stream=False)
        assert visit.is_answered
        assert visit.reply.ended_s - visit.reply.sent_s < 1.0


@pytest.mark.parametrize("units", [1, 2])
@played(Stage, given=("units",), timing=Timing(prefill_s=25.0))
async def test_a_stream_that_was_promised_and_cannot_be_had_ends_in_an_error_event(stage: Stage) -> None:
    stage.gate.set_drain("b", drained=True)
    crowd = stage.crowd(4)
    await asyncio.sleep(15.0)
    stage.gate.set_drain("b", drained=False)
    for engine in stage.engines.values():
        engine.behaviour.busy_status = 503
    stage.engines["a"].die()
    for visit in await crowd:
        assert visit.reply.status == 200
        assert visit.reply.comments == 1
        assert visit.code is not None
        assert visit.reply.end is End.TRUNCATED


@pytest.mark.parametrize("leaves", [False, True])
@played(Stage)
async def test_a_body_that_is_parsed_elsewhere(stage: Stage, leaves: bool) -> None:
    # It takes some 30 ms to get here, so that the one who leaves does while it is being parsed.
    manner = Manner(leave_after_s=0.06) if leaves else Manner()
    visits = await stage.crowd(4, padding="x" * (1 << 20), manner=manner)
    assert all(visit.is_answered for visit in visits) is not leaves
    await asyncio.sleep(1.0)
    assert len(stage.gate.router.leases) == (0 if leaves else 4)


@pytest.mark.parametrize("stream", [True, False])
@played(Stage, units=1, timing=Timing(step_s=0.001))
async def test_clients_that_never_read_hold_a_bounded_buffer_and_nothing_once_they_have_left(
    stage: Stage, stream: bool
) -> None:
    size = 2500 if stream else 30_000
    visits = await stage.crowd(4, max_tokens=size, stream=stream, manner=NEVER_READS)
    assert {visit.reply.end for visit in visits} == {End.LEFT}
    assert stage.flips("a") == ["up"]
