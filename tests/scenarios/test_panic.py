"""A gate that is cut off holds its rotation for a while; a unit that is wedged is never held."""

from __future__ import annotations

import asyncio

import pytest

from cellgate.proxy.config.settings import TICK_S
from cellgate.router.nouns import PANIC_MAX_S, Verdict
from tests.scenarios.harness import BACK_S, PROMISE_S, Stage
from tests.scenarios.users import Users
from tests.sim.timing import Timing
from tests.sim.world import played

TIMING = Timing(step_s=0.1)
USERS = 12


def told(stage: Stage) -> list[str]:
    """What was told of panic."""
    kinds = [event["kind"] for event in stage.gate.events.last()]
    return [kind for kind in kinds if kind.startswith("panic")]


def cut_off(stage: Stage, names: str) -> None:
    for name in names:
        stage.world.net.partition(stage.engines[name].address)


@pytest.mark.parametrize("users", [0, USERS])
@played(Stage, units=3, timing=TIMING)
async def test_a_gate_cut_off_from_three_units_holds_them_for_half_a_minute_and_says_so(
    stage: Stage, users: int
) -> None:
    crowd = Users(stage, users)
    await asyncio.sleep(3.0)
    cut_off(stage, "abc")
    cut_at = stage.now
    await asyncio.sleep(PANIC_MAX_S - 1.0)
    assert all(state.is_usable() for state in stage.gate.board)
    assert told(stage) == ["panic"]
    await stage.until(lambda: not any(state.is_usable() for state in stage.gate.board), 10.5)
    assert stage.now - cut_at < PANIC_MAX_S + PROMISE_S
    await asyncio.sleep(2 * TICK_S)
    assert told(stage) == ["panic", "panic_over"]
    stage.world.net.heal()
    await stage.until(stage.all_up, BACK_S)
    assert (await stage.ask()).is_answered
    await crowd.leave()


@played(Stage, units=3, timing=TIMING)
async def test_a_cut_that_heals_in_time_costs_no_unit_and_no_stream(stage: Stage) -> None:
    crowd = Users(stage, USERS)
    await asyncio.sleep(3.0)
    cut_off(stage, "abc")
    await asyncio.sleep(15.0)
    stage.world.net.heal()
    await asyncio.sleep(5.0)
    assert stage.all_up()
    await crowd.leave()
    assert all(visit.is_answered for visit in stage.visits)
    assert told(stage) == ["panic", "panic_over"]
    assert not any("down" in stage.flips(name) for name in "abc")


@played(Stage, units=2, timing=TIMING)
async def test_two_units_are_too_few_for_panic(stage: Stage) -> None:
    await asyncio.sleep(3.0)
    cut_off(stage, "ab")
    await stage.until(lambda: stage.verdict("a") is stage.verdict("b") is Verdict.DOWN, PROMISE_S)
    assert told(stage) == []


@played(Stage, units=5, timing=TIMING)
async def test_a_wedged_unit_whose_leader_answers_is_not_held_while_the_others_are(stage: Stage) -> None:
    await asyncio.sleep(3.0)
    cut_off(stage, "abc")
    await asyncio.sleep(PROMISE_S)
    stage.engines["d"].behaviour.wedged = True
    await stage.until(lambda: stage.verdict("d") is Verdict.DOWN, PROMISE_S)
    assert all(stage.gate.board.units[name].is_usable() for name in "abc")
    assert stage.flips("e") == ["up"]


@played(Stage, units=1, timing=TIMING)
async def test_a_sidecar_whose_only_unit_is_wedged_is_not_ready_and_does_not_panic(stage: Stage) -> None:
    crowd = Users(stage, USERS)
    await asyncio.sleep(2.0)
    assert (await stage.send("GET", "/readyz")).reply.status == 200
    stage.engines["a"].behaviour.wedged = True
    await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, PROMISE_S)
    for _ in range(10):
        assert (await stage.send("GET", "/readyz")).reply.status == 503
        await asyncio.sleep(4.0)
    stage.engines["a"].behaviour.wedged = False
    await stage.until(stage.all_up, BACK_S)
    assert (await stage.send("GET", "/readyz")).reply.status == 200
    await crowd.leave()
    assert told(stage) == []
