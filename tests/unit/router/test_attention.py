"""Which units of a large fleet are looked at, and for how long they have rested."""

from __future__ import annotations

from math import inf

from cellgate.router.attention import DUE_TICKS, REST_AFTER_S, SMALL, STAYS_S, WOKEN_AT_ONCE, Attention
from cellgate.router.nouns import Case, Cell, Unit, Verdict
from cellgate.router.unit_state import UnitState


def resting(at: float) -> tuple[Attention, list[UnitState]]:
    """A large fleet, all of which rests at `at`."""
    names = [f"u{number}" for number in range(SMALL + 1)]
    fleet = {n: UnitState(Unit(n, "c", f"http://{n}"), Cell("c"), Case(Verdict.UP, 0.0)) for n in names}
    attention = Attention()
    attention.configure(fleet, at - 1.0)
    for _ in range(DUE_TICKS):
        attention.tick(at)
    return attention, list(fleet.values())


def test_who_was_only_late_or_had_a_request_rests_as_before_and_of_whom_something_was_said_does_not() -> None:
    attention, (late, doubted, both, *others) = resting(10.0)
    for state in (late, both):
        attention.look_at(state, 500.0)
        attention.look_at(state, 500.25)
    for state in (doubted, both):
        attention.note(state, 500.25 + STAYS_S)
    assert {late, doubted, both} <= set(attention.tick(500.25))
    assert attention.woken(500.25) == [late, both, doubted]
    attention.tick(600.0)
    assert late.calm_since == others[0].calm_since == 10.0
    assert doubted.calm_since == both.calm_since == 600.0


def test_a_unit_that_has_not_rested_yet_is_not_asked_anew_for_each_request() -> None:
    attention, (state, *_) = resting(10.0)
    attention.note(state)
    assert attention.woken(10.0 + REST_AFTER_S) == []
    attention.tick(30.0)
    attention.note(state)
    assert attention.woken(30.1 + REST_AFTER_S) == [state]


def test_a_unit_whose_request_has_ended_rests_as_before_while_its_means_fall() -> None:
    attention, (state, *_) = resting(10.0)
    state.batch = 1.0
    attention.look_at(state, 500.0)
    assert state in attention.tick(500.25)
    assert attention.woken(500.5) == []
    assert state.calm_since == 10.0
    assert state in attention.tick(501.0)
    attention.note(state)
    assert state.calm_since == inf, "something was said of it"
    state.batch = 0.04
    assert state not in attention.tick(502.0)[:-1]
    assert (state.batch, state.calm_since) == (0.0, 502.0)


def test_of_many_that_get_requests_at_once_some_are_asked_on_each_tick_and_none_that_rests_again() -> None:
    attention, states = resting(10.0)
    for state in states:
        attention.note(state, 30.0)
    assert attention.woken(30.0) == states[:WOKEN_AT_ONCE]
    for _ in range(DUE_TICKS):
        attention.tick(31.0)
    assert attention.woken(31.0) == []
