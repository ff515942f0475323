"""What follows from nothing having happened, and what is kept and compared of units meanwhile."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from cellgate.probes.canary import Canary
from cellgate.probes.engine_metrics import EngineMetrics
from cellgate.probes.readiness import Readiness
from cellgate.proxy.control.comparisons import STACK_PERIOD_S, STEPS_A_TURN, FateWatch, StackWatch
from cellgate.proxy.control.containment import Containment
from cellgate.proxy.control.prober import Prober
from cellgate.proxy.control.watches import DISTRUST_S, LAG_S, LinkWatch, StallWatch
from cellgate.proxy.http.errors import FailureKind
from cellgate.proxy.observe.events import Action, EventLog
from cellgate.router import comparisons
from cellgate.router.board import Board, Flip
from cellgate.router.nouns import (
    ORPHAN_S,
    ORPHANED,
    TRANSFERRED,
    Ask,
    Cell,
    Evidence,
    Fleet,
    Load,
    Node,
    NodeFacts,
    Refusal,
    Role,
    Rules,
    Sign,
    SplitStep,
    Strength,
    Unit,
    Verdict,
)
from cellgate.router.outliers import COMPARE_S
from cellgate.router.unit_state import UnitState
from tests.scenarios.day_sizes import sizes
from tests.unit.router.test_shared_fate import board, fall, rise

NOW = 100.0
STREAM = Ask("m", stream=True, prompt_tokens=10)


class Round:
    """A stall watch over so many units, all UP; `asked` are the looks that it has asked for."""

    def __init__(self, units: int = 1) -> None:
        self.now = NOW
        self.board = Board(Rules())
        self.board.configure(Fleet(units=tuple(Unit(n, "c", f"http://{n}") for n in "abcde"[:units])), 0.0)
        self.events = EventLog(lambda: 1_700_000_000.0, 2, lambda *_: None)
        self.flips: list[Flip] = []
        self.watch = Prober(self.board, _no_way, random.Random(1), self._take)
        self.asked: list[tuple[str, ...]] = []
        self.watch.look_now = lambda unit, *probes: self.asked.append((unit, *probes))  # type: ignore[method-assign]
        self.stall_watch = StallWatch(self.board, self.watch, self.events, lambda: self.now)
        for name in self.board.units:
            self.observe(name, Sign.GOOD, Strength.STRONG, NOW)
        self.flips.clear()

    def _take(self, consequence: Any) -> None:
        self.flips.append(consequence.flip)

    def observe(
        self, name: str, sign: Sign, strength: Strength, at: float, source: str = Canary.name
    ) -> None:
        self.watch.observe(Evidence(name, sign, strength, source, "seen", at))

    def unit_state(self, name: str = "a") -> UnitState:
        return self.board.units[name]

    def verdict(self) -> Verdict:
        return self.unit_state().case.verdict

    def told(self) -> list[str]:
        return [event["kind"] for event in self.events.last()]

    def last_line(self) -> str:
        return str(self.events.last()[-1]["line"])


def _no_way(state: UnitState) -> Any:
    raise AssertionError(f"{state} is not to be probed here")


def test_a_silent_unit_is_suspected_with_a_reason_and_a_canary_is_sent() -> None:
    scene = Round()
    scene.board.open("a", STREAM, NOW, retry=False).commit(NOW)
    scene.stall_watch.tick(NOW + 0.75, 0.0)
    assert scene.verdict() is Verdict.UP
    scene.stall_watch.tick(NOW + 1.0, 0.0)
    assert scene.verdict() is Verdict.SUSPECT
    (flip,) = scene.flips
    assert flip.evidence.reason == "stalled for 1.0 s with 1 requests in flight; the limit is 1.0 s"
    assert scene.asked == [("a", Canary.name, EngineMetrics.name), ("a", Readiness.name)]


def test_a_silence_that_goes_on_is_held_against_the_unit_once_for_each_limit() -> None:
    scene = Round()
    scene.board.open("a", STREAM, NOW, retry=False).commit(NOW)
    for quarter in range(4, 13):
        scene.stall_watch.tick(NOW + quarter / 4, 0.0)
    doubted = "a", Canary.name, EngineMetrics.name
    assert scene.asked == [doubted, ("a", Readiness.name), doubted, doubted]


def test_a_quiet_unit_with_counters_has_them_read_before_it_is_judged() -> None:
    scene = Round()
    scene.board.open("a", STREAM, NOW, retry=False).commit(NOW)
    scene.board.report(Load("a", NOW, running=1, progress=1.0, sighted=True))
    scene.stall_watch.tick(NOW + 0.2, 0.0)
    assert scene.asked == [], "tokens came a moment ago"
    scene.stall_watch.tick(NOW + 0.25, 0.0)
    assert scene.asked == [("a", EngineMetrics.name)]


def test_a_unit_without_requests_is_left_alone() -> None:
    scene = Round()
    scene.unit_state().answered_at = NOW + 50.0
    scene.stall_watch.tick(NOW + 50.0, 0.0)
    assert (scene.asked, scene.flips) == ([], [])


def test_a_gate_that_lags_counts_no_bad_news_but_fatal() -> None:
    scene = Round()
    scene.stall_watch.tick(NOW, LAG_S + 0.01)
    scene.observe("a", Sign.BAD, Strength.STRONG, NOW + DISTRUST_S - 0.01)
    assert (scene.verdict(), scene.watch.distrusted) == (Verdict.UP, 1)
    reason = scene.unit_state().last_evidence[None, Canary.name].reason
    assert reason == "seen; not counted, because the gate lagged"
    scene.observe("a", Sign.BAD, Strength.FATAL, NOW + DISTRUST_S - 0.01, "request")
    assert (scene.verdict(), scene.watch.distrusted) == (Verdict.DOWN, 1)


def test_good_news_counts_while_the_gate_lags() -> None:
    scene = Round()
    scene.observe("a", Sign.BAD, Strength.STRONG, NOW)
    scene.stall_watch.tick(NOW, LAG_S + 0.01)
    scene.observe("a", Sign.GOOD, Strength.STRONG, NOW + 0.1)
    assert scene.verdict() is Verdict.UP


def test_bad_news_counts_again_when_the_lag_is_over() -> None:
    scene = Round()
    scene.stall_watch.tick(NOW, LAG_S + 0.01)
    scene.observe("a", Sign.BAD, Strength.STRONG, NOW + DISTRUST_S)
    assert (scene.verdict(), scene.watch.distrusted) == (Verdict.SUSPECT, 0)


def test_a_silence_that_the_gate_slept_through_is_not_held_against_the_unit() -> None:
    scene = Round()
    scene.board.open("a", STREAM, NOW, retry=False).commit(NOW)
    scene.stall_watch.tick(NOW + 10.0, 9.75)
    assert scene.verdict() is Verdict.UP


def test_lag_is_told_and_not_on_every_tick() -> None:
    scene = Round()
    for quarter in range(8):
        scene.stall_watch.tick(NOW + quarter / 4, LAG_S + 0.05)
    assert scene.told() == ["lag"]
    assert "a timer fired 0.30 s late; evidence against units is not counted for 1 s" in scene.last_line()
    scene.stall_watch.tick(NOW + 10.1, LAG_S + 0.05)
    assert scene.told() == ["lag", "lag"]
    scene.stall_watch.tick(NOW + 30.0, LAG_S)
    assert scene.told() == ["lag", "lag"]


def test_panic_is_told_when_it_begins_and_when_it_ends() -> None:
    scene = Round(units=3)
    for _ in range(2):
        scene.observe("a", Sign.BAD, Strength.STRONG, NOW + 3.0)
    scene.stall_watch.tick(NOW + 3.0, 0.0)
    assert scene.told() == ["panic"]
    assert "3 units do not answer at all (a, b, c)" in scene.last_line()
    scene.stall_watch.tick(NOW + 4.0, 0.0)
    scene.unit_state("b").answered_at = NOW + 5.0
    scene.stall_watch.tick(NOW + 5.0, 0.0)
    assert scene.told() == ["panic", "panic_over"]
    assert "units were kept in rotation for 2.0 s, until units answered again" in scene.last_line()


def test_a_slow_unit_is_told_of_once_when_it_is_degraded_and_once_when_it_has_recovered() -> None:
    scene = Round(units=3)
    for name, gap_ms in (("a", 39), ("b", 19), ("c", 19)):
        scene.unit_state(name).gaps_ms[gap_ms] += 200
        scene.unit_state(name).batch = 1000.0
    now = NOW
    for _ in range(5):
        scene.stall_watch.tick(now, 0.0)
        now += COMPARE_S
    assert scene.told() == ["degraded"]
    assert "a token takes 2.0 times as long there as on the other units of cell c" in scene.last_line()
    assert "its share of requests falls by 50%" in scene.last_line()
    scene.unit_state("a").gaps_ms[19] += 2000
    for _ in range(5):
        scene.stall_watch.tick(now, 0.0)
        now += COMPARE_S
    assert scene.told() == ["degraded", "recovered"]


def test_speeds_are_not_compared_on_every_tick() -> None:
    scene = Round(units=3)
    for name, gap_ms in (("a", 39), ("b", 19), ("c", 19)):
        scene.unit_state(name).gaps_ms[gap_ms] += 200
        scene.unit_state(name).batch = 1000.0
    for quarter in range(int(2 * COMPARE_S * 4)):
        scene.stall_watch.tick(NOW + quarter / 4, 0.0)
    assert scene.unit_state("a").outlier == (0.0, 2)


def test_troubles_of_the_gates_own_are_counted_and_told_now_and_then() -> None:
    scene = Round()
    for _ in range(3):
        scene.stall_watch.gate_fault("no file descriptor is left")
    assert (scene.stall_watch.gate_faults, scene.told()) == (3, ["gate_fault"])
    scene.now += 10.1
    scene.stall_watch.gate_fault("no file descriptor is left")
    assert scene.told() == ["gate_fault"] * 2
    assert scene.verdict() is Verdict.UP


# What is kept of split requests: as much as there are units, however long the gate runs.


class Site:
    """A gate whose units come and go, on a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.board = Board(Rules())
        events: Any = self
        self.watch = LinkWatch(self.board, events, lambda: self.now)

    def add(self, *_: object) -> None:
        """An event."""

    def have(self, *names: str) -> None:
        units = tuple(Unit(name, "c", f"http://{name}") for name in names)
        self.board.configure(Fleet(units=units), self.now)


def test_units_that_are_gone_are_not_counted_for_ever() -> None:
    site = Site()
    for number in range(50):
        site.have("p", f"d{number}")
        site.watch.apply(SplitStep(TRANSFERRED, "p", f"d{number}", tokens=1, seconds=0.1))
    assert list(site.watch.pairs) == [("p", "d49")]
    assert site.watch.steps == {("p", "d49", TRANSFERRED): 1}


def test_orphans_are_forgotten_also_where_nobody_reads_the_metrics() -> None:
    site = Site()
    site.have("p", "d")
    for _ in range(100):
        site.watch.apply(SplitStep(ORPHANED, "p", "d"))
        site.now += ORPHAN_S / 2
    assert len(site.watch._orphaned_at) <= 3


# One event for units that fail together, once it is known which.


class Told:
    """Keeps what is added."""

    def __init__(self) -> None:
        self.actions: list[Action] = []

    def add(self, action: Action) -> None:
        self.actions.append(action)


def watch(found: Board) -> tuple[FateWatch, Told]:
    told = Told()
    return FateWatch(found, told), told  # type: ignore[arg-type]


def test_a_switch_is_named_once_when_its_last_unit_has_been_down_for_a_while() -> None:
    found = board(a=("z/s1",), b=("z/s1",), c=("z/s1",), d=("z/s2",))
    look, told = watch(found)
    fall(found, "a", "b")
    for now in range(5):
        look.tick(float(now))
    assert told.actions == [], "one unit under it works"
    fall(found, "c")
    for now in range(5, 30):
        look.tick(float(now))
    assert [action.kind for action in told.actions] == ["shared_fate"]
    assert told.actions[0].detail.startswith("all 3 units with a node under z/s1 are DOWN: a, b, c;")


def test_a_switch_that_is_lost_again_is_named_again() -> None:
    found = board(a=("z/s1",), b=("z/s1",), c=("z/s2",))
    look, told = watch(found)
    for begin in (0, 100):
        fall(found, "a", "b")
        for now in range(begin, begin + 10):
            look.tick(float(now))
        rise(found, "a", "b")
        look.tick(float(begin + 20))
    assert len(told.actions) == 2


# How much of the comparison of stacks is done in one turn of the loop.

TURNS = 10
UNITS = STEPS_A_TURN * (TURNS // 2 - 1)
USUAL = {"program": "vllm", "driver nvidia": "570"}


class StackSite:
    """Units of one cell, whose stacks are compared; `reads` counts stacks that are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.reads = 0.0, 0
        units = tuple(
            Unit(f"u{n}", "c", f"http://u{n}", models=("m",), nodes=(Node("n", Role.LEADER),))
            for n in range(UNITS)
        )
        self.board = Board(Rules())
        self.board.configure(Fleet((Cell("c"),), units), 0.0)
        events: Any = self
        self.watch = StackWatch(self.board, events, lambda _: None)
        read = comparisons.software_of

        def counted(stack: comparisons.Stack) -> comparisons.Software:
            self.reads += 1
            return read(stack)

        monkeypatch.setattr(comparisons, "software_of", counted)

    def add(self, *_: object) -> None:
        """An event."""

    def report(self, **others: str) -> None:
        """All units report; `others` have another driver."""
        for name, state in self.board.units.items():
            stack = {**USUAL, "driver nvidia": others.get(name, USUAL["driver nvidia"])}
            state.facts.take(NodeFacts(name, "n", self.now, stack))

    def turns(self) -> list[int]:
        """One comparison: how many stacks are read in each turn."""
        self.now += STACK_PERIOD_S
        found = []
        for _ in range(TURNS):
            before = self.reads
            self.watch.tick(self.now)
            found.append(self.reads - before)
        return found


def test_one_turn_reads_a_bounded_number_of_stacks_and_none_again_that_has_not_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = StackSite(monkeypatch)
    site.report()
    turns = site.turns()
    assert (max(turns), sum(turns)) == (STEPS_A_TURN, UNITS)
    site.report(u3="550")
    assert sum(site.turns()) == 1
    odd = {name: state.facts.odd for name, state in site.board.units.items() if state.facts.odd}
    assert odd == {"u3": "driver nvidia 550 (u0: 570)"}


def test_a_unit_that_goes_while_stacks_are_compared_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    site = StackSite(monkeypatch)
    site.report(u3="550")
    site.now += STACK_PERIOD_S
    site.watch.tick(site.now)
    kept = tuple(state.unit for state in site.board if state.unit.name != "u3")
    site.board.configure(Fleet((Cell("c"),), kept), site.now)
    site.turns()
    site.turns()
    assert not any(state.facts.odd for state in site.board)
    assert len(cast("Any", site.watch)._stacks._units) == UNITS - 1


# What containment keeps of units does not outlive them; and what dies with a gate.

PASSED = Evidence("", Sign.GOOD, Strength.STRONG, "canary", "one token", 1.0)


def test_a_prompt_whose_gate_was_killed_goes_to_another_one() -> None:
    """A router reaches u1 and u2 by way of one gate: with it both are lost, and that is one death."""
    board, now = Board(Rules()), 100.0
    places = {"u1": "http://gate", "u2": "http://gate", "u3": "http://other"}
    board.configure(Fleet(units=tuple(Unit(name, "a", url) for name, url in places.items())), now)
    for state in board:
        board.observe(Evidence(state.unit.name, Sign.GOOD, Strength.STRONG, "canary", "one token", now))
    tried: list[set[str]] = []

    def pick(*given: Any, **_: Any) -> Refusal:
        tried.append(set(given[2]))
        return Refusal.FULL

    events = EventLog(float, 2, log=lambda _level, _line: None)
    contained = Containment(board, pick, events, lambda: now, lambda _: None, answered=lambda _: 0, ban_s=1.0)
    ask = Ask(fingerprint=7)
    for name in ("u1", "u2"):
        lease = board.open(name, ask, now, retry=False)
        contained.broke(lease, FailureKind.CLOSED_EARLY, 0, 0)
    assert contained.bans.find(7, now) is None
    contained.pick(ask, ("u1",), evicted=True, retry=False)
    assert tried == [{"u1", "u2"}, {"u1"}]


def containment(board: Board) -> Containment:
    """One that never picks a unit; now is 100."""
    events, nobody = EventLog(float, 2, log=lambda _level, _line: None), cast("Any", None)
    return Containment(board, nobody, events, lambda: 100.0, nobody, answered=lambda _: 9, ban_s=1.0)


def test_what_was_given_up_by_a_time_out_of_ours_makes_no_prompt_poison() -> None:
    """But the request goes to no third unit."""
    board, now = Board(Rules()), 100.0
    board.configure(Fleet(units=tuple(Unit(name, "a", f"http://{name}") for name in "abc")), now)
    contained = containment(board)
    ask = Ask(fingerprint=7)
    tried: list[str] = []
    for name in "ab":
        assert not contained.bars(ask, tried)
        lease = board.open(name, ask, now, retry=False)
        lease.evicted = lease.unit_state.fell_unseen = True
        contained.broke(lease, FailureKind.EVICTED, 0, 0)
        tried.append(name)
    assert contained.bars(ask, tried)
    assert contained.failure(ask, tried).kind is FailureKind.EVICTED
    assert contained.bans.find(7, now) is None
    assert not contained.bars(ask, ()), "whoever asks the same again is not refused"
    contained.tick(now + 1000.0)
    assert not contained.bars(ask, tried)
    assert not contained.watchful


def test_many_requests_of_one_prompt_at_one_unit_that_was_given_up_all_go_to_another() -> None:
    board, now = Board(Rules()), 100.0
    board.configure(Fleet(units=tuple(Unit(name, "a", f"http://{name}") for name in "ab")), now)
    contained = containment(board)
    ask = Ask(fingerprint=7)
    leases = [board.open("a", ask, now, retry=False) for _ in range(4)]
    for lease in leases:
        lease.evicted = lease.unit_state.fell_unseen = True
        contained.broke(lease, FailureKind.CUT, 5, 5)
    assert not contained.bars(ask, ("a",))
    assert not contained.bars(ask, ("b",))


def test_a_thousand_units_that_came_and_went_leave_nothing() -> None:
    board = Board(Rules())
    events = EventLog(float, 2, log=lambda _level, _line: None)
    nobody = cast("Any", None)
    contained = Containment(board, nobody, events, float, nobody, answered=len, ban_s=1.0)
    for number in range(1000):
        name = f"pod-{number}"
        board.configure(Fleet(units=(Unit(name, "a", f"http://{name}"),)), 0.0)
        contained.flipped(Flip(name, "a", Verdict.STARTING, Verdict.UP, 1.0, PASSED))
    assert sizes(contained)["Containment._answered_before"] == 1
