"""Two gates and units that come and go under ever new names. What has ended is judged, and then forgotten.

A day is too long to keep all that happened in it; and what the stage kept would hide what the gates keep.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import count
from typing import Any

from cellgate.proxy.config.settings import Timeouts
from cellgate.router.nouns import Fleet
from tests.scenarios.gates import HOSTS, GatesStage
from tests.scenarios.harness import BACK_S, LATENCY_S
from tests.sim.engine import Engine
from tests.sim.timing import Timing

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

    def in_flight(self, name: str) -> int:
        """At all gates."""
        return sum(gate.board.units[name].in_flight for gate in self.alive.values())

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
