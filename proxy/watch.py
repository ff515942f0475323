"""The watch: keeps probes running on every unit and turns what is found into what must follow.

1. All evidence, of probes and of finished requests, goes through `observe`: nothing else flips a unit.
2. A finding about a unit that has left the board, or was replaced under its name, is dropped.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from probes import PROBES
from probes.base import Fetch, Net, Probe
from probes.canary import Canary
from probes.runner import Runner
from router.board import Board, Consequence, Desk
from router.nouns import Evidence, Finding, Load, Models, Node, Rules, Sign, Strength, Unit, Verdict


@dataclass(frozen=True, slots=True)
class Ways:
    """How the probes of a unit reach it: its own address, and any other."""

    fetch: Fetch
    net: Net


@dataclass(frozen=True, slots=True)
class _DeskPatient:
    """One probe's view of a desk, or of a node of it."""

    desk: Desk
    node: Node | None
    rules: Rules
    fetch: Fetch
    net: Net
    loop: asyncio.AbstractEventLoop
    rng: random.Random
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def unit(self) -> Unit:
        return self.desk.unit

    @property
    def verdict(self) -> Verdict:
        return self.desk.case.verdict

    @property
    def in_flight(self) -> int:
        return self.desk.in_flight

    @property
    def life_at(self) -> float:
        return self.desk.life_at

    @property
    def models(self) -> frozenset[str]:
        return self.desk.models

    def now(self) -> float:
        return self.loop.time()

    def new_id(self) -> str:
        return f"{self.rng.getrandbits(40):010x}"

    def heard(self) -> None:
        self.desk.heard_at = self.loop.time()


class Watch:
    """Probes all units of a board. `on_consequence` is called for each flip, once the board has it."""

    def __init__(
        self,
        board: Board,
        ways_to: Callable[[Desk], Ways],
        rng: random.Random,
        on_consequence: Callable[[Consequence], None],
    ) -> None:
        self._board = board
        self._ways_to = ways_to
        self._rng = rng
        self._on_consequence = on_consequence
        self._probes = [kind() for kind in PROBES.values()]
        self._canaries: dict[str, Runner] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def start(self, unit: Unit) -> None:
        """Watch a unit that is on the board; one watched already is watched anew. Needs a running loop."""
        self.stop(unit.name)
        desk, tasks = self._board.desks[unit.name], []
        ways = self._ways_to(desk)
        for node, probe in self._looks_at(unit):
            runner = self._runner(desk, node, probe, ways)
            if probe.name == Canary.name:
                self._canaries[unit.name] = runner
            of = f"{unit.name} {node.name}" if node is not None else unit.name
            tasks.append(asyncio.create_task(runner.run(), name=f"{probe.name} of {of}"))
        self._tasks[unit.name] = tasks

    def _looks_at(self, unit: Unit) -> list[tuple[Node | None, Probe]]:
        """Every probe of a unit, with the node that it looks at, if it is at one."""
        of_nodes = [(node, cast("Probe", probe)) for node in unit.nodes for probe in node.probes]
        return [*((None, probe) for probe in self._probes), *of_nodes]

    def _runner(self, desk: Desk, node: Node | None, probe: Probe, ways: Ways) -> Runner:
        loop, rules = asyncio.get_running_loop(), self._board.rules
        patient = _DeskPatient(desk, node, rules, ways.fetch, ways.net, loop, self._rng)
        return Runner(probe, patient, partial(self._take, desk), self._rng)

    def stop(self, name: str) -> None:
        """Stop watching a unit; nothing happens when it is not watched."""
        self._canaries.pop(name, None)
        for task in self._tasks.pop(name, ()):
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Stop watching all units; returns when no probe is left."""
        for name in list(self._tasks):
            self.stop(name)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def observe(self, evidence: Evidence) -> Consequence:
        """Fold evidence into the board, and see to what follows from it."""
        consequence = self._board.observe(evidence)
        if consequence.wants_canary and evidence.unit in self._canaries:
            self._canaries[evidence.unit].nudge()
        if consequence.flip is not None:
            self._on_consequence(consequence)
        return consequence

    def _take(self, desk: Desk, finding: Finding) -> None:
        if self._board.desks.get(desk.unit.name) is not desk:
            return
        match finding:
            case Evidence():
                self.observe(finding)
            case Load():
                self._take_load(desk, finding)
            case Models():
                self._board.serve(finding)

    def _take_load(self, desk: Desk, load: Load) -> None:
        if load.epoch is not None and load.epoch != desk.case.epoch:
            reason = f"its process started at {load.epoch}, before: {desk.case.epoch}"
            source = "engine_metrics"
            self.observe(
                Evidence(load.unit, Sign.NEUTRAL, Strength.WEAK, source, reason, load.at, epoch=load.epoch)
            )
        self._board.report(load)
