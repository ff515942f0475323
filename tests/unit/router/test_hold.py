"""What a hold explains, how long it is believed, and what follows its end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cellgate.router import health
from cellgate.router.judge import open_case
from cellgate.router.nouns import (
    Cell,
    EnginePause,
    Evidence,
    Hold,
    HoldKind,
    Rules,
    Sign,
    Strength,
    Unit,
    Verdict,
)
from cellgate.router.unit_state import UnitState

RULES = Rules(hold_limit_s=100.0)
PAUSED = Hold(HoldKind.PAUSED, 10.0, 10.0)


def make(verdict: Verdict = Verdict.UP) -> UnitState:
    return UnitState(Unit("u", "c", "http://u"), Cell("c"), replace(open_case(0.0), verdict=verdict))


def say(state: UnitState, kind: HoldKind | None, at: float) -> bool:
    return health.hear(state, EnginePause("u", kind, at))


def evidence(strength: Strength, node: str | None = None, sign: Sign = Sign.BAD) -> Evidence:
    return Evidence("u", sign, strength, "canary", "no token", 11.0, node=node)


@pytest.mark.parametrize(
    ("word", "is_explained"),
    [
        (evidence(Strength.STRONG), True),
        (evidence(Strength.WEAK), True),
        (evidence(Strength.FATAL), False),
        (evidence(Strength.STRONG, node="n"), False),
        (evidence(Strength.STRONG, sign=Sign.GOOD), False),
    ],
)
def test_a_hold_explains_what_is_no_fact(word: Evidence, is_explained: bool) -> None:
    assert health.explains(PAUSED, word) is is_explained
    assert not health.explains(replace(PAUSED, ended_at=11.0), word)
    assert not health.explains(None, word)


def test_it_lasts_while_the_engine_says_so_and_ends_with_a_proof() -> None:
    state = make()
    assert say(state, HoldKind.PAUSED, 10.0)
    assert not say(state, HoldKind.PAUSED, 12.0)
    assert not health.pass_time(state, 13.0, RULES)
    assert not state.is_usable()
    assert say(state, None, 14.0)
    assert (state.held_until, state.is_usable()) == (14.0, False)
    state.progress_at = 14.1
    health.pass_time(state, 14.25, RULES)
    assert state.is_usable()


def test_an_engine_that_stops_saying_so_is_no_longer_believed() -> None:
    state = make()
    say(state, HoldKind.ASLEEP, 10.0)
    assert not health.pass_time(state, 10.0 + health.SAID_S, RULES)
    assert health.pass_time(state, 10.1 + health.SAID_S, RULES)
    assert not state.is_hold_spent


def test_after_the_limit_it_is_ignored_until_the_engine_says_that_it_goes_on() -> None:
    state = make()
    for at in range(10, 111):
        say(state, HoldKind.PAUSED, float(at))
    assert health.pass_time(state, 110.0, RULES)
    assert not say(state, HoldKind.PAUSED, 111.0)
    assert not health.is_on(state.hold)
    say(state, None, 112.0)
    assert say(state, HoldKind.PAUSED, 113.0)


def test_a_hold_that_returns_without_work_in_between_goes_on_from_where_it_began() -> None:
    state = make()
    say(state, HoldKind.PAUSED, 10.0)
    say(state, None, 50.0)
    say(state, HoldKind.PAUSED, 51.0)
    assert state.hold == Hold(HoldKind.PAUSED, 10.0, 51.0)


def test_a_unit_with_a_fact_against_it_is_not_put_on_hold() -> None:
    down = make(Verdict.DOWN)
    down.case = replace(down.case, because=evidence(Strength.FATAL))
    hurt = make()
    hurt.case = replace(hurt.case, faults=frozenset({("n", "agent")}))
    assert not say(down, HoldKind.PAUSED, 10.0)
    assert not say(hurt, HoldKind.PAUSED, 10.0)
    assert down.hold is None
    assert hurt.hold is None


def test_a_unit_of_which_nothing_can_be_proven_comes_back_all_the_same() -> None:
    state = make()
    say(state, HoldKind.PAUSED, 10.0)
    say(state, None, 20.0)
    health.pass_time(state, 20.1 + health.PROOF_S, RULES)
    assert state.is_usable()
