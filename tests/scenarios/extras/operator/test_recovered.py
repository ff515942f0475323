"""Units that stay DOWN are recovered; a gate that is cut off shoots nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from cellgate.extras.operator.action_settings import Remedy, RollPolicy, RunCommand
from cellgate.extras.operator.plan import Alone, Incident, RecoveryReport, RecoveryResult
from cellgate.extras.operator.recovery import Recovery, RecoveryPorts, reason_to_wait
from cellgate.extras.operator.roll_plan import Order, OwnRoll, Phase
from cellgate.extras.operator.roller import Roller, roll_units
from cellgate.router.nouns import PANIC_MAX_S, Fleet, Verdict
from cellgate.router.unit_state import UnitState
from tests.scenarios.harness import BACK_S, PROMISE_S, Stage
from tests.sim.behaviour import Behaviour
from tests.sim.engine import Engine
from tests.sim.world import played

REMEDY = Remedy("audit", RunCommand(("recover",)), after_s=5.0, backoff_s=30.0)


class Medic:
    """Recovery on a stage: a deed restarts the engine."""

    def __init__(self, stage: Stage, remedy: Remedy = REMEDY) -> None:
        self.stage = stage
        self.deeds: list[str] = []
        self.retries: list[str] = []
        self.retries_help = False
        self.entries: list[Mapping[str, Any]] = []
        gate = stage.gate
        ports = RecoveryPorts(
            gate.now, gate.now, self.waits, self.act, self.record, gate.events.add, self.retry, Alone()
        )
        self.recovery = Recovery(gate.board, {"cell": remedy}, ports, Random(7), gate.metrics.recoveries)
        gate.plane.ticker.looks.append(self.recovery.tick)

    def waits(self, now: float) -> str:
        gate = self.stage.gate
        return reason_to_wait(gate.board, now, stopping=gate.is_stopping(), gate_fault=False)

    async def act(self, remedy: Remedy, about: Incident) -> RecoveryReport:
        self.deeds.append(about["unit"])
        await asyncio.sleep(1.0)
        self.stage.engines[about["unit"]].restart()
        return RecoveryReport(RecoveryResult.OK, "it exited with 0")

    async def retry(self, state: UnitState) -> bool:
        self.retries.append(state.unit.name)
        if self.retries_help:
            self.stage.engines[state.unit.name].behaviour = Behaviour()
        return self.retries_help

    async def record(self, path: str, entry: Mapping[str, Any]) -> None:
        await asyncio.sleep(0.01)
        self.entries.append(entry)


def wedge(engine: Engine) -> None:
    engine.behaviour.wedged = True


@pytest.mark.parametrize("hurt", [Engine.die, wedge])
@played(Stage, units=2)
async def test_a_unit_that_stays_down_is_recovered_and_serves_again(
    stage: Stage, hurt: Callable[[Engine], None]
) -> None:
    medic = Medic(stage)
    hurt(stage.engines["a"])
    await stage.until(lambda: medic.deeds == ["a"], PROMISE_S + REMEDY.after_s + 2.0)
    await stage.until(stage.all_up, BACK_S)
    await asyncio.sleep(100.0)
    visits = await stage.crowd(8, max_tokens=4)
    assert {visit.unit for visit in visits} == {"a", "b"}
    assert medic.deeds == ["a"]
    assert [entry["step"] for entry in medic.entries] == ["begin", "end"]


@played(Stage, units=2)
async def test_an_engine_is_asked_to_retry_before_its_unit_is_restarted(stage: Stage) -> None:
    medic = Medic(stage)
    medic.retries_help = True
    wedge(stage.engines["a"])
    await stage.until(lambda: medic.retries == ["a"], PROMISE_S + REMEDY.after_s + 2.0)
    await stage.until(stage.all_up, BACK_S)
    await asyncio.sleep(100.0)
    assert medic.deeds == []
    assert medic.entries[-1]["result"] == "retried"


@pytest.mark.parametrize("units", [2, 3])
@played(Stage, given=("units",))
async def test_a_gate_that_is_cut_off_for_long_shoots_nobody(stage: Stage) -> None:
    medic = Medic(stage)
    for engine in stage.engines.values():
        stage.world.net.partition(engine.address)
    await asyncio.sleep(PANIC_MAX_S + 300.0)
    assert all(state.case.verdict is Verdict.DOWN for state in stage.gate.board)
    stage.world.net.heal()
    await stage.until(stage.all_up, BACK_S)
    await asyncio.sleep(60.0)
    assert medic.deeds == []
    assert len(stage.told("recovery_held")) == 1


@pytest.mark.nightly
@played(Stage, units=3)
async def test_a_healthy_fleet_sees_no_recovery(stage: Stage) -> None:
    medic = Medic(stage, Remedy("audit", RunCommand(("recover",)), after_s=0.1, backoff_s=0.1))
    for _ in range(20):
        await stage.crowd(60, max_tokens=20)
        await asyncio.sleep(stage.rng.uniform(0.0, 6.0))
    assert medic.deeds == []


# -- a roll of a unit that comes back at another address, as in Kubernetes and ECS ------------------------

POLICY = RollPolicy(RunCommand(("roll",)), "audit")


class SimulatedRoll(OwnRoll):
    """A roll in the time of a stage."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def clock_ms(self) -> int:
        return round(1000.0 * self.stage.now)


class RolledStage(Stage):
    """Units a and b; the command moves a unit to the engine of c, which runs already."""

    def __init__(self) -> None:
        super().__init__(version="1.9")
        self.add_engine("c")
        self.moved_at = 0.0
        self.roller: Roller

    async def roll(self, version: str) -> None:
        """Begin one; units must say that they are this version."""

        async def command(*_: object) -> RecoveryReport:
            self.moved_at = self.now
            moved, other = self.fleet("a", url=self.engines["c"].url), self.fleet("b")
            self.reload(Fleet(moved.cells, moved.units + other.units))
            return RecoveryReport(RecoveryResult.OK, "it is moved")

        async def record(_path: str, _entry: Mapping[str, Any]) -> None: ...

        self.roller = roll_units(self.gate.plane, POLICY, SimulatedRoll(self), command)
        self.roller._ports = replace(self.roller._ports, record=record)
        await self.roller.order(Order("start", "op", version=version))

    def phase(self) -> Phase | None:
        return self.roller.roll.units[0].phase if self.roller.roll is not None else None

    async def ask_until(self, phase: Phase) -> None:
        """Requests without a pause."""
        while self.phase() is not phase:
            assert (await self.ask(max_tokens=2)).is_answered


@played(RolledStage)
async def test_a_unit_that_comes_back_at_another_address_gets_no_request_before_it_is_proven(
    stage: RolledStage,
) -> None:
    await stage.roll(version="1.9")
    await stage.ask_until(Phase.PROVING)
    await stage.ask_until(Phase.SOAKING)
    # The last request may have been on its way when that began.
    soaks_at = stage.roller.roll.units[0].since_ms / 1000.0 if stage.roller.roll is not None else 0.0
    assert [at for at in stage.picks("a", stage.moved_at) if at < soaks_at] == []
    await asyncio.sleep(1.0)
    await stage.crowd(20, max_tokens=2)
    assert stage.picks("a", stage.moved_at)


@played(RolledStage)
async def test_one_that_fails_there_gets_none_until_an_operator_undrains_it(stage: RolledStage) -> None:
    await stage.roll(version="2.0")
    await stage.ask_until(Phase.FAILED)
    await stage.until(lambda: stage.verdict("a") is Verdict.UP, BACK_S)
    await stage.crowd(20, max_tokens=2)
    assert stage.picks("a", stage.moved_at) == []
    stage.gate.plane.set_drain("a", False)
    await asyncio.sleep(10.0)
    await stage.crowd(20, max_tokens=2)
    assert stage.picks("a", stage.moved_at)
