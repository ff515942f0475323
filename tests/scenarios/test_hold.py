"""Units that stand still on purpose: no verdict falls, nobody is lost, nothing is restarted."""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import Any

import pytest

from cellgate.extras import EXTRAS
from cellgate.router.nouns import Rules, Verdict
from tests.scenarios.harness import BACK_S, LATENCY_S, PROMISE_S, Stage
from tests.scenarios.kinds import HAS_WORKERS, crew
from tests.sim.hurt import stop
from tests.sim.world import played

PAUSE_S = 20.0
MODES = ("abort", "wait", "keep")
IDLE_S = Rules().canary_idle_s + 2.0
"""When an idle unit has had its canary, which is what notices its pause if nobody asks for anything."""


def deeds_of(stage: Stage) -> list[Any]:
    """What the operator does meanwhile, which is an extra."""
    if "operator" not in EXTRAS:
        return []
    deeds: list[Any] = import_module("tests.scenarios.extras.operator.test_recovered").Medic(stage).deeds
    return deeds


def is_held(stage: Stage, name: str) -> bool:
    state = stage.gate.board.units[name]
    return state.hold is not None and not state.hold.ended_at


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("kind", "units"), [(Stage, 1), (Stage, 2), pytest.param(crew, 2, marks=HAS_WORKERS)]
)
@played(lambda kind, units: kind(units=units, can_pause=True), given=("kind", "units"))
async def test_a_pause_under_streams_loses_nobody_and_flips_nothing(stage: Stage, mode: str) -> None:
    deeds = deeds_of(stage)
    crowd = stage.crowd(8, max_tokens=100)
    await asyncio.sleep(0.8)
    engine = stage.engines["a"]
    assert engine.running
    engine.pause(mode)
    # While it finishes what it has, it shows work, and then it is idle.
    await stage.until(lambda: is_held(stage, "a"), IDLE_S if mode == "wait" else 1.5)
    assert not stage.gate.board.units["a"].is_usable()
    late = stage.crowd(4, max_tokens=4)
    await asyncio.sleep(PAUSE_S)
    assert is_held(stage, "a")
    canaries = len(engine.canaries)
    engine.resume()
    assert all(visit.is_answered for visit in [*await crowd, *await late])
    await stage.until(stage.gate.board.units["a"].is_usable, 5.0)
    assert len(engine.canaries) <= canaries + 2
    assert stage.flips("a") == ["up"]
    assert deeds == []
    assert stage.continuations()["not_continuable"] == stage.continuations()["refused"] == 0
    assert (stage.continuations()["continued"] > 0) is (mode == "abort")
    assert len(stage.told("hold")) == len(stage.told("hold_over")) == 1


@played(Stage, units=2, can_pause=True)
async def test_an_idle_unit_that_is_paused_is_held_before_a_canary_fails(stage: Stage) -> None:
    stage.engines["a"].pause("keep")
    await asyncio.sleep(60.0)
    assert is_held(stage, "a")
    stage.engines["a"].resume()
    await stage.until(stage.gate.board.units["a"].is_usable, 3.0)
    assert stage.flips("a") == ["up"]


@played(Stage, units=2, can_pause=True)
async def test_requests_without_a_token_leave_a_paused_unit(stage: Stage) -> None:
    stage.engines["a"].pause("keep")
    visits = await stage.crowd(8, max_tokens=4)
    assert all(visit.is_answered for visit in visits)
    assert {visit.unit for visit in visits} == {"b"}
    assert not stage.gate.board.units["a"].leases
    assert stage.flips("a") == ["up"]


@played(Stage, units=2, can_pause=True, rules=Rules(hold_limit_s=30.0))
async def test_an_engine_is_believed_no_longer_than_the_limit(stage: Stage) -> None:
    stage.engines["a"].behaviour.says_paused = True
    stage.engines["a"].behaviour.wedged = True
    await stage.until(lambda: is_held(stage, "a"), IDLE_S)
    await asyncio.sleep(25.0)
    assert stage.verdict("a") is Verdict.UP
    await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, 5.0 + PROMISE_S)
    await asyncio.sleep(60.0)
    assert stage.verdict("a") is Verdict.DOWN
    assert not is_held(stage, "a")
    stage.engines["a"].behaviour.wedged = False
    await stage.until(stage.all_up, BACK_S)
    assert stage.flips("a") == ["up", "suspect", "down", "probation", "up"]
    assert "the limit" in stage.told("hold_over")[0]["line"]


@pytest.mark.parametrize("says", [False, None], ids=["says no", "does not answer"])
@played(Stage, units=2, followers=1, can_pause=True)
async def test_a_frozen_unit_that_is_not_paused_falls_as_soon_as_ever(
    stage: Stage, says: bool | None
) -> None:
    crowd = stage.crowd(8, max_tokens=100)
    await asyncio.sleep(0.8)
    stop(stage.engines["a"], 1)
    stage.engines["a"].behaviour.says_paused = says
    await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, 3.0)
    assert all(visit.is_answered for visit in await crowd)


@played(Stage, units=2, can_pause=True)
async def test_a_unit_that_dies_while_it_is_paused_falls_at_once(stage: Stage) -> None:
    stage.engines["a"].pause("keep")
    await stage.until(lambda: is_held(stage, "a"), 3.0)
    stage.engines["a"].die()
    await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, 2.0)
    assert stage.gate.board.units["a"].hold is None
    stage.engines["a"].restart()
    await stage.until(stage.all_up, BACK_S)


@played(Stage, units=2, can_pause=True)
async def test_recovery_leaves_a_unit_alone_that_is_paused(stage: Stage) -> None:
    deeds = deeds_of(stage)
    engine = stage.engines["a"]
    engine.behaviour.wedged = True
    await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, PROMISE_S)
    engine.behaviour.wedged = False
    engine.pause("keep")
    await asyncio.sleep(60.0)
    assert deeds == []
    engine.resume()
    await stage.until(stage.all_up, BACK_S)
    assert deeds == []


@played(Stage, units=1, can_pause=True)
async def test_what_an_engine_aborts_without_a_pause_is_continued_and_the_unit_stays(stage: Stage) -> None:
    crowd = stage.crowd(8, max_tokens=60)
    await asyncio.sleep(0.8)
    stage.engines["a"].pause("abort")
    stage.engines["a"].resume()
    assert all(visit.is_answered for visit in await crowd)
    await asyncio.sleep(LATENCY_S)
    assert stage.flips("a") == ["up"]
    assert stage.continuations()["continued"] == 8
