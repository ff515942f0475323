"""What a gate makes of what others tell it: which views hold, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cellgate.proxy.redis.reports import Roster, Seen, UnitReport
from cellgate.proxy.redis.sharing import PACE_BEATS, Sharing
from cellgate.router.board import Board, Consequence
from cellgate.router.cost_model import RemoteLoad
from cellgate.router.nouns import Ask, Evidence, Fleet, Rules, Sign, Strength, Unit, Verdict

VIEW = UnitReport("u1", "a", "g2", Verdict.UP, "http://10.0.0.1:8000", 3)


def seen_by(gate: str, age: float = 0.0, **changes: Any) -> dict[tuple[str, str], Seen]:
    return {("u1", gate): Seen(replace(VIEW, gate=gate, **changes), age)}


def test_ones_own_views_are_no_news() -> None:
    roster = Roster("g1")
    roster.answered(seen_by("g1") | seen_by("g2", in_flight=5), 0.0)
    assert roster.elsewhere("u1", 0.0).in_flight == 5


def test_a_gate_that_died_stops_counting_after_one_expiry_whatever_redis_does() -> None:
    roster = Roster("g1")
    roster.answered(seen_by("g2", in_flight=100), 10.0)
    assert roster.elsewhere("u1", 10.75).in_flight == 100
    assert roster.elsewhere("u1", 10.76).in_flight == 0


def test_the_next_expiry_is_that_of_the_oldest_view_that_counts() -> None:
    roster = Roster("g1")
    assert roster.expires_at(0.0) == math.inf
    roster.answered(seen_by("g2") | seen_by("g3", age=0.25), 10.0)
    assert roster.expires_at(10.0) == 10.5
    assert roster.expires_at(10.6) == 10.75
    assert roster.expires_at(10.8) == math.inf


def test_while_redis_is_gone_the_last_view_holds() -> None:
    roster = Roster("g1")
    roster.answered(seen_by("g2"), 0.0)
    roster.silent()
    assert roster.missed(1000.0) == set()
    assert roster.of("u1", 1000.0) is not None


def test_a_redis_that_came_back_empty_does_not_empty_the_fleet() -> None:
    roster = Roster("g1")
    roster.answered(seen_by("g2") | seen_by("g3"), 0.0)
    roster.silent()
    for beat in range(3):
        roster.answered({}, 60.0 + beat * 0.25)
        assert roster.missed(60.0 + beat * 0.25) == set()
    # One gate has published again, of the other there is still nothing: it is asked, and it is well.
    roster.answered(seen_by("g2"), 60.75)
    assert roster.missed(60.75) == {"g3"}
    assert roster.units() == {"u1"}
    roster.not_ready({"g3"}, 60.8)
    assert roster.missed(60.8) == set()
    assert roster.of("u1", 60.8) is not None


def test_a_gate_that_is_missed_and_not_ready_takes_its_views_along() -> None:
    roster = Roster("g1")
    roster.answered(seen_by("g2"), 0.0)
    roster.not_ready({"g2"}, 0.1)
    assert roster.units() == {"u1"}
    roster.answered({}, 1.0)
    roster.not_ready({"g2"}, 1.0)
    assert roster.units() == set()


def test_gates_that_are_long_gone_are_forgotten() -> None:
    roster = Roster("g1")
    roster.answered(seen_by("g2"), 0.0)
    roster.answered(seen_by("g3"), 60.0)
    roster.forget(30.0)
    assert [gate for (_, gate), _, _ in roster.everything()] == ["g3"]
    roster.forget(90.0)
    assert roster.units() == set()


def test_what_comes_late_does_not_replace_what_is_newer() -> None:
    roster = Roster("g1")
    assert roster.update(("u1", "g2"), Seen(replace(VIEW, gate="g2", in_flight=2), 0.0), 5.0)
    assert not roster.update(("u1", "g2"), Seen(replace(VIEW, gate="g2", in_flight=1), 0.5), 5.1)
    assert roster.elsewhere("u1", 5.1).in_flight == 2


class Gate:
    """A gate with two units that are UP since 1; now is 10."""

    def __init__(self) -> None:
        self.board = Board(Rules())
        units = tuple(Unit(name, "a", f"http://{name}") for name in ("u1", "u2"))
        self.board.configure(Fleet(units=units), 0.0)
        for unit in units:
            self.board.observe(Evidence(unit.name, Sign.GOOD, Strength.STRONG, "canary", "it answers", 1.0))
        self.roster = Roster("g1")
        self.consequences: list[Consequence] = []
        self.sharing = Sharing(self.board, "g1", self.roster, lambda: 10.0, self._observe, {"u1": 0.25}.get)

    def _observe(self, evidence: Evidence) -> None:
        self.consequences.append(self.board.observe(evidence))

    def hears(self, age_s: float = 0.0, **changes: Any) -> None:
        seen = Seen(replace(VIEW, **changes), age_s)
        self.roster.update((seen.report.unit, seen.report.gate), seen, 10.0)
        self.sharing.heard(seen)


def test_another_gates_down_asks_for_a_canary_and_orders_nothing() -> None:
    gate = Gate()
    gate.board.open("u1", Ask(), 9.0, retry=False)
    gate.hears(verdict=Verdict.DOWN, fatal=True, reason="refused")
    (consequence,) = gate.consequences
    assert consequence.wants_canary
    assert consequence.evicted == ()
    case = gate.board.units["u1"].case
    assert case.verdict is Verdict.SUSPECT
    assert case.because is not None
    assert case.because.reason == "gate g2 reports it as down: refused"


def test_any_other_verdict_and_other_peoples_units_are_nothing_to_judge_by() -> None:
    gate = Gate()
    for verdict in (Verdict.UP, Verdict.SUSPECT, Verdict.STARTING, Verdict.PROBATION):
        gate.hears(verdict=verdict)
    gate.hears(unit="u9", verdict=Verdict.DOWN)
    assert gate.consequences == []


def test_another_gates_proof_of_life_counts_as_of_when_it_was() -> None:
    gate = Gate()
    gate.hears(age_s=0.25, life_age_s=0.5)
    gate.hears(age_s=0.25, life_age_s=3.0, gate="g3")
    gate.sharing.tick(10.0)
    assert gate.board.units["u1"].progress_at == 9.25
    assert gate.board.units["u2"].progress_at == 1.0
    gate.board.units["u1"].progress_at = 9.5
    gate.sharing.tick(10.0)
    assert gate.board.units["u1"].progress_at == 9.5


def test_the_gate_that_saw_a_unit_live_last_sends_the_next_canary() -> None:
    gate = Gate()
    state = gate.board.units["u1"]
    assert state.peer_canary_at < state.progress_at
    gate.hears(age_s=0.25, life_age_s=0.5)
    gate.sharing.tick(10.0)
    assert state.peer_canary_at == state.progress_at == 9.25
    # It was too late, and has a later one of its own now.
    state.progress_at = 11.5
    gate.sharing.tick(12.0)
    assert state.peer_canary_at < state.progress_at


@pytest.mark.parametrize(("other", "is_others"), [("g0", True), ("g2", False)])
def test_of_gates_that_saw_it_at_once_the_first_by_name_does(other: str, is_others: bool) -> None:
    gate = Gate()
    state = gate.board.units["u1"]
    for progress_at in (9.0, 9.9):
        state.progress_at = progress_at
        gate.hears(gate=other, age_s=0.0, life_age_s=0.9)
        gate.sharing.tick(10.0)
        assert (state.peer_canary_at >= state.progress_at) is is_others


def test_what_was_heard_is_not_told_again_and_small_differences_are_no_news() -> None:
    gate = Gate()
    gate.hears(age_s=0.0, life_age_s=3.0)
    gate.sharing.tick(10.0)
    state = gate.board.units["u1"]
    assert state.progress_at == 7.0
    # Its own last sign of life was at 1.
    assert [report.life_age_s for report in gate.sharing.reports()] == [9.0, 9.0]
    # The same sign of life, by way of a slower writing.
    gate.hears(age_s=0.0, life_age_s=2.9, gate="g3")
    gate.sharing.tick(10.0)
    assert state.progress_at == 7.0
    state.progress_at = 8.5
    assert next(gate.sharing.reports()).life_age_s == 1.5


def test_others_requests_add_up() -> None:
    gate = Gate()
    gate.hears(in_flight=3, prefilling=1, uncached_tokens=200)
    gate.hears(in_flight=4, prefilling=9, uncached_tokens=50, gate="g3")
    gate.hears(in_flight=9, unit="u9")
    assert gate.sharing.tick(10.0) == {"u1": RemoteLoad(7, 5, 250)}, "never more prompts than requests"
    assert gate.sharing.tick(11.0) == {}


def test_a_gate_tells_of_all_its_units_and_finds_out_the_pace_of_busy_ones_in_turns() -> None:
    gate = Gate()
    asked: list[str] = []

    def count(name: str) -> Callable[[float], float]:
        def gap_s(_share: float) -> float:
            asked.append(name)
            return 0.02

        return gap_s

    for name, state in gate.board.units.items():
        state.step_times = _Pace(count(name))  # type: ignore[assignment]
        state.batch = 1.0
    for _ in range(PACE_BEATS):
        reports = list(gate.sharing.reports())
    gate.board.units["u2"].batch = 0.0
    for _ in range(PACE_BEATS):
        reports = list(gate.sharing.reports())
    assert [(report.unit, report.gate, report.itl_s) for report in reports] == [
        ("u1", "g1", 0.02),
        ("u2", "g1", 0.02),
    ]
    assert [report.ttft_s for report in reports] == [0.25, None]
    assert sorted(asked) == ["u1", "u1", "u2"]


class _Pace:
    def __init__(self, gap_s: Callable[[float], float]) -> None:
        self.gap_s = gap_s

    def prefill_s(self, tokens: int) -> float:
        return tokens / 2000.0


def test_what_the_worst_gate_has_seen_of_a_unit_is_known() -> None:
    roster = Roster("g0")
    for gate, errors, degraded in (("g1", 0.75, 0.0), ("g2", 0.0, 0.4)):
        report = UnitReport(
            "u1", "c", gate, Verdict.UP, errors=errors, degraded=degraded, itl_s=errors, drained=gate == "g2"
        )
        roster.update(("u1", gate), Seen(report, 0.0), 10.0)
    assert roster.elsewhere("u1", 10.1) == RemoteLoad(errors=0.75, degraded=0.4, itl_s=0.75, drained=True)
