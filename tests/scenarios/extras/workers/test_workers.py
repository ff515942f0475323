"""A control process and two workers on the stage: what holds for a gate of one process holds for them."""

from __future__ import annotations

import asyncio

import pytest

from cellgate.extras.workers.remote import WITHOUT_CONTROL_S
from cellgate.router.nouns import Outcome, Verdict
from cellgate.router.queue import FairRules
from tests.scenarios.extras.workers.crew import CrewStage
from tests.scenarios.harness import Stage
from tests.sim.timing import Timing
from tests.sim.world import played


@played(CrewStage, units=2, max_in_flight=4, queue=FairRules(limit=100))
async def test_units_are_shared_by_the_leases_of_all_workers(stage: CrewStage) -> None:
    crowd = stage.crowd(20, max_tokens=20)
    await asyncio.sleep(0.1)
    # However many workers there are, a unit gets what it may have, and the others wait.
    assert [state.in_flight for state in stage.gate.board] == [4, 4]
    assert len(stage.gate.router.queue) == 12
    assert all(visit.is_answered for visit in await crowd)


@pytest.mark.parametrize("at_s", [5.0, 5.1, 5.2])
def test_a_frozen_unit_is_found_a_tick_later_at_most(at_s: float) -> None:
    found_s = []
    for kind in (Stage, CrewStage):
        stage = kind(units=2)

        async def scenario(stage: Stage = stage) -> None:
            crowd = stage.crowd(8, max_tokens=450)
            await asyncio.sleep(at_s)
            stage.engines["a"].behaviour.wedged = True
            since = stage.now
            await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, 10.0)
            found_s.append(stage.now - since)
            stage.engines["a"].behaviour.wedged = False
            await crowd

        stage.play(scenario())
    one, crew = found_s
    assert crew <= one + 2 * 0.25


@played(CrewStage, units=1, max_in_flight=4)
async def test_the_leases_and_asks_of_a_worker_that_ends_are_closed(stage: CrewStage) -> None:
    crowd = stage.crowd(12, max_tokens=300)
    await asyncio.sleep(0.3)
    control, (lost, other) = stage.gate, stage.gate.workers
    assert (control.board.in_flight, len(control.router.queue)) == (4, 8)
    theirs = len(control.process.sessions[0])
    control.pipes[0].close()
    await asyncio.sleep(0.01)
    assert control.outcomes[Outcome.GATE_ERROR] == theirs
    assert (control.process.deaths, control.process.lost_attempts) == (1, theirs)
    # Its place is given to those that wait, all of the other worker.
    assert control.board.in_flight == len(control.process.sessions[1]) == 4
    for client in list(lost.clients):
        client.cut()
    answered = [visit for visit in await crowd if visit.is_answered]
    assert len(answered) == 6
    await asyncio.sleep(0.1)
    assert not other.leftovers()
    control.introduce(lost)


@pytest.mark.parametrize("after_s", [0.05, 0.5])
@played(CrewStage, units=2, max_in_flight=4)
async def test_a_new_control_process_knows_what_is_open_and_streams_go_on(
    stage: CrewStage, after_s: float
) -> None:
    crowd = stage.crowd(12, max_tokens=400)
    await asyncio.sleep(0.5)
    before = {state.unit.name: state.in_flight for state in stage.gate.board}
    crash = asyncio.ensure_future(stage.replace_control(after_s))
    await asyncio.sleep(after_s / 2)
    late = stage.crowd(4, max_tokens=2)
    await crash
    await asyncio.sleep(0.05)
    assert {state.unit.name: state.in_flight for state in stage.gate.board} == before
    assert stage.all_up()
    assert stage.gate.is_ready
    # Those that waited in the queue of the old one wait in that of the new one.
    await stage.until(lambda: len(stage.gate.router.queue) == 4 + 4, 1.0)
    assert all(visit.is_answered for visit in [*await crowd, *await late])


@played(CrewStage, units=2)
async def test_without_a_control_process_who_asks_waits_a_second_and_gets_an_honest_503(
    stage: CrewStage,
) -> None:
    crowd = stage.crowd(4, max_tokens=200)
    await asyncio.sleep(0.5)
    crash = asyncio.ensure_future(stage.replace_control(3.0))
    await asyncio.sleep(0.1)
    begun_at = stage.now
    refused = await stage.ask(max_tokens=2)
    assert (refused.reply.status, refused.code) == (503, "no_control_process")
    assert WITHOUT_CONTROL_S <= stage.now - begun_at < WITHOUT_CONTROL_S + 0.1
    await crash
    assert (await stage.ask(max_tokens=2)).is_answered
    assert all(visit.is_answered for visit in await crowd)


@played(CrewStage, units=3, timing=Timing(prefill_s=0.5))
async def test_retries_at_all_workers_together_stay_within_the_budget(stage: CrewStage) -> None:
    for engine in stage.engines.values():
        engine.behaviour.error_rate = 1.0
    await stage.crowd(60, max_tokens=2)
    assert 0 < stage.gate.most_retries <= 0.2 * 60
