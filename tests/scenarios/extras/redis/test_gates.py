"""Two gates before the same units, with a Redis between them: what one knows must not blind the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from cellgate.probes.canary import YIELD_S
from tests.scenarios.gates import GatesStage
from tests.scenarios.users import Users
from tests.sim.engine import Engine
from tests.sim.hurt import stop, stop_core
from tests.sim.world import played


@pytest.mark.parametrize("users", [0, 6])
@pytest.mark.parametrize("hurt", [lambda engine: stop(engine, 0), lambda engine: stop(engine, 1), stop_core])
@played(GatesStage, 1, 2, followers=1)
async def test_a_frozen_unit_is_found_by_two_gates_as_soon_as_by_one(
    stage: GatesStage, hurt: Callable[[Engine], None], users: int
) -> None:
    crowd = Users(stage, users)
    await asyncio.sleep(5.0)
    hurt(stage.engines["a"])
    await stage.until(lambda: not any(_uses(stage, "a")), stage.promise_s)
    await crowd.leave()
    assert all(visit.is_answered for visit in crowd.visits)


def _uses(stage: GatesStage, unit: str) -> list[bool]:
    return [gate.board.units[unit].is_usable() for gate in stage.alive.values()]


@pytest.mark.parametrize("units", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_idle_gates_that_share_send_as_many_canaries_as_one(units: int) -> None:
    """One gate's canary spares the other its own, as soon as it has heard of it."""
    stage, seconds = GatesStage(3, units), 160.0

    async def scenario() -> None:
        await stage.until(stage.all_up, 10.0)
        before = _canaries(stage)
        await asyncio.sleep(seconds)
        due = units * seconds / stage.gate.settings.rules.canary_idle_s
        sent = _canaries(stage) - before
        print(f"{sent} canaries in {seconds:g} s to {units} units of two gates; one gate sends {due:g}")
        assert sent <= 1.25 * due

    stage.play(scenario())


def _canaries(stage: GatesStage) -> int:
    return sum(len(engine.canaries) for engine in stage.engines.values())


@pytest.mark.parametrize("tenth", range(0, 30, 6))
@played(GatesStage, 5, 2)
async def test_of_an_idle_unit_that_hangs_the_gate_whose_turn_it_is_not_waits_only_a_little_longer(
    stage: GatesStage, tenth: int
) -> None:
    await asyncio.sleep(5.0 + tenth / 10)
    stop_core(stage.engines["a"])
    await stage.until(lambda: not any(_uses(stage, "a")), stage.promise_s + YIELD_S)
