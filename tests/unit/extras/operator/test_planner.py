"""Which units are recovered, and when: the planner alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from cellgate.extras.operator.action_settings import BACKOFF_MAX_S, Remedy, RunCommand
from cellgate.extras.operator.plan import (
    Claim,
    RecoveryPlan,
    RecoveryResult,
    RecoveryState,
    UnitRow,
    ended,
    plan_recovery,
    received,
)
from cellgate.router.nouns import Verdict

UP, DOWN, STARTING = Verdict.UP, Verdict.DOWN, Verdict.STARTING
PROBATION, SUSPECT = Verdict.PROBATION, Verdict.SUSPECT
REMEDY = Remedy("audit.jsonl", RunCommand(("true",)), after_s=10.0, attempts=3, backoff_s=100.0)


class World:
    """Units of a cell, what is seen of them, and the courses that follow from it. They are UP, or `down`."""

    def __init__(self, names: str = "a", remedy: Remedy = REMEDY, *, down: str = "") -> None:
        self.remedy = remedy
        self.now = 0.0
        self.seen = {name: UnitRow(name, "c", UP, 0.0, up_since=0.0, born_at=-1.0) for name in names}
        self.courses: Mapping[str, RecoveryState] = {}
        self.look()
        for name in down:
            self.set(name, DOWN)

    def set(self, name: str, verdict: Verdict) -> None:
        row = self.seen[name]._replace(verdict=verdict, since=self.now)
        if verdict is UP:
            row = row._replace(up_since=self.now)
        if verdict is STARTING:
            row = row._replace(born_at=self.now)
        self.seen[name] = row

    def mark(self, name: str, *, drained: bool = False, in_hand: bool = False) -> None:
        self.seen[name] = self.seen[name]._replace(drained=drained, in_hand=in_hand)

    def look(self, wait_s: float = 0.0, *, may_act: bool = True, acts: bool = True) -> RecoveryPlan:
        self.now += wait_s
        rows, acting = self.seen.values(), {"c"} if acts else set[str]()
        decided = plan_recovery(
            self.courses, rows, {"c": self.remedy}, self.now, may_act=may_act, acting=acting
        )
        self.courses = decided.states
        return decided

    def begins(self, wait_s: float) -> str:
        """Whose recovery begins at a look."""
        return "".join(self.look(wait_s).begin)

    def end(self, name: str, result: RecoveryResult = RecoveryResult.OK) -> None:
        state = ended(self.courses[name], self.remedy, self.now, result)
        self.courses = {**self.courses, name: state}


def test_a_unit_is_recovered_once_it_has_been_down_for_long_enough() -> None:
    world = World(down="a")
    assert [world.begins(wait_s) for wait_s in (9.9, 0.1)] == ["", "a"]
    assert world.begins(500.0) == "", "while an attempt runs there is no other"


@pytest.mark.parametrize("verdict", [UP, SUSPECT, STARTING, PROBATION])
def test_only_a_unit_that_is_down_is_acted_upon(verdict: Verdict) -> None:
    """Probation does not begin the clock anew."""
    world = World(down="a")
    world.look(9.0)
    world.set("a", verdict)
    assert world.begins(1000.0) == ""
    if verdict is PROBATION:
        world.set("a", DOWN)
        assert world.begins(0.0) == "a"


def test_attempts_are_further_and_further_apart_and_then_the_unit_is_given_up() -> None:
    world, begun = World(down="a"), []
    for _ in range(2000):
        decided = world.look(1.0)
        if decided.begin:
            begun.append(world.now)
            world.end("a")
        if decided.abort:
            break
    assert begun == [10.0, 110.0, 310.0]
    assert (decided.abort, world.now) == (("a",), 710.0)
    assert world.look(1e6) == RecoveryPlan({"a": world.courses["a"]})
    assert REMEDY.patience_s(50) == BACKOFF_MAX_S
    assert Remedy("x", REMEDY.action, backoff_s=7200.0).patience_s(3) == 7200.0


def test_a_unit_that_came_back_and_stayed_begins_anew() -> None:
    """One that falls again at once comes nearer to being given up."""
    world = World(down="a")
    assert world.begins(10.0) == "a"
    world.end("a")
    world.set("a", UP)
    world.look(50.0)
    world.look(51.0)
    world.set("a", DOWN)
    world.look(10.0)
    assert world.courses["a"].tries == 1
    world = World(down="a")
    for tries in (1, 2, 3):
        assert world.begins(1000.0) == "a"
        assert world.courses["a"].tries == tries
        world.end("a")
        world.set("a", UP)
        world.look(5.0)
        world.set("a", DOWN)
    assert world.look(1000.0).abort == ("a",)


def test_a_unit_that_may_still_be_starting_is_given_the_time_for_it() -> None:
    """As does a gate that has just started, with a fleet that has too; and a start between two looks."""
    started, new = World(), World("")
    started.set("a", STARTING)
    started.look(1.0)
    started.set("a", DOWN)
    new.seen = {"a": UnitRow("a", "c", DOWN, 0.0)}
    for world in (started, new):
        assert [world.begins(wait_s) for wait_s in (99.0, 1.0)] == ["", "a"]
    world = World(down="a")
    world.look(9.0)
    world.set("a", STARTING)
    world.now += 0.1
    world.set("a", DOWN)
    assert [world.begins(wait_s) for wait_s in (99.8, 0.3)] == ["", "a"]


@pytest.mark.parametrize(("why", "tries"), [("drained", 1), ("in_hand", 2)])
def test_who_is_drained_or_in_the_hands_of_its_orchestrator_is_left_alone(why: str, tries: int) -> None:
    """It begins anew afterwards, but only an operator makes forget what was tried."""
    world = World(down="a")
    assert world.begins(10.0) == "a"
    world.end("a")
    world.mark("a", **{why: True})
    assert world.begins(1000.0) == ""
    world.mark("a")
    assert [world.begins(wait_s) for wait_s in (9.0, 1.0)] == ["", "a"]
    assert world.courses["a"].tries == tries


def test_undraining_takes_up_again_what_was_given_up_and_while_the_gate_may_not_act_nothing_is_due() -> None:
    """Patience begins anew then."""
    world = World(remedy=Remedy("x", REMEDY.action, after_s=1.0, attempts=1, backoff_s=2.0), down="a")
    world.look(1.0)
    world.end("a")
    assert world.look(2.0).abort == ("a",)
    world.mark("a", drained=True)
    world.look(1.0)
    world.mark("a")
    assert world.begins(1.0) == "a"
    world = World(down="a")
    assert world.look(50.0, may_act=False).held == ("a",)
    assert [world.begins(wait_s) for wait_s in (9.0, 1.0)] == ["", "a"]


def test_the_unit_that_has_been_down_longest_comes_first() -> None:
    """One that shares its fate with others is given longer, and not for ever."""
    world = World("ab", down="ab")
    for name in "ab":
        world.seen[name] = world.seen[name]._replace(has_common_cause=True)
    assert [world.begins(wait_s) for wait_s in (99.0, 1.0)] == ["", "a"]
    world.set("a", UP)
    world.end("a")
    world.seen["b"] = world.seen["b"]._replace(has_common_cause=False)
    assert world.begins(0.0) == "b", "it has been DOWN for long enough"
    world = World("abc")
    for name in "cab":
        world.set(name, DOWN)
        world.look(1.0)
    assert world.begins(10.0) == "c"
    world.end("c")
    assert world.begins(20.0) == "", "c is awaited, and there is room for one"
    world.set("c", UP)
    assert world.begins(0.0) == "a"


@pytest.mark.parametrize(
    ("result", "again"),
    [(RecoveryResult.REFUSED, [10.0, 110.0, 210.0]), (RecoveryResult.CANCELLED, [10.0, 11.0])],
)
def test_an_attempt_that_was_refused_or_cancelled_counts_for_nothing(
    result: RecoveryResult, again: list[float]
) -> None:
    """The former is made again later, the latter at once."""
    world, begun_at = World(down="a"), list[float]()
    while len(begun_at) < len(again):
        if world.begins(1.0):
            begun_at.append(world.now)
            world.end("a", result)
    assert begun_at == again
    assert (world.courses["a"].tries, world.courses["a"].is_busy) == (0, False)


def test_a_unit_that_left_in_the_middle_of_its_attempt_takes_room_until_that_is_over() -> None:
    world = World("ab", down="ab")
    assert world.begins(10.0) == "a"
    del world.seen["a"]
    assert world.begins(1.0) == ""
    world.end("a")
    assert world.begins(200.0) == "b"


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_unit_that_goes_while_it_is_made_anew_is_known_when_it_comes_back(*, comes_back: bool) -> None:
    """It is awaited; one that does not come back is forgotten."""
    world = World("ab", down="a")
    world.look(10.0)
    world.end("a")
    row = world.seen.pop("a")
    world.set("b", DOWN)
    assert world.begins(50.0) == "", "a is awaited"
    if comes_back:
        world.seen["a"] = row._replace(since=world.now, born_at=world.now)
        world.set("b", UP)
        assert world.begins(100.0) == "a"
        assert world.courses["a"].tries == 2
    else:
        assert [world.begins(wait_s) for wait_s in (149.0, 1.0)] == ["", "b"]
        assert list(world.courses) == ["b"]


def test_cells_without_a_remedy_are_none_of_its_business() -> None:
    rows = [UnitRow("a", "other", DOWN, 0.0)]
    assert plan_recovery({}, rows, {"c": REMEDY}, 1e6, may_act=True, acting={"other"}) == RecoveryPlan({})


def test_while_another_gate_acts_it_begins_nothing_and_then_has_not_to_wait_again() -> None:
    """Its attempt counts as one of its own, unless it is old."""
    world = World(down="a")
    assert world.look(10.0, acts=False) == RecoveryPlan(dict(world.courses), held=("a",))
    assert world.begins(1.0) == "a"
    world = World(down="a")
    world.look(9.0, acts=False)
    claim = Claim("a", "c", "gate-2", "a-1", attempt=1, rest_s=100.0, age_s=4.0)
    world.courses = {"a": received(world.courses["a"], claim, world.now)}
    assert [world.begins(wait_s) for wait_s in (95.9, 0.1)] == ["", "a"]
    assert world.courses["a"].tries == 2
    assert received(None, replace(claim, attempt=3, age_s=201.0), 0.0) == RecoveryState("c")


@pytest.mark.parametrize(
    ("parallel", "share", "units", "most"), [(1, 1.0, 10, 1), (3, 1.0, 10, 3), (9, 0.5, 4, 2), (9, 0.1, 4, 1)]
)
def test_the_room_of_a_cell(parallel: int, share: float, units: int, most: int) -> None:
    remedy = Remedy("x", REMEDY.action, max_parallel=parallel, max_share=share)
    assert [remedy.has_room(busy, units) for busy in range(units)] == [busy < most for busy in range(units)]


# Laws, whatever happens.


class Happens(NamedTuple):
    """One look, after `wait_s`, at which units have these verdicts, some are drained, some attempts end."""

    wait_s: float
    verdicts: dict[str, Verdict]
    drained: frozenset[str]
    ending: dict[str, bool]
    may_act: bool


UNITS = "abcdef"
names = st.sampled_from(UNITS)
happens = st.builds(
    Happens,
    st.sampled_from([0.0, 1.0, 9.0, 40.0, 300.0]),
    st.dictionaries(names, st.sampled_from([DOWN, DOWN, DOWN, UP, STARTING, PROBATION, SUSPECT])),
    st.frozensets(names, max_size=2),
    st.dictionaries(names, st.booleans()),
    st.sampled_from([True, True, True, False]),
)
remedies = st.builds(
    Remedy,
    st.just("x"),
    after_s=st.sampled_from([1.0, 10.0]),
    max_parallel=st.integers(1, 4),
    max_share=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    attempts=st.integers(1, 3),
    backoff_s=st.sampled_from([5.0, 50.0]),
)


@settings(max_examples=100, deadline=None)
@given(remedies, st.lists(happens, max_size=40))
def test_laws(remedy: Remedy, story: list[Happens]) -> None:
    world = World(UNITS, remedy)
    since_up = dict.fromkeys(UNITS, 0)
    for moment in story:
        for name in UNITS:
            new = moment.verdicts.get(name, world.seen[name].verdict)
            drained = name in moment.drained
            if new is not world.seen[name].verdict:
                world.set(name, new)
            world.seen[name] = world.seen[name]._replace(drained=drained)
            if drained or new is UP:
                since_up[name] = 0
        for name, cancelled in moment.ending.items():
            if world.courses[name].is_running:
                since_up[name] -= cancelled
                world.end(name, RecoveryResult.CANCELLED if cancelled else RecoveryResult.OK)
        before = world.courses
        decided = world.look(moment.wait_s, may_act=moment.may_act)
        busy = [name for name, state in decided.states.items() if state.is_busy]
        assert len(busy) <= remedy.max_parallel
        assert len(busy) <= max(1.0, remedy.max_share * len(UNITS))
        assert moment.may_act or not (decided.begin or decided.abort)
        for name in decided.begin:
            assert world.seen[name].verdict is DOWN
            assert not world.seen[name].drained
            assert not before[name].is_running
            assert world.now >= before[name].rest_until
            since_up[name] += 1
            assert since_up[name] <= remedy.attempts
