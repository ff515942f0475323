"""Rolls: what comes next, phase by phase, and what a roll sees of units."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cellgate.extras.operator.action_settings import RollPolicy, RunCommand, SetImage
from cellgate.extras.operator.plan import RecoveryReport, RecoveryResult
from cellgate.extras.operator.roll_plan import (
    ACTIVE,
    ANSWER_MS,
    COMMAND_GRACE_MS,
    DRAIN_LEAST_MS,
    CommandEnd,
    Order,
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
from cellgate.extras.operator.roller import roll_units, slower_than_cell
from cellgate.router.board import Board
from cellgate.router.cost_model import RemoteLoad
from cellgate.router.nouns import Fleet, Rules, Unit, Verdict

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


@pytest.mark.parametrize("dry_run", [False, True])
def test_units_are_rolled_one_after_the_other_cell_by_cell(*, dry_run: bool) -> None:
    """A dry run proves nothing and restarts nothing."""
    world = World(dry_run=dry_run)
    world.restarts = not dry_run
    world.run()
    assert world.roll.status is RollStatus.DONE
    assert world.acts == [(name, False) for name in "abcd"]


def test_a_unit_waits_for_its_requests_but_not_for_ever_and_has_to_restart() -> None:
    world = World()
    world.see("a", in_flight=3)
    world.until("a", Phase.ACTING)
    assert world.now_ms - 1_000_000 == 11_000
    other = World()
    other.until("a", Phase.ACTING)
    assert other.now_ms - 1_000_000 == 1000 + DRAIN_LEAST_MS
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


def test_a_unit_of_another_version_than_expected_fails_and_without_a_way_back_stays_out() -> None:
    world = World(policy=replace(FULL_POLICY, undo=None), version="2.0")
    world.see("a", version="1.9")
    world.run()
    assert world.roll.reason == "unit a: it is version 1.9, not 2.0"
    assert world.phase("a") is Phase.FAILED
    assert world.roll.out() == {"a"}


def test_a_failed_command_fails_the_roll_and_one_whose_gate_is_gone_has_to_be_proven() -> None:
    world = World()
    world.until("a", Phase.ACTING)
    ends = {"a": CommandEnd(False, "it exited with 3")}
    roll, _ = advance(world.roll, FULL_POLICY, world.rows.values(), ends, world.now_ms + 1)
    assert roll.reason == "unit a: its command failed: it exited with 3"
    gone_ms = world.now_ms + round(1000 * FULL_POLICY.timeout_s) + COMMAND_GRACE_MS
    for now_ms, phase in ((gone_ms - 1, Phase.ACTING), (gone_ms, Phase.PROVING)):
        then = advance(world.roll, FULL_POLICY, world.rows.values(), {}, now_ms)
        assert (then.roll.units[0].phase, then.act) == (phase, ())


def test_nothing_is_begun_while_others_are_out_of_rotation_or_it_is_paused() -> None:
    """What was begun is finished."""
    world = World()
    world.see("d", verdict=DOWN)
    world.step()
    assert world.roll.reason == "unit a waits: d out of rotation, max_unavailable 1"
    assert world.phase("a") is Phase.WAITING
    world.see("d", verdict=UP)
    world.step()
    assert world.phase("a") is Phase.DRAINING
    world.until("a", Phase.PROVING)
    world.roll = replace(world.roll, status=RollStatus.PAUSED)
    for _ in range(100):
        world.step()
    assert (world.phase("a"), world.phase("b")) == (Phase.DONE, Phase.WAITING)


def test_undone_the_last_unit_is_first_and_those_not_begun_are_left() -> None:
    """Units whose order is fixed are undone in the same order."""
    world = World()
    world.until("c", Phase.DRAINING)
    world.acts.clear()
    world.roll = undone(world.roll, FULL_POLICY, world.now_ms)
    world.run()
    assert world.acts == [("c", True), ("b", True), ("a", True)]
    assert world.phase("d") is Phase.SKIPPED
    assert world.roll.status is RollStatus.DONE
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


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b'{"v":2}', b'{"v":1,"units":[{}]}', b'{"v":1,"units":5}']
)
def test_a_roll_is_read_as_it_was_written_and_what_is_none_is_refused(text: bytes) -> None:
    world = World(version="2.0")
    world.until("b", Phase.PROVING)
    assert read_roll(roll_document(world.roll)) == world.roll
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


def test_a_unit_proves_itself_by_an_answer_which_is_waited_for_only_for_a_while() -> None:
    """A wrong one stops the roll before the unit gets requests."""
    for seen in ({"answered": True}, {"answered": True, "differs": True}, {}):
        world = World()
        world.see("a", answered=False)
        world.until("a", Phase.PROVING)
        since_ms = world.now_ms
        world.step(2.0)
        assert world.phase("a") is Phase.PROVING
        world.see("a", **seen)
        world.step()
        if "differs" in seen:
            assert world.phase("a") in (Phase.FAILED, Phase.DRAINING)
            assert "a" in world.roll.out()
            continue
        if not seen:
            world.until("a", Phase.SOAKING)
            assert world.now_ms - since_ms >= ANSWER_MS
        assert world.phase("a") is Phase.SOAKING


# What a roll sees of units.


def test_a_unit_that_another_gate_has_drained_is_drained_and_one_that_is_gone_gets_no_command() -> None:
    async def never(*_: object) -> RecoveryReport:
        raise AssertionError("it was run")

    board, policy = Board(Rules()), RollPolicy(RunCommand(("roll",)), "audit")
    board.configure(Fleet(units=tuple(Unit(name, "c", f"http://{name}") for name in "abc")), 0.0)
    board.drain("a", drained=True)
    board.remote_load = {"b": RemoteLoad(drained=True)}
    plane: Any = SimpleNamespace(
        board=board,
        now=lambda: 1.0,
        settings=SimpleNamespace(known_answer=SimpleNamespace(every_s=0.0)),
        set_drain=None,
        events=SimpleNamespace(add=None),
        ticker=SimpleNamespace(looks=[]),
        on_fleet=[],
    )
    ports: Any = roll_units(plane, policy, OwnRoll(), cast("Any", never))._ports
    assert [row.drained for row in ports.rows(())] == [True, True, False]
    report = asyncio.run(ports.act(policy, Roll("r1", "op", 0, ()), UnitRoll("gone", "c"), 0))
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
