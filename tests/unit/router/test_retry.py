"""The retry rule: what follows a failed attempt."""

from __future__ import annotations

import pytest

from cellgate.router.nouns import Rules
from cellgate.router.retry import Attempts, Step, next_step

RULES = Rules(attempts=3, retry_budget=0.2, retry_min=3)
FRESH = Attempts()
GIVE_UP, FOR_FREE, PAID = Step(False), Step(True), Step(True, draws=True)


def step(
    history: Attempts = FRESH,
    *,
    retryable: bool = True,
    by_response: bool = True,
    live: int = 1,
    paid_live: int = 0,
) -> Step:
    return next_step(
        history, retryable=retryable, by_response=by_response, live=live, paid_live=paid_live, rules=RULES
    )


@pytest.mark.parametrize("by_response", [True, False])
def test_what_is_not_retryable_ends_here(by_response: bool) -> None:
    assert step(retryable=False, by_response=by_response) == GIVE_UP


def test_a_response_draws_on_the_budget() -> None:
    assert step() == PAID


def test_a_unit_that_is_gone_costs_nothing_however_often_and_whatever_is_spent() -> None:
    history = Attempts(tuple("abcdefgh"), paid=7)
    assert step(history, by_response=False, paid_live=1000) == FOR_FREE


def test_attempts_bound_the_units_asked_because_of_responses() -> None:
    history = FRESH
    asked = 1
    while step(history).again:
        history = history.after(f"unit {asked}", paid=True)
        asked += 1
    assert asked == RULES.attempts


def test_free_moves_do_not_count_as_attempts() -> None:
    history = FRESH.after("a", paid=False).after("b", paid=False).after("c", paid=False)
    assert step(history) == PAID


@pytest.mark.parametrize(
    ("live", "paid_live", "expected"),
    [
        # The floor: three paid retries at once, however few requests are live.
        (1, 2, PAID),
        (1, 3, GIVE_UP),
        (15, 3, GIVE_UP),
        # Above it a fifth of the live ones.
        (16, 3, PAID),
        (100, 19, PAID),
        (100, 20, GIVE_UP),
    ],
)
def test_the_budget_is_a_share_of_the_live_requests_and_never_below_its_floor(
    live: int, paid_live: int, expected: Step
) -> None:
    assert step(live=live, paid_live=paid_live) == expected


def test_history_remembers_units_in_order_and_what_was_paid() -> None:
    history = FRESH.after("a", paid=True).after("b", paid=False).after("c", paid=True)
    assert history == Attempts(("a", "b", "c"), paid=2)
    assert Attempts() == FRESH
