"""A switch is lost, and with it all units that have a node under it: one event names it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from cellgate.router.nouns import Node, Role
from tests.scenarios.harness import BACK_S, PROMISE_S, Stage
from tests.sim.behaviour import Behaviour

UNDER_SWITCH = "abc"


def test_units_behind_a_lost_switch_are_one_event_that_names_it() -> None:
    stage = Stage(units=6)
    fleet = stage.fleet(*stage.engines)
    placed = [
        replace(unit, nodes=(Node(unit.name, Role.LEADER, place=place_of(unit.name)),))
        for unit in fleet.units
    ]

    async def scenario() -> None:
        stage.gate.plane.configure(replace(fleet, units=tuple(placed)))
        await stage.until(stage.all_up, BACK_S)
        for name in UNDER_SWITCH:
            stage.engines[name].behaviour = Behaviour(wedged=True)
        await asyncio.sleep(PROMISE_S + 10.0)
        told = [event for event in stage.gate.events.last() if event["kind"] == "shared_fate"]
        assert len(told) == 1
        assert "all 3 units with a node under zone/s1 are DOWN: a, b, c" in told[0]["line"]

    stage.play(scenario())


def place_of(unit: str) -> tuple[str, ...]:
    """Under one switch, or under one of its own."""
    return ("zone", "s1" if unit in UNDER_SWITCH else f"s-{unit}")
