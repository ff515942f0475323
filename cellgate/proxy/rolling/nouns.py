"""The nouns of rolling: a roll, its units and their phases, and what is seen of a unit meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from cellgate.router.nouns import Verdict


class Phase(Enum):
    """Where a unit is in a roll."""

    WAITING = "waiting"
    DRAINING = "draining"
    ACTING = "acting"
    PROVING = "proving"
    """Its command has ended; it must come up again, and its answers must be right."""
    SOAKING = "soaking"
    """It has requests again, and is watched."""
    DONE = "done"
    FAILED = "failed"
    """It stays drained until an operator undrains it."""
    SKIPPED = "skipped"


OUT = (Phase.DRAINING, Phase.ACTING, Phase.PROVING, Phase.FAILED)
"""Phases in which every gate keeps the unit drained."""
ACTIVE = (Phase.DRAINING, Phase.ACTING, Phase.PROVING, Phase.SOAKING)
OVER = (Phase.DONE, Phase.FAILED, Phase.SKIPPED)


class RollStatus(Enum):
    """What is to be done about a roll."""

    RUNNING = "running"
    PAUSED = "paused"
    """No unit is begun; those that were begun go on to their end."""
    STOPPED = "stopped"
    """The same, for good: it failed, or an operator has stopped it. It may still be undone."""
    DONE = "done"


@dataclass(frozen=True, slots=True)
class UnitRoll:
    """One unit of a roll. `since_ms`: when it came to its phase; `acted_ms`: when its command began;
    `back`: it gets the old software; `was_drained`: an operator had drained it, at some gate, before the roll
    did. Times are of Redis's clock, or of this machine without Redis.
    """

    unit: str
    cell: str
    phase: Phase = Phase.WAITING
    since_ms: int = 0
    acted_ms: int = 0
    back: bool = False
    was_drained: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Roll:
    """A roll. `by` has asked for it; each unit must say that it is `version`, if that is given. `order` is
    the id of the last order that was carried out.
    """

    id: str
    by: str
    began_ms: int
    units: tuple[UnitRoll, ...]
    status: RollStatus = RollStatus.RUNNING
    reason: str = ""
    version: str = ""
    dry_run: bool = False
    order: str = ""

    def out(self) -> frozenset[str]:
        """The units that are out of rotation for it."""
        return frozenset(each.unit for each in self.units if each.phase in OUT)

    def failed(self) -> frozenset[str]:
        """The units that have failed."""
        return frozenset(each.unit for each in self.units if each.phase is Phase.FAILED)

    def is_over(self) -> bool:
        """Whether nothing more happens by itself."""
        is_quiet = not any(each.phase in ACTIVE for each in self.units)
        return self.status in (RollStatus.STOPPED, RollStatus.DONE) and is_quiet


class RollRow(NamedTuple):
    """What is seen of one unit. `in_flight`: of all gates; `renewed_ms`: when its processes last started or
    it last came up; `errors`: the share of its recent requests that failed; `degraded`: how much slower than
    its cell it is; `answered`: there are answers to the known prompt to compare, its own since then and
    another unit's, or nobody asks; `differs`: its answers to it are not those of others; `drained`: at some
    gate.
    """

    unit: str
    cell: str
    verdict: Verdict
    usable: bool
    in_flight: int = 0
    renewed_ms: int = 0
    errors: float = 0.0
    degraded: float = 0.0
    answered: bool = True
    differs: bool = False
    version: str = ""
    drained: bool = False


class CommandEnd(NamedTuple):
    """How a command ended."""

    ok: bool
    detail: str


def cells_of(units: Iterable[UnitRoll]) -> list[str]:
    """The cells, in the order of the units."""
    return list(dict.fromkeys(each.cell for each in units))
