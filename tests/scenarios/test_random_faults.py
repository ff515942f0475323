"""Faults and clients at random, by seed: whatever happens, the invariants of the stage hold."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from random import Random

import pytest

from cellgate.policies import POLICIES
from cellgate.proxy.config.settings import Timeouts
from cellgate.proxy.control.dispatcher import COOL_S
from cellgate.router.error_share import Errors
from tests.scenarios.harness import BACK_S, CHAT, Stage
from tests.scenarios.seeds import seeds
from tests.scenarios.visit import Visit, chat
from tests.sim.chaos import STRIKES, Chaos, Strike
from tests.sim.client import Manner
from tests.sim.engine import Engine
from tests.sim.loop import START_S
from tests.sim.tcp import Link
from tests.sim.timing import Timing
from tests.sim.world import World

UNITS = 3
LASTING_S = 45.0
FAIR_S = 10 * Errors.HALF_LIFE_S
"""Until old errors are worth less than a millisecond of waiting."""
RATE_PER_S = 4.0
LOOKED_AT_S = 2.0
TIMEOUTS = Timeouts(head_hold_s=2.0, answer_s=40.0)
LINKS = (Link(), Link(split=0.9), Link(hiccup=0.5), Link((0.02, 0.05)))


class Play:
    """Faults that strike at most `at_most` units at a time, and clients of all manners.

    `meddling` adds an operator who drains and reloads, and moments in which the gate itself stands still.
    `context` are the clients that only wanted an answer, `struck` the units that a fault has struck.
    """

    def __init__(self, seed: int, at_most: int, *, meddling: bool = False) -> None:
        rng = Random(seed)
        self.stage = Stage(
            seed,
            UNITS,
            timing=Timing(rng.choice((0.05, 0.5)), max_running=rng.choice((4, 256))),
            followers=1,
            agents=rng.random() < 0.5,
            timeouts=TIMEOUTS,
            max_in_flight=32,
            policy=rng.choice(sorted(POLICIES)),
            pass_unlisted=True,
        )
        self.stage.world.net.default_link = rng.choice(LINKS)
        self.patient: list[Visit] = []
        self.struck: set[str] = set()
        self._at_most = at_most
        self._meddling = meddling
        self.stage.play(self._scenario())

    async def _scenario(self) -> None:
        stage = self.stage
        strikes = {name: self._noting(strike) for name, strike in STRIKES.items()}
        engines = list(stage.engines.values())
        chaos = Chaos(stage.world, engines, self._at_most, strikes, pause_s=(1.0, 10.0), cured=stage.cured)
        visits = []
        while stage.now < START_S + LASTING_S:
            visits.append(asyncio.ensure_future(self._visit()))
            if self._meddling and stage.rng.random() < 0.1:
                self._meddle()
            await asyncio.sleep(stage.rng.expovariate(RATE_PER_S))
        chaos.stop()
        stage.reload(stage.fleet(*stage.engines))
        for name in stage.engines:
            stage.gate.set_drain(name, drained=False)
        await asyncio.gather(*visits)
        # A unit that was restarted in the end is UP until somebody has looked at it.
        await asyncio.sleep(LOOKED_AT_S)
        await stage.until(stage.all_up, BACK_S)
        await asyncio.sleep(COOL_S)
        after = await stage.crowd(12 * UNITS, max_tokens=1)
        # One that was slow until now has to show that it is no more.
        since = stage.now
        while {visit.unit for visit in after} != set(stage.engines) and stage.now - since < FAIR_S:
            after += await stage.crowd(UNITS, max_tokens=4)
            await asyncio.sleep(0.25)
        assert all(visit.is_answered for visit in after)
        assert {visit.unit for visit in after} == set(stage.engines)

    def _noting(self, strike: Strike) -> Strike:
        def noted(world: World, engine: Engine) -> None:
            self.struck.add(engine.name)
            strike(world, engine)

        return noted

    def _meddle(self) -> None:
        stage, rng = self.stage, self.stage.rng
        match rng.randrange(4):
            case 0:
                some = rng.sample(sorted(stage.engines), rng.randrange(1, UNITS + 1))
                stage.reload(stage.fleet(*some, max_in_flight=rng.choice((2, 32))))
            case 1:
                # Two units change places.
                first, second, *_ = rng.sample(sorted(stage.engines), UNITS)
                fleet = stage.fleet(*stage.engines)
                urls = {first: stage.engines[second].url, second: stage.engines[first].url}
                units = (replace(unit, url=urls.get(unit.name, unit.url)) for unit in fleet.units)
                stage.reload(replace(fleet, units=tuple(units)))
            case 2:
                stage.gate.set_drain(rng.choice(sorted(stage.engines)), drained=rng.random() < 0.5)
            case 3:
                stage.stand_still(rng.expovariate(1.0))

    async def _visit(self) -> None:
        stage, rng = self.stage, self.stage.rng
        size = rng.randrange(1, 40)
        match rng.randrange(12):
            case 0:
                await stage.ask(max_tokens=size, manner=Manner(leave_after_s=rng.uniform(0.0, 2.0)))
            case 1:
                await stage.ask(max_tokens=size, manner=Manner(leave_after_events=size))
            case 2:
                never = Manner(read_every_s=math.inf, leave_after_s=5.0)
                await stage.ask(max_tokens=size, manner=never)
            case 3:
                await stage.ask(max_tokens=size, manner=Manner(read_every_s=0.1))
            case 4:
                await stage.send("POST", CHAT, b"[]")
            case 5:
                await stage.send("GET", "/version")
            case 6:
                await stage.pipeline([chat("one", max_tokens=size), chat("two", stream=False)])
            case 7:
                await stage.send("POST", "/unlisted", b"{}")
            case kind:
                self.patient.append(await stage.ask(max_tokens=size, stream=kind < 10))


@pytest.mark.parametrize("seed", seeds(range(16)))
def test_with_one_unit_hurt_at_a_time_nobody_is_refused_and_no_other_unit_is_suspected(seed: int) -> None:
    play = Play(seed, at_most=1)
    assert {visit.reply.status for visit in play.patient} == {200}
    for name in play.stage.engines.keys() - play.struck:
        assert play.stage.flips(name) == ["up"]


@pytest.mark.parametrize("seed", [*seeds(range(100, 110)), 200])
def test_with_any_unit_hurt_at_any_time_what_cannot_be_answered_is_refused_honestly(seed: int) -> None:
    # 200: some wait that could go to the units of others who wait.
    play = Play(seed, at_most=2 if seed == 200 else UNITS, meddling=seed % 2 == 0)
    assert any(visit.is_answered for visit in play.patient)
