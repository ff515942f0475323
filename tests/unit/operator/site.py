"""Gates with a Board each that roll units of one place; for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from itertools import count
from typing import Any

from cellgate.proxy.config.action_settings import RollPolicy, RunCommand
from cellgate.proxy.extras.operator.plan import NotActingError, RecoveryReport, RecoveryResult
from cellgate.proxy.extras.operator.roll_plan import Order, OwnRoll, Phase, Roll, RollRow, UnitRoll, Verb
from cellgate.proxy.extras.operator.roller import Roller, RollPorts
from cellgate.proxy.observe.events import Action
from cellgate.router.board import Board
from cellgate.router.nouns import Fleet, Rules, Unit, Verdict

POLICY = RollPolicy(RunCommand(("roll",)), "audit", RunCommand(("back",)), soak_s=3.0, drain_s=20.0)
DONE = RecoveryReport(RecoveryResult.OK, "it exited with 0")


class Site:
    """Units that gates share, whose processes a command replaces; and the clock of all."""

    def __init__(self, names: str = "ab") -> None:
        self.now = 1000.0
        self.store = Store(self)
        self.renewed_ms = dict.fromkeys(names, 0)
        self.places = dict.fromkeys(names, 0)
        """Where each unit is: a number in its URL."""
        self.cells = dict.fromkeys(names, "c")
        self.commands: list[tuple[str, str]] = []
        self.ids = count(1)
        self.gates = [Gate(self, name) for name in ("g1", "g2")]

    def fleet(self) -> list[Unit]:
        return [Unit(name, self.cells[name], f"http://{name}-{at}") for name, at in self.places.items()]

    def move(self, unit: str) -> None:
        """It is there again at another address."""
        self.places[unit] += 1
        for gate in self.gates:
            gate.board.configure(Fleet(units=tuple(self.fleet())), self.now)
            gate.roller.keep_out()

    async def wait(self, wait_s: float) -> None:
        for _ in range(round(wait_s)):
            self.now += 1.0
            for gate in self.gates:
                if gate.is_alive:
                    gate.roller.tick(self.now)
            for _ in range(10):
                await asyncio.sleep(0)


class Store(OwnRoll):
    """What gates share; one of them leads."""

    def __init__(self, fleet: Site) -> None:
        super().__init__()
        self.fleet = fleet
        self.leader = "g1"
        self.is_refusing = False
        self.written = 0

    def clock_ms(self) -> int:
        return round(1000 * self.fleet.now)

    async def write(self, text: bytes) -> int:
        if self.is_refusing:
            raise NotActingError("gate g9 acts")
        self.written += 1
        return await super().write(text)


class View(OwnRoll):
    """The store as one gate has it."""

    def __init__(self, store: Store, gate: str) -> None:
        super().__init__()
        self._store, self._gate = store, gate
        self.write, self.ask, self.asked = store.write, store.ask, store.asked  # type: ignore[method-assign]
        self.done = store.done  # type: ignore[method-assign]
        self.latest, self.clock_ms = store.latest, store.clock_ms  # type: ignore[method-assign]

    def conducts(self) -> bool:
        return self._store.leader == self._gate


class Gate:
    """A gate with all units, which never says that one has requests."""

    def __init__(self, fleet: Site, name: str) -> None:
        self.fleet, self.name, self.is_alive = fleet, name, True
        self.board = Board(Rules())
        self.board.configure(Fleet(units=tuple(fleet.fleet())), fleet.now)
        self.entries: list[Mapping[str, Any]] = []
        self.told: list[Action] = []
        self.asked: list[str] = []
        self.report = DONE
        self.fault: Exception | None = None
        self.restarts = self.ends = True
        ports = RollPorts(
            lambda: fleet.now,
            lambda: fleet.now,
            self.rows,
            lambda: list(fleet.cells.items()),
            lambda _: "",
            lambda unit: self.board.units.get(unit),
            self.drain,
            self.run,
            self.record,
            self.asked.append,
            self.told.append,
            lambda: f"r{next(fleet.ids)}",
        )
        self.roller = Roller(POLICY, View(fleet.store, name), ports)

    @property
    def drained(self) -> set[str]:
        return {state.unit.name for state in self.board if state.drained}

    def drain(self, unit: str, drained: bool) -> bool:
        return self.board.drain(unit, drained=drained)

    def rows(self, _watched: Collection[str]) -> list[RollRow]:
        drained = set[str]().union(*(gate.drained for gate in self.fleet.gates))
        return [
            RollRow(
                unit,
                self.fleet.cells[unit],
                Verdict.UP,
                usable=unit not in self.drained,
                renewed_ms=renewed_ms,
                drained=unit in drained,
            )
            for unit, renewed_ms in self.fleet.renewed_ms.items()
        ]

    async def run(self, _policy: RollPolicy, _roll: Roll, each: UnitRoll, _fence: int) -> RecoveryReport:
        self.fleet.commands.append((self.name, each.unit))
        if self.fault is not None:
            raise self.fault
        if self.restarts:
            self.fleet.renewed_ms[each.unit] = self.fleet.store.clock_ms() + 1
        if not self.ends:
            await asyncio.Event().wait()
        return self.report

    async def record(self, _path: str, entry: Mapping[str, Any]) -> None:
        self.entries.append(entry)

    async def order(self, verb: Verb, **asked: Any) -> None:
        await self.roller.order(Order(verb, "op", **asked))

    def phases(self) -> list[Phase]:
        return [each.phase for each in self.roller.roll.units] if self.roller.roll else []
