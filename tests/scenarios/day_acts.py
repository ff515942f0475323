"""What operators do in a day, one after the other; nobody may feel any of it.

No fault is dealt meanwhile, but for those that are the act.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

from tests.scenarios.day_stage import UNITS, DayStage
from tests.scenarios.gates import HOSTS
from tests.scenarios.harness import BACK_S

ROLLED_S = 60.0
LOOKED_AT_S = 2.0
RUSH = 40
"""Requests at once: fewer than two units take."""
MOST_UNITS = UNITS + 2

Act = Callable[[DayStage, Random], Awaitable[None]]


async def add_unit(stage: DayStage, _: Random) -> None:
    """Scale up."""
    if len(stage.units) < MOST_UNITS:
        stage.new_unit()
        await stage.are_up()


async def remove_unit(stage: DayStage, rng: Random) -> None:
    """Scale down, without a word to those who are being served."""
    if len(stage.units) > UNITS:
        await stage.retire(_any(stage, rng))


async def change_unit(stage: DayStage, rng: Random) -> None:
    """Another weight, another limit."""
    changed = {"weight": rng.choice((0.5, 1.0, 2.0)), "max_in_flight": rng.choice((16, 20, 32))}
    stage.units[_any(stage, rng)] |= changed
    stage.reconfigure()


async def probe_otherwise(stage: DayStage, rng: Random) -> None:
    """Its nodes get agents and pages to look at, and lose them again."""
    name = _any(stage, rng)
    fields = stage.units[name]
    stage.agents, stage.pages = rng.random() < 0.7, rng.random() < 0.7
    fields["nodes"] = stage.fleet(name).units[0].nodes
    stage.agents = stage.pages = False
    stage.reconfigure()
    await asyncio.sleep(rng.uniform(5.0, 40.0))
    await stage.are_up()
    del fields["nodes"]
    stage.reconfigure()


async def move_unit(stage: DayStage, rng: Random) -> None:
    """A unit keeps its name and gets another address."""
    name = _any(stage, rng)
    there = stage.new_unit()
    await stage.are_up()
    del stage.units[there.name]
    stage.units[name]["url"] = there.url
    stage.reconfigure()
    await stage.are_up()
    await replace_unit(stage, name)
    stage.bury(there.name)


async def drain_unit(stage: DayStage, rng: Random) -> None:
    """One unit is left alone for a while."""
    name = _any(stage, rng)
    stage.drain(name, drained=True)
    await asyncio.sleep(rng.uniform(1.0, 30.0))
    stage.drain(name, drained=False)


async def roll_restart(stage: DayStage, _: Random) -> None:
    """One unit after the other: drained, restarted once it is empty, and back in use."""
    for name in list(stage.units):
        stage.drain(name, drained=True)
        await stage.until(lambda name=name: not stage.in_flight(name), ROLLED_S)  # type: ignore[misc]
        stage.engines[name].restart()
        stage.drain(name, drained=False)
        await asyncio.sleep(LOOKED_AT_S)
        await stage.are_up()


async def roll_update(stage: DayStage, _: Random) -> None:
    """Each unit gives way to a new one under a new name."""
    for name in list(stage.units):
        await replace_unit(stage, name)


async def replace_unit(stage: DayStage, name: str) -> None:
    """A new unit comes, then an old one goes."""
    stage.new_unit()
    await stage.are_up()
    await stage.retire(name)


async def replace_gate(stage: DayStage, _: Random) -> None:
    """One gate is restarted; the other one is not, all day long."""
    await stage.replace_gate(HOSTS[1])


async def reload_gates(stage: DayStage, _: Random) -> None:
    """The configuration is read again, and nothing has changed."""
    stage.reconfigure()


async def lose_redis(stage: DayStage, rng: Random) -> None:
    """It is away or hangs, and comes back with or without what it knew."""
    redis = stage.redis
    redis.is_away, redis.hangs = (True, False) if rng.random() < 0.5 else (False, True)
    await asyncio.sleep(rng.uniform(2.0, 20.0))
    if rng.random() < 0.5:
        redis.forget()
    redis.is_away = redis.hangs = False


async def rush(stage: DayStage, rng: Random) -> None:
    """Many tenants ask at once."""
    asks = (
        stage.ask(max_tokens=8, headers={"x-gateway-inference-fairness-id": f"rush-{rng.getrandbits(32)}"})
        for _ in range(RUSH)
    )
    assert all(visit.is_answered for visit in await asyncio.gather(*asks))


async def lose_unit(stage: DayStage, rng: Random) -> None:
    """A unit dies for good, and only then is taken off the configuration."""
    if len(stage.units) > UNITS:
        name = _any(stage, rng)
        stage.engines[name].die()
        await asyncio.sleep(rng.uniform(0.0, 30.0))
        await stage.retire(name)


ACTS: dict[str, Act] = {
    "a unit added": add_unit,
    "a unit removed": remove_unit,
    "a unit changed": change_unit,
    "a unit probed otherwise": probe_otherwise,
    "a unit moved": move_unit,
    "a unit drained": drain_unit,
    "a unit lost for good": lose_unit,
    "rolling restart": roll_restart,
    "rolling update": roll_update,
    "a gate replaced": replace_gate,
    "gates reloaded": reload_gates,
    "Redis lost": lose_redis,
    "a rush": rush,
}


async def tidy(stage: DayStage) -> None:
    """As many units as in the beginning, all of them new, with nothing particular about them."""
    await roll_update(stage, Random())
    while len(stage.units) > UNITS:
        await stage.retire(next(iter(stage.units)))
    await stage.until(stage.all_up, BACK_S)


def _any(stage: DayStage, rng: Random) -> str:
    return rng.choice(list(stage.units))
