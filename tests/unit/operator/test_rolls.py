"""Rolls: what comes next, phase by phase, what is kept out of rotation, and gates that share a roll."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cellgate.proxy.config.action_settings import RollPolicy, RunCommand, SetImage
from cellgate.proxy.extras.operator.plan import RecoveryReport, RecoveryResult
from cellgate.proxy.extras.operator.roll_plan import (
    ACTIVE,
    ANSWER_MS,
    COMMAND_GRACE_MS,
    DRAIN_LEAST_MS,
    CommandEnd,
    Order,
    OrderError,
    OwnRoll,
    Phase,
    Roll,
    RollRow,
    RollStatus,
    UnitRoll,
    advance,
    read_roll,
    roll_document,
    undone,
    why_not_now,
)
from cellgate.proxy.extras.operator.roller import WRITE_AGAIN_MS, RollPorts, roll_units, slower_than_cell
from cellgate.router.board import Board
from cellgate.router.cost_model import RemoteLoad
from cellgate.router.nouns import Fleet, Rules, Unit, Verdict
from tests.unit.operator.site import POLICY, Site

THERE, BACK = RunCommand(("roll",)), RunCommand(("back",))
FULL_POLICY = RollPolicy(THERE, "audit", BACK, drain_s=10.0, start_s=100.0, soak_s=20.0)
OK = CommandEnd(True, "it exited with 0")
UP, DOWN = Verdict.UP, Verdict.DOWN


class World:
    """Units in cells of two, a roll over them, and commands that restart a unit at once."""

    def __init__(self, names: str = "abcd", policy: RollPolicy = FULL_POLICY, **roll: object) -> None:
        self.policy = policy
        self.now_ms = 1_000_000
        cells = {name: f"c{at // 2}" for at, name in enumerate(names)}
        self.rows = {name: RollRow(name, cells[name], UP, usable=True) for name in names}
        units = tuple(UnitRoll(name, cells[name]) for name in names)
        self.roll = Roll("r1", "op", self.now_ms, units, **roll)  # type: ignore[arg-type]
        self.acts: list[tuple[str, bool]] = []
        self.restarts = True

    def step(self, wait_s: float = 1.0) -> None:
        self.now_ms += round(1000 * wait_s)
        out = self.roll.out()
        rows = [row._replace(usable=row.verdict is UP and row.unit not in out) for row in self.rows.values()]
        ends = {each.unit: OK for each in self.roll.units if each.phase is Phase.ACTING}
        self.roll, act = advance(self.roll, self.policy, rows, ends, self.now_ms)
        for each in act:
            self.acts.append((each.unit, each.back))
            if self.restarts:
                self.see(each.unit, renewed_ms=self.now_ms + 1)

    def see(self, name: str, **seen: object) -> None:
        self.rows[name] = self.rows[name]._replace(**seen)  # type: ignore[arg-type]

    def phase(self, name: str) -> Phase:
        return next(each.phase for each in self.roll.units if each.unit == name)

    def until(self, name: str, phase: Phase, limit_s: int = 200) -> None:
        for _ in range(limit_s):
            if self.phase(name) is phase:
                return
            self.step()
        raise AssertionError(f"{name} is {self.phase(name)}: {self.roll}")

    def run(self, limit_s: int = 1000) -> None:
        for _ in range(limit_s):
            if self.roll.is_over():
                return
            self.step()


def test_units_are_rolled_one_after_the_other_cell_by_cell() -> None:
    world = World()
    world.run()
    assert world.roll.status is RollStatus.DONE
    assert world.acts == [("a", False), ("b", False), ("c", False), ("d", False)]


def test_a_unit_waits_for_its_requests_but_not_for_ever() -> None:
    world = World()
    world.see("a", in_flight=3)
    world.until("a", Phase.ACTING)
    assert world.now_ms - 1_000_000 == 11_000
    other = World()
    other.until("a", Phase.ACTING)
    assert other.now_ms - 1_000_000 == 1000 + DRAIN_LEAST_MS


def test_only_a_unit_that_has_restarted_counts_as_proven() -> None:
    world = World()
    world.restarts = False
    world.until("a", Phase.PROVING)
    for _ in range(99):
        world.step()
    assert world.phase("a") is Phase.PROVING
    world.step()
    assert world.roll.status is RollStatus.STOPPED
    assert world.roll.reason == "unit a: it has not restarted 100 s after its command"


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        ({"verdict": DOWN}, "it went DOWN while it was watched"),
        ({"differs": True}, "its answers to the known prompt differ from those of other units"),
        ({"errors": 0.75}, "75% of its requests failed, more than 50%"),
        ({"degraded": 0.5}, "it is 50% slower than its cell, more than 30%"),
    ],
)
def test_a_bad_version_stops_the_roll_after_one_unit_which_is_put_back(
    seen: dict[str, object], why: str
) -> None:
    world = World()
    world.until("a", Phase.SOAKING)
    world.see("a", **seen)
    world.step()
    assert world.roll.status is RollStatus.STOPPED
    assert world.roll.reason == f"unit a: {why}"
    world.see("a", verdict=UP, differs=False, errors=0.0, degraded=0.0)
    world.run()
    assert world.acts == [("a", False), ("a", True)]
    assert world.phase("a") is Phase.DONE
    assert [world.phase(name) for name in "bcd"] == [Phase.WAITING] * 3


def test_without_a_way_back_a_failed_unit_stays_out() -> None:
    world = World(policy=replace(FULL_POLICY, undo=None))
    world.until("a", Phase.SOAKING)
    world.see("a", verdict=DOWN)
    world.run()
    assert world.phase("a") is Phase.FAILED
    assert world.roll.out() == {"a"}


def test_a_unit_of_another_version_than_expected_fails() -> None:
    world = World(version="2.0")
    world.see("a", version="1.9")
    world.until("a", Phase.PROVING)
    world.step()
    assert world.roll.reason == "unit a: it is version 1.9, not 2.0"


def test_a_failed_command_fails_the_roll() -> None:
    world = World()
    world.until("a", Phase.ACTING)
    ends = {"a": CommandEnd(False, "it exited with 3")}
    roll, _ = advance(world.roll, FULL_POLICY, world.rows.values(), ends, world.now_ms + 1)
    assert roll.reason == "unit a: its command failed: it exited with 3"


def test_when_the_gate_that_ran_a_command_is_gone_the_unit_proves_what_came_of_it() -> None:
    world = World()
    world.until("a", Phase.ACTING)
    gone_ms = world.now_ms + round(1000 * FULL_POLICY.timeout_s) + COMMAND_GRACE_MS
    early = advance(world.roll, FULL_POLICY, world.rows.values(), {}, gone_ms - 1)
    late = advance(world.roll, FULL_POLICY, world.rows.values(), {}, gone_ms)
    assert early.roll.units[0].phase is Phase.ACTING
    assert late.roll.units[0].phase is Phase.PROVING
    assert early.act == late.act == ()


def test_nothing_is_begun_while_others_are_out_of_rotation() -> None:
    world = World()
    world.see("d", verdict=DOWN)
    world.step()
    assert world.roll.reason == "unit a waits: d out of rotation, max_unavailable 1"
    assert world.phase("a") is Phase.WAITING
    world.see("d", verdict=UP)
    world.step()
    assert world.phase("a") is Phase.DRAINING


def test_paused_it_finishes_what_it_has_begun_and_begins_nothing() -> None:
    world = World()
    world.until("a", Phase.PROVING)
    world.roll = replace(world.roll, status=RollStatus.PAUSED)
    for _ in range(100):
        world.step()
    assert (world.phase("a"), world.phase("b")) == (Phase.DONE, Phase.WAITING)


def test_undone_the_last_unit_is_first_and_those_not_begun_are_left() -> None:
    world = World()
    world.until("c", Phase.DRAINING)
    world.acts.clear()
    world.roll = undone(world.roll, FULL_POLICY, world.now_ms)
    world.run()
    assert world.acts == [("c", True), ("b", True), ("a", True)]
    assert world.phase("d") is Phase.SKIPPED
    assert world.roll.status is RollStatus.DONE


def test_units_whose_order_is_fixed_are_undone_in_the_same_order() -> None:
    policy = replace(FULL_POLICY, action=SetImage("new"))
    world = World()
    world.until("c", Phase.DRAINING)
    undo = Order("undo", "me")
    assert why_not_now(undo, world.roll, policy, [("a", "c")], []).startswith(
        "unit c is draining: groups of a set"
    )
    assert why_not_now(undo, world.roll, FULL_POLICY, [("a", "c")], []) == ""
    world.roll = replace(world.roll, status=RollStatus.STOPPED)
    world.until("c", Phase.DONE)
    world.acts.clear()
    assert why_not_now(undo, world.roll, policy, [("a", "c")], []) == ""
    world.roll = undone(world.roll, policy, world.now_ms)
    world.run()
    assert world.acts == [("a", True), ("b", True), ("c", True)]


def test_a_dry_run_proves_nothing_and_restarts_nothing() -> None:
    world = World(dry_run=True)
    world.restarts = False
    world.run()
    assert world.roll.status is RollStatus.DONE


def test_a_roll_is_read_as_it_was_written() -> None:
    world = World(version="2.0")
    world.until("b", Phase.PROVING)
    assert read_roll(roll_document(world.roll)) == world.roll


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b'{"v":2}', b'{"v":1,"units":[{}]}', b'{"v":1,"units":5}']
)
def test_what_is_no_roll_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="no roll: "):
        read_roll(text)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_units_do_the_bounds_hold(seed: int) -> None:
    rng = Random(seed)
    policy = replace(FULL_POLICY, parallel=rng.randint(1, 3), max_unavailable=rng.randint(1, 3))
    world = World("abcdefgh", policy)
    for _ in range(600):
        name = rng.choice("abcdefgh")
        if rng.random() < 0.05:
            world.see(name, verdict=rng.choice([UP, UP, DOWN]), in_flight=rng.randint(0, 2))
        before = world.roll
        was_away = {row.unit for row in world.rows.values() if row.verdict is not UP} | before.out()
        world.step(rng.choice([0.5, 1.0, 3.0]))
        begun = world.roll.out() - before.out()
        back = {each.unit for each in world.roll.units if each.back}
        assert len(was_away | begun) <= policy.max_unavailable or begun <= back or not begun
        assert sum(each.phase in ACTIVE for each in world.roll.units) <= policy.parallel
        if begun - back:
            cell = {each.cell for each in world.roll.units if each.unit in begun - back}
            earlier = [each for each in world.roll.units if each.cell < min(cell)]
            assert all(each.phase is Phase.DONE for each in earlier)
    assert len(set(world.acts)) == len(world.acts), "no unit gets a command twice"


@pytest.mark.parametrize("answered", [True, False])
def test_a_unit_proves_itself_by_an_answer_which_is_waited_for_only_for_a_while(*, answered: bool) -> None:
    world = World()
    world.see("a", answered=False)
    world.until("a", Phase.PROVING)
    since_ms = world.now_ms
    world.step(2.0)
    assert world.phase("a") is Phase.PROVING
    if answered:
        world.see("a", answered=True)
        world.step()
    else:
        world.until("a", Phase.SOAKING)
        assert world.now_ms - since_ms >= ANSWER_MS
    assert world.phase("a") is Phase.SOAKING


def test_a_wrong_answer_stops_the_roll_before_the_unit_gets_requests() -> None:
    world = World()
    world.see("a", answered=False)
    world.until("a", Phase.PROVING)
    world.see("a", answered=True, differs=True)
    world.step()
    assert world.phase("a") in (Phase.FAILED, Phase.DRAINING)
    assert "a" in world.roll.out()


# Rolling at gates: a step is written before it is done, and gates that share a roll go on with it.


async def test_all_units_are_rolled_and_both_gates_keep_the_unit_of_the_moment_out() -> None:
    site = Site()
    one, other = site.gates
    await other.order("start")
    await site.wait(2)
    assert one.drained == other.drained == {"a"}
    await site.wait(20)
    assert site.commands == [("g1", "a"), ("g1", "b")]
    assert one.drained == other.drained == set()
    assert other.roller.roll is not None
    assert other.roller.roll.status is RollStatus.DONE
    assert [entry["step"] for entry in one.entries] == ["begin", "end"] * 2


async def test_when_the_conductor_dies_another_goes_on_and_repeats_no_command() -> None:
    site = Site()
    one, _ = site.gates
    await one.order("start")
    while not site.commands:
        await site.wait(1)
    one.is_alive = False
    site.store.leader = "g2"
    await site.wait(60)
    assert site.commands == [("g1", "a"), ("g2", "b")]


async def test_a_step_that_cannot_be_written_is_not_done() -> None:
    site = Site()
    one, _ = site.gates
    await one.order("start")
    await site.wait(1)
    site.store.is_refusing = True
    await site.wait(60)
    assert site.commands == []
    site.store.is_refusing = False
    await site.wait(3)
    assert site.commands == [("g1", "a")]


async def test_a_unit_without_an_audit_log_gets_no_command() -> None:
    site = Site()
    one, _ = site.gates

    async def full(_path: str, _entry: Mapping[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    one.roller._ports = replace(one.roller._ports, record=full)
    await one.order("start")
    await site.wait(10)
    assert site.commands == []
    assert one.roller.roll is not None
    assert "No space left on device; nothing was done" in one.roller.roll.reason


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
    site = Site()
    one, _ = site.gates
    await one.order("start")
    await site.wait(1)
    await one.order("pause")
    await site.wait(30)
    assert one.phases() == [Phase.DONE, Phase.WAITING]
    await one.order("resume")
    await site.wait(30)
    assert one.phases() == [Phase.DONE, Phase.DONE]
    await one.order("undo")
    await site.wait(30)
    assert [unit for _, unit in site.commands] == ["a", "b", "b", "a"]
    assert one.roller.roll is not None
    assert one.roller.roll.status is RollStatus.DONE


async def test_an_order_survives_the_gate_that_read_it_and_is_carried_out_once() -> None:
    site = Site("a")
    one, other = site.gates
    await one.order("start")
    order = await site.store.asked()
    assert order is not None
    site.store.is_refusing = True
    await site.wait(2)
    one.is_alive, site.store.is_refusing, site.store.leader = False, False, "g2"
    await site.wait(20)
    assert site.commands == [("g2", "a")]
    assert other.phases() == [Phase.DONE]
    # Its gate wrote the roll down and died before it took the order off the list.
    await site.store.ask(order)
    await site.wait(20)
    assert await site.store.asked() is None
    assert site.commands == [("g2", "a")]
    assert [action.kind for action in other.told if action.kind == "roll_failed"] == []


async def test_a_fault_of_the_gate_fails_the_unit_at_once() -> None:
    site = Site("a")
    one, _ = site.gates
    one.fault = KeyError("a")
    one.roller._policy = replace(POLICY, undo=None)
    await one.order("start")
    await site.wait(5)
    assert one.roller.roll is not None
    assert one.roller.roll.reason == "unit a: its command failed: the gate's own fault: KeyError('a')"
    assert one.entries[-1]["result"] == "failed"


async def test_the_end_of_an_earlier_command_is_not_taken_for_that_of_another_gate() -> None:
    site = Site("a")
    one, other = site.gates
    await one.order("start")
    await site.wait(20)
    assert one.phases() == [Phase.DONE]
    site.store.leader, other.ends = "g2", False
    await other.order("undo")
    await site.wait(5)
    assert one.phases() == other.phases() == [Phase.ACTING]
    site.store.leader = "g1"
    await site.wait(5)
    assert one.phases() == [Phase.ACTING]
    await other.roller.close()


async def test_a_roll_is_written_again_while_it_goes_on_or_keeps_a_unit_out() -> None:
    site = Site("a")
    one, _ = site.gates
    one.report = RecoveryReport(RecoveryResult.FAILED, "it exited with 3")
    one.roller._policy = replace(POLICY, undo=None)
    await one.order("start")
    await site.wait(1)
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


# What a roll sees of units, and what becomes of its command when a unit is not there any more.

PLAIN_POLICY = RollPolicy(RunCommand(("roll",)), "audit")


def ports(board: Board) -> RollPorts:
    async def never(*_: object) -> RecoveryReport:
        raise AssertionError("it was run")

    settings = SimpleNamespace(known_answer=SimpleNamespace(every_s=0.0))
    plane: Any = SimpleNamespace(
        board=board,
        now=lambda: 1.0,
        settings=settings,
        set_drain=None,
        events=SimpleNamespace(add=None),
        ticker=SimpleNamespace(looks=[]),
        on_fleet=[],
    )
    return roll_units(plane, PLAIN_POLICY, OwnRoll(), cast("Any", never))._ports


def board_of(*names: str) -> Board:
    board = Board(Rules())
    board.configure(Fleet(units=tuple(Unit(name, "c", f"http://{name}") for name in names)), 0.0)
    return board


def test_a_unit_that_another_gate_has_drained_is_drained() -> None:
    board = board_of("a", "b", "c")
    board.drain("a", drained=True)
    board.elsewhere = {"b": RemoteLoad(drained=True)}
    assert [row.drained for row in ports(board).rows(())] == [True, True, False]


def test_a_unit_that_is_not_there_any_more_gets_no_command() -> None:
    roll, gone = Roll("r1", "op", 0, ()), UnitRoll("gone", "c")
    report = asyncio.run(cast("Any", ports(board_of("a")).act(PLAIN_POLICY, roll, gone, 0)))
    assert report == RecoveryReport(RecoveryResult.FAILED, "it is not there; nothing was done")


@pytest.mark.parametrize(
    ("gap_s", "others_s", "slower"),
    [
        (0.04, (0.01, 0.01), 0.75),
        (0.04, (0.01, 0.0), 0.75),
        (0.019, (0.01, 0.01), 0.0),
        (0.0, (0.01,), 0.0),
        (0.04, (0.0,), 0.0),
        (0.04, (), 0.0),
        (0.005, (0.01,), 0.0),
    ],
)
def test_half_as_fast_is_the_least_that_counts(
    gap_s: float, others_s: tuple[float, ...], slower: float
) -> None:
    assert slower_than_cell(gap_s, others_s) == pytest.approx(slower)
