"""Rolls at gates that share one: a step is written before it is done, another gate goes on with it, and what
it keeps out of rotation beside what operators have drained or undrain meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from cellgate.extras.operator.action_settings import RollPolicy, RunCommand, SetImage
from cellgate.extras.operator.plan import NotActingError, RecoveryReport, RecoveryResult
from cellgate.extras.operator.roll_plan import (
    Order,
    OrderError,
    OwnRoll,
    Phase,
    Roll,
    RollRow,
    RollStatus,
    UnitRoll,
    Verb,
)
from cellgate.extras.operator.roller import WRITE_AGAIN_MS, Roller, RollPorts
from cellgate.proxy.observe.events import Action
from cellgate.router.board import Board
from cellgate.router.nouns import Fleet, Rules, Unit, Verdict

POLICY = RollPolicy(RunCommand(("roll",)), "audit", RunCommand(("back",)), soak_s=3.0, drain_s=20.0)
DONE = RecoveryReport(RecoveryResult.OK, "it exited with 0")
FAILED = RecoveryReport(RecoveryResult.FAILED, "it exited with 3")


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

    @property
    def roll(self) -> Roll:
        assert self.roller.roll is not None
        return self.roller.roll

    def phases(self) -> list[Phase]:
        return [each.phase for each in self.roller.roll.units] if self.roller.roll else []


async def begun(units: str = "ab", wait_s: float = 0) -> tuple[Site, Gate, Gate]:
    """A place where a roll was ordered so long ago, and its gates; the first one leads."""
    site = Site(units)
    one, other = site.gates
    await one.order("start")
    await site.wait(wait_s)
    return site, one, other


async def failing(units: str) -> tuple[Site, Gate, Gate]:
    """A place where the roll of the first of these units has failed; it does not get its old software."""
    site = Site(units)
    one, other = site.gates
    one.report = FAILED
    one.roller._policy = replace(POLICY, undo=None)
    await one.order("start")
    while Phase.FAILED not in one.phases():
        await site.wait(1)
    await site.wait(1)
    return site, one, other


async def test_all_units_are_rolled_and_both_gates_keep_the_unit_of_the_moment_out() -> None:
    site = Site()
    one, other = site.gates
    await other.order("start")
    await site.wait(2)
    assert one.drained == other.drained == {"a"}
    await site.wait(20)
    assert site.commands == [("g1", "a"), ("g1", "b")]
    assert one.drained == other.drained == set()
    assert other.roll.status is RollStatus.DONE
    assert [entry["step"] for entry in one.entries] == ["begin", "end"] * 2


async def test_when_the_conductor_dies_another_goes_on_and_repeats_no_command() -> None:
    site, one, _ = await begun()
    while not site.commands:
        await site.wait(1)
    one.is_alive = False
    site.store.leader = "g2"
    await site.wait(60)
    assert site.commands == [("g1", "a"), ("g2", "b")]


async def test_a_step_that_cannot_be_written_or_has_no_audit_log_is_not_done() -> None:
    site, _, _ = await begun(wait_s=1)
    site.store.is_refusing = True
    await site.wait(60)
    assert site.commands == []
    site.store.is_refusing = False
    await site.wait(3)
    assert site.commands == [("g1", "a")]

    async def full(_path: str, _entry: Mapping[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    site, one, _ = await begun()
    one.roller._ports = replace(one.roller._ports, record=full)
    await site.wait(10)
    assert site.commands == []
    assert "No space left on device; nothing was done" in one.roll.reason


async def test_orders_that_make_no_sense_are_refused_at_once() -> None:
    site = Site()
    one, _ = site.gates
    for verb in ("pause", "resume", "stop", "undo"):
        with pytest.raises(OrderError, match="there is no roll: start one"):
            await one.order(verb)
    with pytest.raises(OrderError, match="there is no cell 'x'; the cells are: c"):
        await one.order("start", cells=("x",))
    await one.order("start")
    await site.wait(2)
    with pytest.raises(OrderError, match="a roll is under way"):
        await one.order("start")


async def test_paused_resumed_and_undone() -> None:
    site, one, _ = await begun(wait_s=1)
    then: dict[Verb, Phase] = {"pause": Phase.WAITING, "resume": Phase.DONE, "undo": Phase.DONE}
    for verb, phase in then.items():
        await one.order(verb)
        await site.wait(30)
        assert one.phases() == [Phase.DONE, phase]
    assert [unit for _, unit in site.commands] == ["a", "b", "b", "a"]
    assert one.roll.status is RollStatus.DONE


async def test_an_order_survives_the_gate_that_read_it_and_is_carried_out_once() -> None:
    site, one, other = await begun("a")
    order = await site.store.asked()
    assert order is not None
    site.store.is_refusing = True
    await site.wait(2)
    one.is_alive, site.store.is_refusing, site.store.leader = False, False, "g2"
    await site.wait(20)
    assert (site.commands, other.phases()) == ([("g2", "a")], [Phase.DONE])
    # Its gate wrote the roll down and died before it took the order off the list.
    await site.store.ask(order)
    await site.wait(20)
    assert await site.store.asked() is None
    assert site.commands == [("g2", "a")]
    assert [action.kind for action in other.told if action.kind == "roll_failed"] == []


async def test_the_end_of_an_earlier_command_is_not_taken_for_that_of_another_gate() -> None:
    """A fault of the gate fails the unit at once."""
    site, one, other = await begun("a", 20)
    assert one.phases() == [Phase.DONE]
    site.store.leader, other.ends = "g2", False
    await other.order("undo")
    await site.wait(5)
    assert one.phases() == other.phases() == [Phase.ACTING]
    site.store.leader = "g1"
    await site.wait(5)
    assert one.phases() == [Phase.ACTING]
    await other.roller.close()
    site, one, _ = await begun("a")
    one.fault = KeyError("a")
    one.roller._policy = replace(POLICY, undo=None)
    await site.wait(5)
    assert one.roll.reason == "unit a: its command failed: the gate's own fault: KeyError('a')"
    assert one.entries[-1]["result"] == "failed"


async def test_a_roll_is_written_again_while_it_goes_on_or_keeps_a_unit_out() -> None:
    site, one, _ = await begun("a", 1)
    one.report = FAILED
    one.roller._policy = replace(POLICY, undo=None)
    await one.order("pause")
    while one.phases() != [Phase.FAILED]:
        await site.wait(1)
    for is_drained in (True, False):
        site.store.written = 0
        one.drain("a", is_drained)
        for _ in range(5):
            site.now += WRITE_AGAIN_MS / 1000
            await site.wait(2)
        assert site.store.written == (5 if is_drained else 0)


# What a roll keeps out of rotation, and what operators have drained or undrain meanwhile.


async def test_a_unit_that_comes_back_at_another_address_stays_out_until_it_has_proven_itself() -> None:
    site, one, other = await begun("a")
    one.restarts = False
    while one.phases() != [Phase.PROVING]:
        await site.wait(1)
    site.move("a")
    await site.wait(1)
    assert one.drained == other.drained == {"a"}
    site.renewed_ms["a"] = site.store.clock_ms()
    await site.wait(1)
    assert one.phases() == [Phase.SOAKING]
    await site.wait(1)
    assert one.drained == other.drained == set()


async def test_a_unit_that_has_failed_stays_out_at_another_address_until_an_operator_undrains_it() -> None:
    """And one that was gone, when it comes back during another roll."""
    site, one, other = await failing("a")
    site.move("a")
    await site.wait(1)
    assert one.drained == other.drained == {"a"}
    one.drain("a", False)
    await site.wait(5)
    assert (one.drained, other.drained) == (set(), {"a"})
    await one.order("undo")
    await site.wait(1)
    assert one.drained == other.drained == {"a"}
    site, one, other = await failing("ab")
    one.report = DONE
    del site.cells["a"], site.renewed_ms["a"]
    place = site.places.pop("a")
    for gate in site.gates:
        gate.board.configure(Fleet(units=tuple(site.fleet())), site.now)
    await one.order("start")
    await site.wait(20)
    assert one.phases() == [Phase.DONE, Phase.FAILED]
    site.places["a"], site.cells["a"] = place, "c"
    site.move("a")
    assert one.drained == other.drained == {"a"}


async def test_a_unit_that_was_found_while_it_is_rolled_is_out_too() -> None:
    """What an operator has drained stays drained after it was rolled."""
    site = Site("a")
    one, other = site.gates
    other.board.configure(Fleet(), site.now)
    await one.order("start")
    await site.wait(2)
    site.move("a")
    await site.wait(1)
    assert other.drained == {"a"}
    site = Site("a")
    one, other = site.gates
    other.drain("a", True)
    await one.order("start")
    await site.wait(2)
    assert one.drained == other.drained == {"a"}
    site.move("a")
    await site.wait(20)
    assert one.phases() == [Phase.DONE]
    assert (one.drained, other.drained) == (set(), {"a"})


async def test_a_gate_that_begins_during_a_roll_or_has_missed_its_begin_catches_up() -> None:
    """One with the drains of its predecessor undrains the unit; one for a later roll drains it."""
    site = Site("a")
    one, other = site.gates
    other.is_alive = False
    await one.order("start")
    await site.wait(2)
    other.drain("a", True)
    other.is_alive = True
    await site.wait(20)
    assert one.phases() == [Phase.DONE]
    assert one.drained == other.drained == set()
    site, one, other = await failing("a")
    other.drain("a", False)
    await one.order("start")
    await site.wait(2)
    assert one.phases() == other.phases() == [Phase.DRAINING]
    assert one.drained == other.drained == {"a"}


async def test_a_unit_that_has_failed_gets_no_requests_by_the_start_of_another_roll_and_is_its_first() -> (
    None
):
    site, one, other = await failing("ab")
    one.report, one.ends = DONE, False
    site.commands.clear()
    await one.order("start")
    for _ in range(5):
        await site.wait(1)
        assert one.drained == other.drained == {"a"}
    assert [unit for _, unit in site.commands] == ["a"]
    assert one.phases() == [Phase.ACTING, Phase.WAITING]
    await one.roller.close()


@pytest.mark.parametrize("asked", [{"cells": ("d",)}, {"dry_run": True}], ids=["another cell", "dry run"])
async def test_a_unit_that_has_failed_and_is_not_rolled_stays_out(asked: dict[str, Any]) -> None:
    site, one, other = await failing("ab")
    one.report = DONE
    site.cells["b"] = "d"
    await one.order("start", **asked)
    await site.wait(30)
    assert one.drained == other.drained == {"a"}
    assert one.phases() == [Phase.WAITING, Phase.FAILED]
    assert one.roll.reason == "unit b waits: a out of rotation, max_unavailable 1"
    one.drain("a", False)
    await site.wait(30)
    assert one.phases() == [Phase.DONE, Phase.FAILED]


async def test_a_unit_that_has_failed_and_was_undrained_is_rolled_like_any_other() -> None:
    """As are groups of a set, whose order is fixed: until then that is refused."""
    site, one, other = await failing("ba")
    one.report = DONE
    one.roller._policy = replace(POLICY, action=SetImage("new"))
    with pytest.raises(OrderError, match="unit b failed in the last roll and is still out: groups of a set"):
        await one.order("start")
    for gate in site.gates:
        gate.drain("b", False)
    await one.order("start")
    await site.wait(1)
    assert one.phases() == [Phase.DRAINING, Phase.WAITING]
    await site.wait(30)
    assert one.phases() == [Phase.DONE, Phase.DONE]
    assert one.drained == other.drained == set()
