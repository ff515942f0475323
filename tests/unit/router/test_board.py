"""What the Board makes of time and of restarts, and the retry rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cellgate.router.board import CANARY_GROWTH, RESTART_SUSPECTED_S, Board
from cellgate.router.fleet_learning import COSTS_AT_ONCE
from cellgate.router.nouns import Ask, Evidence, Load, Refusal, Rules, Served, Sign, Strength, Unit, Verdict
from cellgate.router.outliers import Outlier
from cellgate.router.pick import Bounds, find_candidates
from cellgate.router.unit_state import UnitState
from tests.unit.router.fleets import board_of

NOW = 100.0
RULES = Rules()
PASSED = Evidence("a", Sign.GOOD, Strength.STRONG, "canary", "one token", NOW)
FAILED = Evidence("a", Sign.BAD, Strength.STRONG, "canary", "no answer in time", NOW)
READ = Evidence("a", Sign.NEUTRAL, Strength.WEAK, "engine_metrics", "started", NOW, epoch="1")


def board(*evidence: Evidence, rules: Rules = RULES) -> Board:
    made = board_of(Unit("a", "cell", "http://a", weight=2.0), rules=rules)
    for piece in evidence:
        made.observe(piece)
    return made


def state_of(*evidence: Evidence) -> UnitState:
    return board(*evidence).units["a"]


def test_a_speed_that_was_learnt_is_not_multiplied_by_the_weight_that_says_the_same() -> None:
    made = board_of(Unit("a", "c", "http://a", weight=2.0), Unit("b", "c", "http://b"))
    for name, tokens_s, step_s in (("a", 2000.0, 0.01), ("b", 1000.0, 0.02)):
        made.observe(replace(PASSED, unit=name))
        rates = made.units[name].costs.rates
        for _ in range(200):
            rates.prefill_tokens_s.learn(tokens_s)
            rates.steps.learn(step_s, 8)
    assert made.tokens_s() == pytest.approx(3000.0, rel=0.05)


@pytest.mark.parametrize(("risen_s", "share"), [(0.0, 0.2), (0.5, 0.2), (5.0, 1.0), (9.9, 1.98), (10.0, 2.0)])
def test_a_unit_that_came_up_gets_its_share_by_and_by_and_a_degraded_one_as_much_less(
    risen_s: float, share: float
) -> None:
    unit = state_of(PASSED)
    assert unit.share(NOW + risen_s, RULES) == pytest.approx(share)
    assert unit.share(NOW + risen_s, Rules(slow_start_s=0.0)) == 2.0
    unit.outlier = Outlier(0.25)
    assert unit.share(NOW + 60.0, RULES) == 1.5


def test_a_suspicion_that_came_to_nothing_is_no_new_start() -> None:
    unit = state_of(PASSED, replace(FAILED, at=NOW + 60.0), replace(PASSED, at=NOW + 61.0))
    assert unit.case.verdict is Verdict.UP
    assert unit.share(NOW + 61.0, RULES) == 2.0


def test_a_doubted_unit_gets_nothing_until_it_shows_life_or_the_doubt_ends() -> None:
    made = board(PASSED)
    assert made.suspect_restart("a", NOW + 1.0)
    assert not made.suspect_restart("a", NOW + 1.1), "it has been asked already"
    assert find_candidates(made, Ask(), NOW + 1.2, (), Bounds(1.0))[:2] == ([], Refusal.UNSURE)
    made.observe(Evidence("a", Sign.GOOD, Strength.WEAK, "readiness", "HTTP 200", NOW + 1.2))
    made.tick(NOW + 1.0 + RESTART_SUSPECTED_S)
    assert made.units["a"].is_restart_suspected(), "an answer to a health check settles nothing"
    silent = board(PASSED)
    silent.suspect_restart("a", NOW + 1.0)
    silent.tick(NOW + 1.1 + RESTART_SUSPECTED_S)
    made.observe(replace(PASSED, at=NOW + 1.3))
    for each in (made, silent):
        rows = find_candidates(each, Ask(), NOW + 1.4, (), Bounds(1.0)).rows
        assert [row.unit for row in rows] == ["a"]


def test_what_was_learnt_of_the_incarnation_before_is_forgotten() -> None:
    made = board(PASSED)
    unit = made.units["a"]
    made.set_engine(Served("a", "vllm", NOW))
    assert made.observe(READ).flip is None
    assert unit.engine == "vllm", "a first reading forgets nothing"
    made.report(Load("a", NOW, running=5, progress=7.0, sighted=True))
    unit.outlier = Outlier(0.5)
    flip = made.observe(replace(READ, epoch="2", at=NOW + 1.0)).flip
    assert flip is not None
    assert flip.after is Verdict.STARTING
    assert (unit.load, unit.foreign, unit.counters_at) == (None, 0, 0.0)
    assert (unit.outlier, unit.engine) == (Outlier(), "")


def test_growing_counters_are_life_and_standing_ones_are_not() -> None:
    made = board(PASSED)
    unit = made.units["a"]
    for at, progress, life_s in ((1.0, 5.0, 0.0), (2.0, 5.0, 0.0), (3.0, 6.0, 3.0), (4.0, 6.0, 3.0)):
        made.report(Load("a", NOW + at, progress=progress))
        assert unit.progress_at == NOW + life_s
    unit.progress_at = NOW + 4.5
    made.report(Load("a", NOW + 5.0, progress=9.0))
    assert unit.progress_at == NOW + 4.5, "a canary's tokens explain it"
    unit.progress_at = NOW + 5.5
    made.report(Load("a", NOW + 6.0, progress=10.0 + CANARY_GROWTH))
    assert unit.progress_at == NOW + 6.0, "a canary has not so many"
    made.open("a", Ask(), NOW + 6.1, retry=False)
    unit.progress_at = NOW + 6.5
    made.report(Load("a", NOW + 7.0, progress=20.0 + 2 * CANARY_GROWTH, own_in_flight=1))
    assert unit.progress_at == NOW + 6.5, "our own tokens explain it"
    made.close(next(iter(unit.leases)), NOW + 7.2)
    unit.progress_at = NOW + 7.2
    made.report(Load("a", NOW + 8.0, progress=30.0 + 3 * CANARY_GROWTH))
    assert unit.progress_at == NOW + 7.2, "those of streams that have just ended, too"


@pytest.mark.parametrize(("units", "times"), [(4, 4), (COSTS_AT_ONCE + 1, 0)])
def test_units_of_a_large_fleet_that_come_up_together_are_priced_once_by_the_next_tick(
    monkeypatch: pytest.MonkeyPatch, units: int, times: int
) -> None:
    found = board_of(*(Unit(f"u{n}", "c", f"http://u{n}") for n in range(units)))
    asked: list[float] = []
    monkeypatch.setattr("cellgate.router.board.foresee", lambda _states, _others, now: asked.append(now))
    for name in found.units:
        found.observe(Evidence(name, Sign.GOOD, Strength.STRONG, "canary", "it answered", 1.0))
    assert asked == [1.0] * times
    found.tick(1.25)
    assert asked[times:] == [1.25]
