"""The nouns of units on hold: what an engine says of standing still on purpose, and what is held of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class HoldKind(Enum):
    """What an engine is doing on purpose, instead of generating."""

    PAUSED = "paused"
    ASLEEP = "asleep"
    SCALING = "scaling"


@dataclass(frozen=True, slots=True)
class Quiescence:
    """What an engine says when it is asked whether it stands still on purpose; `kind` None: it does not."""

    unit: str
    kind: HoldKind | None
    at: float


@dataclass(frozen=True, slots=True)
class Hold:
    """A unit stands still on purpose, as its engine says. It is beside the verdict (see hold.py).

    `said_at`: when the engine last said so; `ended_at`: when the hold ended (0: it lasts): from then on the
    unit has to show work before it gets requests.
    """

    kind: HoldKind
    since: float
    said_at: float
    ended_at: float = 0.0
