"""What follows a failed attempt: another unit, or the end. Pure.

Two kinds of failure are told apart. One that a *response* of a unit still believed UP caused draws on the
budget, because repeating it may be repeating the cause. One that means the unit is gone (refused, reset,
suspected since) does not: moving that request is an eviction by another name.
"""

from __future__ import annotations

from typing import NamedTuple

from cellgate.router.nouns import Rules


class Attempts(NamedTuple):
    """The history of one request: units tried, and how many of the attempts were paid from the budget."""

    tried: tuple[str, ...] = ()
    paid: int = 0

    def after(self, unit: str, *, paid: bool) -> Attempts:
        """The history once the attempt on `unit` has failed; `paid`: the next one draws on the budget."""
        return Attempts((*self.tried, unit), self.paid + paid)


class Step(NamedTuple):
    """The next step. `draws` says that the attempt is paid from the retry budget."""

    again: bool
    draws: bool = False


_GIVE_UP = Step(False)


def next_step(
    history: Attempts, *, retryable: bool, by_response: bool, live: int, paid_live: int, rules: Rules
) -> Step:
    """Decide after an uncommitted attempt failed.

    `live` is how many requests are in flight at the gate, `paid_live` how many of them are paid retries:
    the budget is `retry_budget` of the live ones, never below `retry_min`.
    """
    if not retryable or (by_response and history.paid + 1 >= rules.attempts):
        return _GIVE_UP
    if not by_response:
        return Step(True)
    return Step(True, draws=True) if has_budget(live, paid_live, rules) else _GIVE_UP


def has_budget(live: int, paid_live: int, rules: Rules) -> bool:
    """Whether one more retry may be paid while so many requests are in flight, and so many were paid."""
    return paid_live < max(float(rules.retry_min), rules.retry_budget * live)
