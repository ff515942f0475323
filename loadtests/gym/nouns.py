"""What a load is made of, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

from cellgate.router.nouns import Cell, Unit
from loadtests.gym.prompts import Text
from loadtests.gym.sequences import Model
from loadtests.gym.sequences import Sequence as EngineSequence


@dataclass(slots=True, eq=False)
class Request:
    """One request as its client makes it. `context` is the prompt and the answer after it.

    `at` is when it comes; of a follow-up, how long after the answer before. `chance` (0 to 1) draws its gate.
    `usage`: the answer tells what it used.
    """

    number: int
    at: float
    prompt: Text
    context: Text
    model: str = "m"
    stream: bool = True
    usage: bool = True
    tenant: str = ""
    session: str = ""
    root: str = ""
    """The session that its agent works for, if that is another one."""
    priority: int = 0
    deadline_s: float = inf
    chance: float = 0.0
    then: Request | None = None

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answer, at least 1."""
        return self.context.tokens - self.prompt.tokens


class Change(NamedTuple):
    """At `at` (0: the load begins; 1: the last request or session of it does) a unit goes, or comes with an
    empty cache.
    """

    at: float
    unit: int
    is_up: bool


@dataclass(frozen=True, slots=True)
class Place:
    """A unit as it really is, and as the gate is told."""

    model: Model
    unit: Unit
    network_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """What stands behind the gates. `joining`: places that are not there from the beginning;
    `transfer_tokens_s`: how fast KV blocks move between two units (0: they do not).
    """

    name: str
    places: tuple[Place, ...]
    cells: tuple[Cell, ...] = (Cell("a"),)
    gates: int = 1
    changes: tuple[Change, ...] = ()
    joining: frozenset[int] = frozenset()
    transfer_tokens_s: float = 0.0

    def cell(self, place: Place) -> Cell:
        """The cell that a place is in."""
        return next(cell for cell in self.cells if cell.name == place.unit.cell)


class Call:
    """One request on its way through a world. `unit` is where it is; None while it is nowhere."""

    __slots__ = (
        "came_at",
        "ended_at",
        "first_at",
        "held",
        "made",
        "refused",
        "request",
        "sequence",
        "tried",
        "unit",
        "waited_s",
    )

    def __init__(self, request: Request, came_at: float) -> None:
        self.request = request
        self.came_at = came_at
        self.first_at = self.ended_at = -1.0
        self.unit: int | None = None
        self.sequence: EngineSequence | None = None
        self.refused = ""
        self.made = 0
        """Tokens that were shown by a unit that has died since."""
        self.tried: tuple[str, ...] = ()
        self.waited_s = 0.0
        self.held: object = None
        """Whatever the rival keeps of it."""


Send = Callable[[Call, int], None]


class Rival(Protocol):
    """One router (one gate) in front of the units. It is told what a real one in its place would see."""

    def come(self, call: Call, now: float) -> None:
        """A request has come: send it, keep it, or refuse it."""

    def first(self, call: Call, now: float) -> None:
        """Its unit has shown the first token (or, of a plain answer, all)."""

    def ended(self, call: Call, now: float) -> None:
        """Its answer is whole."""

    def broke(self, call: Call, now: float) -> None:
        """Its unit is gone in the middle of it."""

    def changed(self, unit: int, now: float, *, is_up: bool) -> None:
        """A unit has gone or come."""

    def waiting(self) -> Collection[str]:
        """The models of the requests that it keeps back."""


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a load through one rival."""

    calls: Sequence[Call]
    per_unit: tuple[int, ...]
    idle_beside_queue_s: float
    """The longest time for which a unit had nothing to do while requests waited that it could serve."""
    preemptions: int = 0
    hits: float = 0.0
    busy: tuple[float, ...] = field(default=())
    gaps: Sequence[tuple[float, int]] = ()
    """Between two tokens of a stream: seconds, and how many were so long."""
    transfers: int = 0
    """Prompts that one unit has computed for another."""
