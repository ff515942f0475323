"""What follows a failed attempt: what is tried again, on whose budget, how often, and what waits again. Pure.

Each kind of failure has one of the rules below (its row in proxy/http/errors.py names it). A *response* of a
unit still believed UP draws on the budget, because repeating it may be repeating the cause. What means that
the unit is gone (refused, reset, suspected since) does not: to move that request is an eviction by another
name.

In this order: `RetryRule`, the rules, `Attempts`, `next_step`, `without_room`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from cellgate.router.nouns import Refusal, Rules


class Returns(Enum):
    """Whether the unit that failed may get the request again, a few times."""

    NEVER = "never"
    IF_ALONE = "if_alone"
    """Where no other can take it: the cause may pass in a moment."""
    ALWAYS = "always"
    """It ended the request, and is not sick."""


@dataclass(frozen=True, slots=True)
class RetryRule:
    """What follows a failure before the commit.

    `again`: another attempt; `draws`: on the retry budget, if the unit is believed UP; `cools`: for a moment
    the unit gets nothing new, if there is another; `waits`: where no other unit has room, the request waits
    in the queue once more.
    """

    again: bool = True
    draws: bool = False
    cools: bool = False
    waits: bool = False
    returns: Returns = Returns.NEVER


FINAL = RetryRule(again=False)
"""The client's failures, most of the gate's, and all after the commit."""
LOST = RetryRule()
ANSWERED = RetryRule(draws=True, cools=True)
BUSY = RetryRule(draws=True, cools=True, waits=True)
ENDED = RetryRule(returns=Returns.ALWAYS)
NOT_CONNECTED = RetryRule(returns=Returns.IF_ALONE)
"""The gate itself could not connect, so this says nothing of the unit."""


class Step(NamedTuple):
    """The next step: is there another attempt, is it on the retry budget, may the same unit get it."""

    again: bool
    draws: bool = False
    returns: bool = False


END, FREE = Step(again=False), Step(again=True)


class Attempts(NamedTuple):
    """The history of one request: units tried, how many of the attempts drew on the budget, how often it has
    waited again or gone back to its unit, and for how many seconds it has waited in the queue.
    """

    tried: tuple[str, ...] = ()
    paid: int = 0
    returned: int = 0
    waited_s: float = 0.0

    def after(self, unit: str, step: Step = FREE) -> Attempts:
        """The history once the attempt on `unit` has failed, and `step` follows."""
        if step.returns:
            return self.waiting()
        return self._replace(tried=(*self.tried, unit), paid=self.paid + step.draws)

    def waiting(self) -> Attempts:
        """The history once the request waits again."""
        return self._replace(returned=self.returned + 1)

    def may_return(self, rules: Rules) -> bool:
        """Whether it may wait again, or go back to its unit."""
        return self.returned + 1 < rules.attempts


def next_step(
    history: Attempts,
    rule: RetryRule,
    rules: Rules,
    *,
    is_up: bool,
    is_alone: bool,
    live: int,
    paid_live: int,
) -> Step:
    """Decide after an uncommitted attempt failed.

    `is_up`: its unit is believed UP; `is_alone`: no other could take the request now. `live` is how many
    requests are in flight at the gate, `paid_live` how many of them are paid retries.
    """
    if not rule.again:
        return END
    if not (rule.draws and is_up):
        return free_step(history, rule, rules, is_alone=is_alone)
    is_within = history.paid + 1 < rules.attempts and has_budget(live, paid_live, rules)
    return Step(again=True, draws=True) if is_within else END


def free_step(history: Attempts, rule: RetryRule, rules: Rules, *, is_alone: bool = False) -> Step:
    """The next step of a request that has lost its unit through no fault of a response."""
    may = rule.returns is Returns.ALWAYS or (rule.returns is Returns.IF_ALONE and is_alone)
    return Step(again=True, returns=may and history.may_return(rules))


def has_budget(live: int, paid_live: int, rules: Rules) -> bool:
    """Whether one more retry may be paid while so many requests are in flight, and so many were paid: it is
    `retry_budget` of the live ones, never below `retry_min`.
    """
    return paid_live < max(float(rules.retry_min), rules.retry_budget * live)


class Unplaced(Enum):
    """What becomes of a request that a unit answered with a failure, where none takes it at once."""

    SHOWN = "shown"
    """Its client gets that answer."""
    WAITS_AGAIN = "waits_again"
    """It waits in the queue, and the same unit may get it."""
    NEXT = "next"
    """It is picked for, like any other."""


_NOBODY_ELSE = (Refusal.NO_UNIT, Refusal.UNKNOWN_MODEL, Refusal.LATE, Refusal.ON_HOLD, Refusal.STALLED)


def without_room(history: Attempts, rule: RetryRule, why: Refusal, rules: Rules) -> Unplaced:
    """Decide after `why` was said instead of another unit."""
    if rule.waits and why is not Refusal.UNSURE:
        return Unplaced.WAITS_AGAIN if history.may_return(rules) else Unplaced.SHOWN
    return Unplaced.SHOWN if why in _NOBODY_ELSE else Unplaced.NEXT
