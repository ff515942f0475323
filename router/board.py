"""The Board: cases, loads and open leases; the only mutable routing state.

Every method is synchronous and does no I/O: callers act on what is returned. Rules:
1. `in_flight` of a desk is exactly the number of its open leases.
2. A flip to DOWN, or a new epoch, marks every lease on that unit as evicted, once.
3. A unit taken off the configuration stays known until its last lease has closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from router.judge import judge, open_case
from router.lease import Lease
from router.nouns import (
    Ask,
    Candidate,
    Case,
    Evidence,
    Fleet,
    Flip,
    Load,
    Models,
    Rules,
    Sign,
    Strength,
    Unit,
    Verdict,
)

GAPS_MS = 4096
"""Inter-token gaps are counted per millisecond up to this; the last place takes all that are longer."""

_USABLE = (Verdict.UP, Verdict.SUSPECT)


class Desk:
    """What the Board keeps of one unit.

    `life_at` is when the unit last proved by work that it lives, `heard_at` when anything of it last
    answered, whatever it said.
    """

    __slots__ = (
        "case",
        "cool_until",
        "drained",
        "foreign",
        "gaps_ms",
        "heard_at",
        "leases",
        "life_at",
        "load",
        "models",
        "retired",
        "unit",
        "weight",
    )

    def __init__(self, unit: Unit, cell_weight: float, case: Case) -> None:
        self.unit = unit
        self.weight = unit.weight * cell_weight
        self.case = case
        self.models = frozenset(unit.models)
        self.load: Load | None = None
        self.foreign = 0
        self.cool_until = 0.0
        self.drained = False
        self.retired = False
        self.life_at = 0.0
        self.heard_at = 0.0
        # A dict for its order: evictions happen in the order the leases were opened.
        self.leases: dict[Lease, None] = {}
        self.gaps_ms = [0] * GAPS_MS

    @property
    def in_flight(self) -> int:
        """Open leases on this unit."""
        return len(self.leases)

    def is_usable(self) -> bool:
        """True when the unit may get new requests: believed to work, not drained, not on its way out."""
        return self.case.verdict in _USABLE and not self.drained and not self.retired

    def __repr__(self) -> str:
        return f"<Desk {self.unit.name} {self.case.verdict.value} in_flight={self.in_flight}>"


class Consequence(NamedTuple):
    """What the caller has to do after evidence was folded in."""

    flip: Flip | None = None
    evicted: tuple[Lease, ...] = ()
    wants_canary: bool = False


_NOTHING = Consequence()


class Board:
    """Cases, loads and leases of all units, by unit name."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.desks: dict[str, Desk] = {}
        self.leaving: list[Desk] = []
        """Desks of units no longer configured (or replaced) that still have open leases."""
        self.retries_in_flight = 0
        self.in_flight = 0

    def __iter__(self) -> Iterator[Desk]:
        return iter(self.desks.values())

    def configure(self, fleet: Fleet, now: float) -> tuple[tuple[Unit, ...], tuple[Unit, ...]]:
        """Take over a fleet; returns the units (added, removed). A unit whose address changed is both."""
        wanted = {unit.name: unit for unit in fleet.units}
        gone = [d for d in self if d.unit.name not in wanted or wanted[d.unit.name].url != d.unit.url]
        for desk in gone:
            del self.desks[desk.unit.name]
            desk.retired = True
            if desk.leases:
                self.leaving.append(desk)
        added = tuple(unit for unit in fleet.units if unit.name not in self.desks)
        for unit in fleet.units:
            known = self.desks.get(unit.name)
            if known is None:
                self.desks[unit.name] = Desk(unit, fleet.cell_weight(unit.cell), open_case(now))
            else:
                known.unit, known.weight = unit, unit.weight * fleet.cell_weight(unit.cell)
                known.models = frozenset(unit.models) or known.models
        # The order of the configuration is the order people see.
        self.desks = {name: self.desks[name] for name in wanted}
        return added, tuple(desk.unit for desk in gone)

    def observe(self, evidence: Evidence) -> Consequence:
        """Fold evidence in. Evidence about a unit that is not configured (any more) is dropped."""
        desk = self.desks.get(evidence.unit)
        if desk is None:
            return _NOTHING
        # Weak good news (an answer to /health) is no proof of life: only work is.
        if evidence.sign is Sign.GOOD and evidence.strength is not Strength.WEAK:
            desk.life_at = max(desk.life_at, evidence.at)
        before = desk.case
        desk.case, wants_canary = judge(before, evidence, self.rules)
        reborn = before.epoch is not None and desk.case.epoch != before.epoch
        if desk.case.verdict is before.verdict and not reborn:
            return Consequence(wants_canary=wants_canary) if wants_canary else _NOTHING
        flip = Flip(desk.unit.name, desk.unit.cell, before.verdict, desk.case.verdict, evidence.at, evidence)
        evicted = self._evict(desk) if reborn or desk.case.verdict is Verdict.DOWN else ()
        return Consequence(flip, evicted, wants_canary)

    def report(self, load: Load) -> None:
        """Take over an engine's report; progress of its counters is a proof of life."""
        desk = self.desks.get(load.unit)
        if desk is None:
            return
        if desk.load is not None and load.progress > desk.load.progress:
            desk.life_at = max(desk.life_at, load.at)
        desk.load = load
        desk.foreign = load.foreign

    def serve(self, models: Models) -> None:
        """Take over the list of models of a unit that has none configured."""
        desk = self.desks.get(models.unit)
        if desk is not None and not desk.unit.models:
            desk.models = frozenset(models.names)

    def knows_model(self, model: str) -> bool | None:
        """Whether any unit serves `model`; None while some unit has not told its models yet."""
        if any(model in desk.models for desk in self):
            return True
        return False if self.desks and all(desk.models for desk in self) else None

    def could_serve(self, ask: Ask, tried: Iterable[str]) -> bool:
        """Whether waiting may help: a unit not tried yet serves this ask, or will once it is up again."""
        return any(not d.drained and name not in tried and _serves(d, ask) for name, d in self.desks.items())

    def cool(self, name: str, until: float) -> None:
        """Offer a unit that answered with an error only when there is no other, until then.

        An error comes faster than any answer, so a unit that sends them would look the least loaded of all.
        """
        desk = self.desks.get(name)
        if desk is not None:
            desk.cool_until = until

    def candidates(
        self, ask: Ask, now: float, tried: Iterable[str], overcommit: float
    ) -> tuple[list[Candidate], bool]:
        """The rows for a policy, and whether a usable unit was left out because it is full.

        Units that are SUSPECT or cool down are offered only when no other has room, SUSPECT ones last.
        """
        up: list[Candidate] = []
        cooling: list[Candidate] = []
        suspect: list[Candidate] = []
        full = False
        for name, desk in self.desks.items():
            if not desk.is_usable() or name in tried or not _serves(desk, ask):
                continue
            in_flight = len(desk.leases)
            if in_flight >= desk.unit.max_in_flight * (1.0 + overcommit):
                full = True
                continue
            row = Candidate(name, in_flight, in_flight + desk.foreign, desk.weight)
            if desk.case.verdict is not Verdict.UP:
                suspect.append(row)
            elif desk.cool_until > now:
                cooling.append(row)
            else:
                up.append(row)
        return up or cooling or suspect, full

    def open(self, name: str, ask: Ask, now: float, *, retry: bool) -> Lease:
        """Open a lease on a unit."""
        desk = self.desks[name]
        lease = Lease(desk, ask, now, retry=retry)
        desk.leases[lease] = None
        self.in_flight += 1
        self.retries_in_flight += retry
        return lease

    def close(self, lease: Lease) -> None:
        """Close a lease. Raises RuntimeError the second time: an in-flight count must never drift."""
        if lease.closed:
            raise RuntimeError(f"{lease!r} closed twice")
        lease.closed = True
        lease.on_evict = None
        desk = lease.desk
        del desk.leases[lease]
        self.in_flight -= 1
        self.retries_in_flight -= lease.retry
        if desk.retired and not desk.leases and desk in self.leaving:
            self.leaving.remove(desk)

    def drain(self, name: str, *, drained: bool) -> bool:
        """Set the operator's will; False when there is no such unit."""
        desk = self.desks.get(name)
        if desk is None:
            return False
        desk.drained = drained
        return True

    def _evict(self, desk: Desk) -> tuple[Lease, ...]:
        leases = tuple(lease for lease in desk.leases if not lease.evicted)
        for lease in leases:
            lease.evicted = True
        return leases


def _serves(desk: Desk, ask: Ask) -> bool:
    if ask.unit is not None and ask.unit != desk.unit.name:
        return False
    return ask.model is None or not desk.models or ask.model in desk.models
