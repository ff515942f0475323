"""Rolling at gates: a step is written before it is done, and gates that share a roll go on with it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from cellgate.proxy.config.roll_policy import RollPolicy
from cellgate.proxy.config.unit_actions import RunCommand
from cellgate.proxy.logs.events import Action
from cellgate.proxy.recovery.acting import NotActingError
from cellgate.proxy.recovery.nouns import RecoveryReport, RecoveryResult
from cellgate.proxy.rolling.nouns import Phase, Roll, RollRow, RollStatus, UnitRoll
from cellgate.proxy.rolling.orders import Order, OrderError, Verb
from cellgate.proxy.rolling.roller import Roller, RollPorts
from cellgate.proxy.rolling.shared import OwnRoll
from cellgate.router.nouns import Verdict

POLICY = RollPolicy(RunCommand(("roll",)), "audit", RunCommand(("back",)), soak_s=3.0, drain_s=20.0)
DONE = RecoveryReport(RecoveryResult.OK, "it exited with 0")


class Fleet:
    """Units that gates share, whose processes a command replaces; and the clock of all."""

    def __init__(self, names: str = "ab") -> None:
        self.now = 1000.0
        self.store = Store(self)
        self.renewed_ms = dict.fromkeys(names, 0)
        self.commands: list[tuple[str, str]] = []
        self.ids = count(1)
        self.gates = [Gate(self, name) for name in ("g1", "g2")]

    def start(self, gate: str = "g1") -> None:
        self.store.leader = gate

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

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self.fleet = fleet
        self.leader = "g1"
        self.is_refusing = False

    def clock_ms(self) -> int:
        return round(1000 * self.fleet.now)

    async def write(self, text: bytes) -> int:
        if self.is_refusing:
            raise NotActingError("gate g9 acts")
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

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet, self.name, self.is_alive = fleet, name, True
        self.drained: set[str] = set()
        self.entries: list[Mapping[str, Any]] = []
        self.told: list[Action] = []
        self.asked: list[str] = []
        self.report = DONE
        ports = RollPorts(
            lambda: fleet.now,
            lambda: fleet.now,
            self.rows,
            lambda: [(unit, "c") for unit in fleet.renewed_ms],
            lambda _: "",
            lambda unit, out: self.drained.add(unit) if out else self.drained.discard(unit),
            self.run,
            self.record,
            self.asked.append,
            self.told.append,
            lambda: f"r{next(fleet.ids)}",
        )
        self.roller = Roller(POLICY, View(fleet.store, name), ports)

    def rows(self, _watched: Collection[str]) -> list[RollRow]:
        return [
            RollRow(unit, "c", Verdict.UP, usable=unit not in self.drained, renewed_ms=renewed_ms)
            for unit, renewed_ms in self.fleet.renewed_ms.items()
        ]

    async def run(self, _policy: RollPolicy, _roll: Roll, each: UnitRoll, _fence: int) -> RecoveryReport:
        self.fleet.commands.append((self.name, each.unit))
        self.fleet.renewed_ms[each.unit] = self.fleet.store.clock_ms() + 1
        return self.report

    async def record(self, _path: str, entry: Mapping[str, Any]) -> None:
        self.entries.append(entry)

    async def order(self, verb: Verb, **asked: Any) -> None:
        await self.roller.order(Order(verb, "op", **asked))

    def phases(self) -> list[Phase]:
        return [each.phase for each in self.roller.roll.units] if self.roller.roll else []


def test_all_units_are_rolled_and_both_gates_keep_the_unit_of_the_moment_out() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        one, other = fleet.gates
        await other.order("start")
        await fleet.wait(2)
        assert one.drained == other.drained == {"a"}
        await fleet.wait(20)
        assert fleet.commands == [("g1", "a"), ("g1", "b")]
        assert one.drained == other.drained == set()
        assert other.roller.roll is not None
        assert other.roller.roll.status is RollStatus.DONE
        assert [entry["step"] for entry in one.entries] == ["begin", "end"] * 2

    asyncio.run(scenario())


def test_when_the_conductor_dies_another_goes_on_and_repeats_no_command() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        one, _ = fleet.gates
        await one.order("start")
        while not fleet.commands:
            await fleet.wait(1)
        one.is_alive = False
        fleet.store.leader = "g2"
        await fleet.wait(60)
        assert fleet.commands == [("g1", "a"), ("g2", "b")]

    asyncio.run(scenario())


def test_a_step_that_cannot_be_written_is_not_done() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        one, _ = fleet.gates
        await one.order("start")
        await fleet.wait(1)
        fleet.store.is_refusing = True
        await fleet.wait(60)
        assert fleet.commands == []
        fleet.store.is_refusing = False
        await fleet.wait(3)
        assert fleet.commands == [("g1", "a")]

    asyncio.run(scenario())


def test_a_unit_without_an_audit_log_gets_no_command() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        one, _ = fleet.gates

        async def full(_path: str, _entry: Mapping[str, Any]) -> None:
            raise OSError(28, "No space left on device")

        one.roller._ports = replace(one.roller._ports, record=full)
        await one.order("start")
        await fleet.wait(10)
        assert fleet.commands == []
        assert one.roller.roll is not None
        assert "No space left on device; nothing was done" in one.roller.roll.reason

    asyncio.run(scenario())


def test_orders_that_make_no_sense_are_refused_at_once() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        one, _ = fleet.gates
        for verb in ("pause", "resume", "stop", "undo"):
            with pytest.raises(OrderError, match="there is no roll: start one"):
                await one.order(verb)
        with pytest.raises(OrderError, match="there is no cell 'x'; the cells are: c"):
            await one.order("start", cells=("x",))
        await one.order("start")
        await fleet.wait(2)
        with pytest.raises(OrderError, match="a roll is under way"):
            await one.order("start")

    asyncio.run(scenario())


def test_paused_resumed_and_undone() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        one, _ = fleet.gates
        await one.order("start")
        await fleet.wait(1)
        await one.order("pause")
        await fleet.wait(30)
        assert one.phases() == [Phase.DONE, Phase.WAITING]
        await one.order("resume")
        await fleet.wait(30)
        assert one.phases() == [Phase.DONE, Phase.DONE]
        await one.order("undo")
        await fleet.wait(30)
        assert [unit for _, unit in fleet.commands] == ["a", "b", "b", "a"]
        assert one.roller.roll is not None
        assert one.roller.roll.status is RollStatus.DONE

    asyncio.run(scenario())


def test_an_order_survives_the_gate_that_read_it_and_is_carried_out_once() -> None:
    async def scenario() -> None:
        fleet = Fleet("a")
        one, other = fleet.gates
        await one.order("start")
        order = await fleet.store.asked()
        assert order is not None
        fleet.store.is_refusing = True
        await fleet.wait(2)
        one.is_alive, fleet.store.is_refusing, fleet.store.leader = False, False, "g2"
        await fleet.wait(20)
        assert fleet.commands == [("g2", "a")]
        assert other.phases() == [Phase.DONE]
        # Its gate wrote the roll down and died before it took the order off the list.
        await fleet.store.ask(order)
        await fleet.wait(20)
        assert await fleet.store.asked() is None
        assert fleet.commands == [("g2", "a")]
        assert [action.kind for action in other.told if action.kind == "roll_failed"] == []

    asyncio.run(scenario())
