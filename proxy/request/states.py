"""The states of an exchange, and the events that lead from one to the next (see table.py)."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, auto
from typing import Any, NamedTuple


class ExchangeState(IntEnum):
    """Where a request is."""

    PARSING = 0
    """What it asks for is being read."""
    WAITING = auto()
    """A unit is being found for it, at once or through the queue."""
    HOLDING = auto()
    """It was sent to a unit, of whose answer nothing was shown."""
    RELAYING = auto()
    """The answer of a unit is being shown."""
    PROVING = auto()
    """A unit is asked whether it can go on with a stream that another one broke."""
    RESUMED = auto()
    """That unit was sent the request to go on, and nothing of its answer was shown."""
    OVER = auto()
    """Its client has been told all that it will be told."""


class ExchangeEvent(IntEnum):
    """What happens to it."""

    STARTED = 0
    """It has come, whole."""
    ASKED = auto()
    """It is known what it asks for, or that it cannot be."""
    GRANTED = auto()
    """There is a unit."""
    REFUSED = auto()
    """There is none."""
    REPLIED = auto()
    """The unit has sent the head of its reply."""
    COMMITTED = auto()
    """Something of the unit's reply is about to be shown."""
    DONE = auto()
    """The unit's reply has ended, whole."""
    FAILED = auto()
    """The attempt is over without a whole reply."""
    EVICTED = auto()
    """The unit went DOWN."""
    PROVEN = auto()
    """The unit has proven that it can go on."""
    CONCLUDED = auto()
    """The unit has helped to tell how the stream ends."""
    UNPROVEN = auto()
    """The unit cannot go on, and no other could."""
    LEFT = auto()
    """The client is gone."""
    CRASHED = auto()
    """A callback of it has failed: a defect of the gate's own."""
    TICKED = auto()
    """Time has passed."""


class Transition(NamedTuple):
    """What is done, and which states may follow."""

    action: Callable[..., Any]
    """Called with the exchange, and with what the event is about."""
    follows: tuple[ExchangeState, ...]


Table = dict[tuple[ExchangeState, ExchangeEvent], Transition]
