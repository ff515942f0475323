"""What a gate in the gym learns of its units' health and load, told to the Board as proxy/ and probes/ do.

control/prober.py and control/stall_watch.py (evidence, silence), probes/engine_metrics.py (reports),
probes/canary.py. A canary goes through the simulated engine; whether a process is there is known from the
world.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from cellgate.router.board import Board, Consequence
from cellgate.router.fleet_learning import comparing_speeds
from cellgate.router.health import find_stall, still_s
from cellgate.router.judge import STALL_SOURCE
from cellgate.router.nouns import Evidence, Fleet, Load, Sign, Strength, Verdict
from cellgate.router.outliers import COMPARE_S
from cellgate.router.unit_state import UnitState
from loadtests.gym.world import World

TICK_S = 0.25
REPORT_S, IDLE_REPORT_S = 1.0, 3.0
"""How often an engine's numbers are read, while it has requests and while it has none."""
HUSH_S = 0.25
SCRAPE_S = 0.004
"""From the moment an engine looks at its numbers to the moment the gate has them."""
WATCHED_S = 30.0
"""A gate has watched its units for so long when the load begins: nobody starts slowly any more."""
CANARY_S = 1.0


class Watch:
    """One gate's. `flipped` is called when a verdict has changed."""

    def __init__(
        self, world: World, board: Board, rng: random.Random, flipped: Callable[[Consequence], None]
    ) -> None:
        self._world = world
        self._board = board
        self._rng = rng
        self._flipped = flipped
        self._numbers = {place.unit.name: number for number, place in enumerate(world.fleet.places)}
        self._present = list(world.up)
        self._reported_at: dict[str, float] = {}
        self._compare_at = 0.0
        began_at = world.begins_at - WATCHED_S
        self._configure(began_at)
        for state in board:
            self.observe(state, Sign.GOOD, Strength.STRONG, "canary", began_at)
            self._report(state, world.begins_at - rng.random())

    def tick(self, now: float) -> None:
        """As StallWatch.tick; and reports, where they are due."""
        for state in self._board:
            if self._present[self._numbers[state.unit.name]]:
                state.answered_at = now
        self._board.tick(now)
        for state in self._board:
            is_silent = bool(state.leases) and now - state.quiet_since >= HUSH_S
            if is_silent:
                self._look_into_silence(state, now)
            period_s = REPORT_S if state.leases or state.foreign else IDLE_REPORT_S
            if is_silent or now - self._reported_at.get(state.unit.name, 0.0) >= period_s - TICK_S / 2:
                self._report(state, now)
        if now >= self._compare_at:
            self._compare_at = now + COMPARE_S
            deque(comparing_speeds(self._board.units.values()), maxlen=0)

    def changed(self, unit: int, now: float, *, is_up: bool) -> None:
        """A process is gone: its requests show it, or the next probe. Or it is back, and passes canaries."""
        self._present[unit] = is_up
        name = self._world.fleet.places[unit].unit.name
        if name not in self._board.units:
            self._configure(now)
        state = self._board.units[name]
        if is_up:
            # What is read of a process that has started since is another epoch.
            for epoch in ("0", f"{now:.3f}"):
                self.observe(state, Sign.NEUTRAL, Strength.WEAK, "engine_metrics", now, epoch)
            self._world.at(now + CANARY_S, lambda _: self._fly(state))
        else:
            self._world.at(now + self._rng.random(), lambda at: self._missed(state, at))

    def is_there(self, unit: str) -> bool:
        """Whether the processes of a unit are."""
        return self._present[self._numbers[unit]]

    def observe(
        self,
        state: UnitState,
        sign: Sign,
        strength: Strength,
        source: str,
        at: float,
        epoch: str | None = None,
    ) -> None:
        """As Prober.observe in proxy/control/prober.py."""
        consequence = self._board.observe(Evidence(state.unit.name, sign, strength, source, "", at, epoch))
        if consequence.wants_canary:
            self._fly(state)
        if consequence.flip is not None:
            self._flipped(consequence)

    def _look_into_silence(self, state: UnitState, now: float) -> None:
        state.record_stall(still_s(state, now))
        found = find_stall(state, now, self._board.rules)
        if found is not None and now - state.stall_reported_at >= found.limit_s:
            state.stall_reported_at = now
            self.observe(state, Sign.BAD, Strength.STRONG, STALL_SOURCE, now)

    def _report(self, state: UnitState, now: float) -> None:
        """The numbers are those of the last step that has ended."""
        name = state.unit.name
        self._reported_at[name] = now
        if not self.is_there(name):
            return
        engine = self._world.engines[self._numbers[name]]
        load = Load(
            name,
            now + SCRAPE_S,
            running=len(engine.running),
            waiting=len(engine.waiting),
            kv_use=engine.kv_use,
            own_in_flight=state.in_flight,
            progress=float(engine.steps + engine.prefilled + engine.answered),
            sighted=True,
            kv_tokens=engine.model.kv_tokens,
        )
        self._world.at(max(now + SCRAPE_S, self._world.now), lambda _: self._board.report(load))

    def _configure(self, now: float) -> None:
        fleet, board = self._world.fleet, self._board
        units = [
            place.unit
            for number, place in enumerate(fleet.places)
            if self._present[number] or place.unit.name in board.units
        ]
        board.configure(Fleet(fleet.cells, tuple(units)), now)

    def _fly(self, state: UnitState) -> None:
        """A canary; nothing is heard of one to a process that is gone."""
        if self.is_there(state.unit.name):
            self._world.canary(self._numbers[state.unit.name], lambda at: self._landed(state, at))

    def _landed(self, state: UnitState, now: float) -> None:
        self.observe(state, Sign.GOOD, Strength.STRONG, "canary", now)
        if state.case.verdict is not Verdict.UP:
            self._world.at(now + CANARY_S, lambda _: self._fly(state))

    def _missed(self, state: UnitState, now: float) -> None:
        if not self.is_there(state.unit.name):
            self.observe(state, Sign.BAD, Strength.FATAL, "canary", now)
