"""A roll of a unit that comes back at another address, as in Kubernetes and ECS, while there are requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cellgate.proxy.config.action_settings import RollPolicy, RunCommand
from cellgate.proxy.extras.operator.plan import RecoveryReport, RecoveryResult
from cellgate.proxy.extras.operator.roll_plan import Order, OwnRoll, Phase
from cellgate.proxy.extras.operator.roller import Roller, roll_units
from cellgate.router.nouns import Fleet
from tests.scenarios.harness import Stage
from tests.sim.world import played

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
