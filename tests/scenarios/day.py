"""A day of traffic with churn, in virtual time: users by day and few by night, faults, operators at work.

    .venv/bin/python -m tests.scenarios.day --seed 1

All that a calm plan promises holds (plans.py), and nothing grows: at quiet moments, with as many units as in
the beginning, a gate that ran all day keeps what it kept then.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from random import Random
from typing import Any

from cellgate.proxy.config.settings import Timeouts
from cellgate.router.nouns import Fleet
from tests.scenarios.day_sizes import Mark, grown, mark, table
from tests.scenarios.gates import HOSTS, GatesStage, lose_redis, roll_units
from tests.scenarios.harness import BACK_S, LATENCY_S, RULES
from tests.scenarios.plans import KINDS, STRIKES, wrong_with
from tests.scenarios.visit import Visit
from tests.sim.chaos import Chaos, Strike
from tests.sim.engine import Engine
from tests.sim.timing import Timing
from tests.sim.world import World

UNITS = 3
HEARTBEAT_S = 1.0
"""Slower than usual, for the sake of the time that a day takes."""
LEAVES_S = 120.0
_SHOWN = re.compile(rb'\bunit="([^"]+)"')


class DayStage(GatesStage):
    """`units` are those of the gates' configuration, by name, with what is particular about each."""

    heartbeat_s = HEARTBEAT_S

    def __init__(self, seed: int, limit_s: float) -> None:
        super().__init__(
            seed,
            UNITS,
            timing=Timing(0.05, 0.05),
            followers=1,
            agents=False,
            max_in_flight=16,
            timeouts=Timeouts(head_hold_s=2.0),
            limit_s=limit_s,
        )
        self.units: dict[str, dict[str, Any]] = {name: {} for name in self.engines}
        self._units_ever = count(1)

    # -- units ---------------------------------------------------------------------------------------------

    def new_unit(self) -> Engine:
        """One more engine, and its unit in the gates' configuration."""
        name = f"u{next(self._units_ever)}"
        engine = self.add_engine(name)
        self.units[name] = {}
        self.reconfigure()
        return engine

    def reconfigure(self) -> None:
        """All gates read their configuration again."""
        fleet = self.fleet()
        self.gate.settings = replace(self.gate.settings, fleet=fleet)
        for gate in self.alive.values():
            gate.reload(replace(gate.settings, fleet=fleet), "SIGHUP")

    async def retire(self, name: str) -> None:
        """A unit is taken off the configuration; its engine goes once it is empty."""
        del self.units[name]
        self.reconfigure()
        await self.until(lambda: not self._is_used(name), LEAVES_S)
        self.bury(name)

    def bury(self, name: str) -> None:
        """An engine and its machines are gone for good."""
        self.gate.violations += self._unproven()
        engine = self.engines.pop(name)
        engine.die()
        self._lost_since.pop(engine.url, None)
        for node in engine.nodes:
            self.world.net.remove_host(node.name)

    def fleet(self, *names: str, **changed: Any) -> Fleet:
        """The fleet as it is to be."""
        if names:
            return super().fleet(*names, **changed)
        fleets = [super(DayStage, self).fleet(name, **fields) for name, fields in self.units.items()]
        return Fleet(fleets[0].cells, tuple(unit for fleet in fleets for unit in fleet.units))

    async def are_up(self) -> None:
        """Wait until all units are in use at all gates."""
        await self.until(self.all_up, BACK_S)

    def _is_used(self, name: str) -> bool:
        leaving = (state for gate in self.alive.values() for state in gate.board.leaving)
        return any(state.unit.name == name for state in leaving)

    # -- gates ---------------------------------------------------------------------------------------------

    async def replace_gate(self, host: str) -> None:
        """As it is; what went with the gate is judged at once."""
        before = self.alive[host]
        await super().replace_gate(host)
        self.gates.remove(before)
        self._picks_seen.pop(before, None)
        self.gate.violations += before.violations + before.leftovers()
        # Its clients' visits are judged with those of the others.
        self.gate.records += before.records

    async def scrape(self) -> list[str]:
        """As Prometheus does. What is shown of units that are gone."""
        wrong = []
        for host, gate in self.alive.items():
            shown = {name.decode() for name in _SHOWN.findall(await gate.metrics.render())}
            known = self.units.keys() | {state.unit.name for state in gate.board.leaving}
            wrong += [f"the metrics of {host} show {name}, which is gone" for name in shown - known]
        return wrong

    # -- judging -------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Check all that ended since the last time, while nothing is under way; then forget it.

        Raises AssertionError with what is wrong.
        """
        self._check()
        self.visits.clear()
        self._picks_seen.clear()
        for gate in self.gates:
            for diary in (gate.records, gate.router.picks, gate.router.leases):
                diary.clear()
            gate.outcomes.clear()
            gate.failures.clear()
        for engine in self.engines.values():
            for kept in (engine.served, engine.canaries, engine.counted, engine.unproven):
                kept.clear()

    def oldest(self) -> tuple[object, ...]:
        """The gate that runs all day, and its line to Redis."""
        gate = self.alive[HOSTS[0]]
        return gate, self.links[gate]

    async def _begin(self) -> None:
        await super()._begin()
        # One beat, so that they know of each other.
        await self.until(lambda: all(link.peers() for link in self.links.values()), 10 * LATENCY_S + 3.0)


# -- what operators do: nobody may feel any of it ---------------------------------------------------------

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
    await roll_units(stage, list(stage.units))


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
    "Redis lost": lambda stage, rng: lose_redis(stage, rng, most_s=20.0),
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


# -- the day ----------------------------------------------------------------------------------------------

HOUR_S = 3600.0
USERS = 12
"""At noon; at midnight there is one."""
THINK_S = 25.0
QUIET_S = 300.0
"""Longer than anything is kept that nobody uses: connections (75 s), gates that are gone (240 beats)."""
FAULTS_S = (60.0, 240.0)
FIRST_S = 60.0
"""Of traffic before the first look: what is made once is made then."""
MARK_H = 2.0
"""Of traffic, from one quiet moment to the next; or half a shorter day."""


class Day:
    """One day, played. `wrong` is what must not be; `marks` are from the quiet moments, first to last."""

    def __init__(self, seed: int, hours: float, tell: Callable[[str], None] = lambda _line: None) -> None:
        self.rng = Random(seed)
        self.hours = hours
        self.stage = DayStage(seed, limit_s=(2.0 * hours + 2.0) * HOUR_S)
        self.counts: Counter[str] = Counter()
        self.dealt: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.marks: list[Mark] = []
        self._tell = tell
        self._is_open = False
        self._open_s = 0.0
        """Of traffic, before the part that is being played; that began at `_part_at`."""
        self._part_at = 0.0
        self.stage.play(self._scenario())
        self.wrong += grown(self.marks[len(self.marks) // 2], self.marks[-1])

    # -- the hours -----------------------------------------------------------------------------------------

    async def _scenario(self) -> None:
        parts = max(2, round(self.hours / MARK_H))
        await self._part(FIRST_S)
        for _ in range(parts):
            await self._take_stock()
            await self._part(self.hours * HOUR_S / parts)
        await self._take_stock()

    async def _part(self, seconds: float) -> None:
        """Traffic, faults and acts for so long."""
        self._part_at, self._is_open = self.stage.now, True
        ends_at = self._part_at + seconds
        users = [asyncio.ensure_future(self._use(number)) for number in range(USERS)]
        while self.stage.now < ends_at:
            await self._hurt(min(self.rng.uniform(*FAULTS_S), ends_at - self.stage.now))
            name = self.rng.choice(list(ACTS))
            self.dealt[name] += 1
            await ACTS[name](self.stage, self.rng)
            self.wrong += await self.stage.scrape()
        self._is_open = False
        self._open_s += seconds
        await asyncio.gather(*users)

    async def _hurt(self, seconds: float) -> None:
        """One unit at a time falls ill. All are well in the end."""
        strikes: dict[str, Strike] = {name: partial(self._strike, name) for name in STRIKES}
        engines = [self.stage.engines[name] for name in self.stage.units if name in self.stage.engines]
        chaos = Chaos(self.stage.world, engines, 1, strikes, pause_s=(5.0, 60.0), lasting_s=(1.0, 20.0))
        await asyncio.sleep(seconds)
        chaos.stop()
        await asyncio.sleep(LOOKED_AT_S)
        await self.stage.until(self.stage.all_up, BACK_S + RULES.slow_start_s)

    def _strike(self, name: str, world: World, engine: Engine) -> None:
        self.dealt[name] += 1
        STRIKES[name](world, engine)

    async def _take_stock(self) -> None:
        """Let everything come to rest, look at what is left of it, and forget it."""
        await tidy(self.stage)
        await asyncio.sleep(QUIET_S)
        self.wrong += await self.stage.scrape()
        self.stage.judge()
        self.marks.append(mark(self.stage.world, *self.stage.oldest()))
        hour, alive = self._open_s / HOUR_S, self.marks[-1].blocks
        self._tell(f"{hour:5.2f} h: {self.counts.total()} requests, {alive} objects alive")

    # -- who asks ------------------------------------------------------------------------------------------

    def _share(self) -> float:
        """The part of all users who are awake: 1 at noon."""
        turn = (self._open_s + self.stage.now - self._part_at) / (self.hours * HOUR_S)
        return 0.5 - 0.5 * math.cos(2.0 * math.pi * turn)

    async def _use(self, number: int) -> None:
        stage, rng = self.stage, self.rng
        while self._is_open:
            await asyncio.sleep(rng.expovariate(1.0 / THINK_S))
            if not self._is_open or number > self._share() * USERS:
                continue
            kind = rng.choices(list(KINDS), [share for share, _ in KINDS.values()])[0]
            visit = await stage.ask(
                headers={"x-gateway-inference-fairness-id": f"tenant-{rng.getrandbits(32)}"},
                prompt_tokens=rng.randrange(10, 2000),
                max_tokens=rng.randrange(4, 40),
                **KINDS[kind][1](rng),
            )
            self._note(kind, visit)

    def _note(self, kind: str, visit: Visit) -> None:
        self.counts["whole" if visit.is_answered else "left" if kind == "leaves" else "not whole"] += 1
        if kind != "leaves" and (sentence := wrong_with(kind, visit, is_calm=True)):
            self.wrong.append(f"{self.stage.now:.1f} {visit.request_id} ({kind}, {visit.unit}): {sentence}")


def lines(day: Day) -> Iterator[str]:
    """What came of it, for people."""
    quarter = max(1, len(day.marks) // 4)
    yield from table(day.marks[::quarter])
    yield f"{day.counts.total()} requests: {_listed(day.counts)}"
    yield f"befell: {_listed(day.dealt)}"
    yield f"{len(day.wrong)} things are wrong" + "".join(f"\n  {each}" for each in day.wrong[:20])


def main() -> int:
    """Play a day and print what came of it; 1 when anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.day", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hours", type=float, default=24.0, help="of virtual time")
    asked = parser.parse_args()
    began_s = time.process_time()
    day = Day(asked.seed, asked.hours, partial(print, flush=True))
    print(*lines(day), f"took {time.process_time() - began_s:.0f} s of CPU", sep="\n")
    return 1 if day.wrong else 0


def _listed(counts: Counter[Any]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.most_common())


if __name__ == "__main__":
    sys.exit(main())
