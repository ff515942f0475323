"""What follows from nothing having happened: silence, a lagging gate, panic and slowness, each told once."""

from __future__ import annotations

import random
from typing import Any

from cellgate.probes.canary import Canary
from cellgate.probes.engine_metrics import EngineMetrics
from cellgate.probes.readiness import Readiness
from cellgate.proxy.control.prober import Prober
from cellgate.proxy.control.watches import DISTRUST_S, LAG_S, StallWatch
from cellgate.proxy.observe.events import EventLog
from cellgate.router.board import Board, Flip
from cellgate.router.nouns import Ask, Evidence, Fleet, Load, Rules, Sign, Strength, Unit, Verdict
from cellgate.router.outliers import COMPARE_S
from cellgate.router.unit_state import UnitState

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
