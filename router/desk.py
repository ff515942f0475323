"""The desk: what the Board keeps of one unit. Everything that is decided from it is decided elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router import panic
from router.nouns import Case, Evidence, Load, Rules, Unit, Verdict
from router.pace import Pace
from router.silence import silent_limit_s
from router.slowness import Slowness, Speed

if TYPE_CHECKING:
    from router.lease import Lease

BUSY_S = 10.0
"""How long a 503 is remembered: a report read after it tells whether there was anything to be busy with."""
SLOW_START_LEAST = 0.1

_USABLE = (Verdict.UP, Verdict.SUSPECT)


class Desk:
    """What the Board keeps of one unit.

    `life_at` is when the unit last proved by work that it lives, `heard_at` when anything of it last
    answered, `work_at` since when it has had requests without a break, `counters_at` when its engine's
    counters were last read (0: never), `doubted_at` when it last showed a sign of having started anew,
    `risen_at` when it last came up from below; `told_at` when its silence was last held
    against it; `news` is the last word of each (node, source).
    """

    __slots__ = (
        "batch",
        "busy_at",
        "case",
        "cool_until",
        "counters_at",
        "doubted_at",
        "drained",
        "engine",
        "foreign",
        "gaps_ms",
        "heard_at",
        "leases",
        "life_at",
        "load",
        "models",
        "news",
        "pace",
        "retired",
        "risen_at",
        "slowness",
        "told_at",
        "unit",
        "weight",
        "work_at",
    )

    def __init__(self, unit: Unit, cell_weight: float, case: Case) -> None:
        self.unit = unit
        self.weight = unit.weight * cell_weight
        self.case = case
        self.models = frozenset(unit.models)
        self.engine = unit.engine
        self.load: Load | None = None
        self.foreign = 0
        self.cool_until = 0.0
        self.drained = False
        self.retired = False
        self.life_at = 0.0
        self.heard_at = 0.0
        self.work_at = 0.0
        self.counters_at = 0.0
        self.doubted_at = -1.0
        self.risen_at = 0.0
        self.told_at = 0.0
        self.batch = 0.0
        self.busy_at = -BUSY_S
        self.slowness = Slowness()
        # A dict for its order: evictions happen in the order the leases were opened.
        self.leases: dict[Lease, None] = {}
        self.pace = Pace()
        # The same list, a step nearer for the byte path.
        self.gaps_ms = self.pace.gaps_ms
        self.news: dict[tuple[str | None, str], Evidence] = {}

    @property
    def in_flight(self) -> int:
        """Open leases on this unit."""
        return len(self.leases)

    def is_usable(self) -> bool:
        """True when the unit may get new requests: believed to work, not drained, not on its way out."""
        return self.case.verdict in _USABLE and not self.drained and not self.retired

    def is_doubted(self) -> bool:
        """True when the unit may have started anew, and has shown no life since."""
        return self.doubted_at >= self.life_at

    def is_mute(self, now: float) -> bool:
        """True when nothing of the unit answers any more, neither its leader nor any other node."""
        return panic.is_mute(max(self.heard_at, self.life_at), now)

    def share(self, now: float, rules: Rules) -> float:
        """The unit's weight now: less while it is degraded or has only just come up (slow start)."""
        weight = self.weight * (1.0 - self.slowness.degraded)
        risen_s = now - self.risen_at
        if risen_s < rules.slow_start_s:
            weight *= max(SLOW_START_LEAST, risen_s / rules.slow_start_s)
        return weight

    def silent_limit_s(self, rules: Rules) -> float:
        """How long nothing may move on the unit with the work it has now."""
        return silent_limit_s(self, rules)

    def speed(self) -> Speed | None:
        """How fast it is, for a comparison; None when too few tokens came of late."""
        gap_s = self.pace.gap_s(0.5)
        if gap_s is None or not self.is_usable():
            return None
        return Speed(gap_s, self.batch, self.load.kv_use if self.load is not None else 0.0, self.weight)

    def __repr__(self) -> str:
        return f"<Desk {self.unit.name} {self.case.verdict.value} in_flight={self.in_flight}>"
