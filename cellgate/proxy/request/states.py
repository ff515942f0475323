"""The states of an exchange, and the events that lead from one to the next (see table.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any


class ExchangeState(IntEnum):
    """Where a request is."""

    PARSING = 0
    """It is being parsed."""
    WAITING = auto()
    """It waits for a unit: the result may come at once or through the queue."""
    HOLDING = auto()
    """It was sent to a unit; nothing of the answer was passed on yet."""
    RELAYING = auto()
    """The answer of a unit is being passed on."""
    PREFILLING = auto()
    """Another unit computes the prompt, or is about to; the unit of the lease has got nothing yet."""
    PROVING = auto()
    """A unit is asked to prove that it can resume a stream that another one broke."""
    RESUMED = auto()
    """That unit got the request to resume the stream; nothing of its answer was passed on yet."""
    OVER = auto()
    """The response has ended."""


class ExchangeEvent(IntEnum):
    """What happens to an exchange."""

    STARTED = 0
    """The whole request has arrived."""
    ASKED = auto()
    """Its large body is parsed, or cannot be."""
    GRANTED = auto()
    """A unit was found."""
    REFUSED = auto()
    """No unit was found."""
    REPLIED = auto()
    """The unit has sent the head of its reply."""
    COMMITTED = auto()
    """The attempt commits."""
    DONE = auto()
    """The unit's reply has ended, whole."""
    FAILED = auto()
    """The attempt ended without a whole reply."""
    EVICTED = auto()
    """The unit went DOWN."""
    PREFILLED = auto()
    """The unit of the lease is to get the request: another one has computed its prompt, computes it at this
    moment, or does not.
    """
    PROVEN = auto()
    """The unit has proven that it can resume the stream."""
    CONCLUDED = auto()
    """The text is complete, and the unit has provided what the last events need."""
    UNPROVEN = auto()
    """The unit cannot resume the stream, and neither could any other."""
    LEFT = auto()
    """The client is gone."""
    CRASHED = auto()
    """A callback has failed: a defect of the gate."""
    TICKED = auto()
    """Time has passed."""
    STOPPED = auto()
    """The gate ends it, for a reason that the client is told: its key was revoked."""
    SCREENED = auto()
    """A guardrail has seen the request, and allows, changes or denies it."""
    DOUBTED = auto()
    """The unit's answer is not good: it may be the unit, or the request."""


@dataclass(frozen=True, slots=True)
class Transition:
    """The action for an event, and the states that may follow."""

    action: Callable[..., Any]
    """Called with the exchange and the arguments of the event."""
    follows: tuple[ExchangeState, ...]


Table = dict[tuple[ExchangeState, ExchangeEvent], Transition]
