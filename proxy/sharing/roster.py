"""Which reports of other gates still hold: by what Redis answers, and while it does not answer. Pure.

1. While Redis does not answer, the last view holds, however old.
2. A document may be missing because Redis has just come back empty: it counts as missed only after Redis has
   answered for three heartbeats without it.
3. And even then the gate that wrote it is asked: only one that is not ready either takes its views along.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from cellgate.proxy.sharing.unit_report import (
    EXPIRY_HEARTBEATS,
    HEARTBEAT_S,
    MergedReport,
    Seen,
    UnitReport,
    merge_reports,
)
from cellgate.router.cost_model import Elsewhere

RosterKey = tuple[str, str]
"""(unit, gate)"""


class Roster:
    """The views that hold, by unit and gate. `own` is the gate that reads: what it wrote is no news to it."""

    def __init__(self, own: str, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.own = own
        self._patience_s = EXPIRY_HEARTBEATS * heartbeat_s
        self._units: dict[str, dict[str, tuple[UnitReport, float]]] = {}
        """By unit and gate: what was said, and when."""
        self._answering_since: float | None = None

    def answered(self, seen: Mapping[RosterKey, Seen], now: float) -> list[RosterKey]:
        """Redis has answered, and this is all that there is. What of it was news is returned."""
        if self._answering_since is None:
            self._answering_since = now
        return [key for key, one in seen.items() if self.update(key, one, now)]

    def update(self, key: RosterKey, one: Seen, now: float) -> bool:
        """One view has come, by an answer or by itself. False: it is older than what is known."""
        unit, gate = key
        if gate == self.own:
            return False
        gates, at = self._units.setdefault(unit, {}), now - one.age_s
        if gate in gates and at < gates[gate][1]:
            return False
        gates[gate] = one.report, at
        return True

    def silent(self) -> None:
        """Redis does not answer. What was known holds."""
        self._answering_since = None

    def missed(self, now: float) -> set[str]:
        """The gates with a view that should have been renewed by now: it is time to ask them."""
        return {gate for _, gate in self._missed_keys(now)}

    def not_ready(self, gate: str, now: float) -> None:
        """A gate that was missed does not answer either, or is not ready: its views that are old end."""
        for unit, missed in list(self._missed_keys(now)):
            if missed == gate:
                del self._units[unit][gate]
                if not self._units[unit]:
                    del self._units[unit]

    def forget(self, before: float) -> None:
        """Drop what was written before: who said it is gone, or has left the unit."""
        for unit, gates in list(self._units.items()):
            self._units[unit] = {gate: said for gate, said in gates.items() if said[1] >= before}
            if not self._units[unit]:
                del self._units[unit]

    def of(self, unit: str, now: float) -> MergedReport | None:
        """What the other gates together say of a unit."""
        return merge_reports([Seen(report, now - at) for report, at in self._units.get(unit, {}).values()])

    def said(self, unit: str, gate: str) -> UnitReport | None:
        """What one other gate says of a unit."""
        found = self._units.get(unit, {}).get(gate)
        return found[0] if found is not None else None

    def elsewhere(self, unit: str, now: float) -> Elsewhere:
        """What the other gates have there. What is too old to be so any more does not count."""
        said = self._units.get(unit, {}).values()
        reports = [report for report, at in said if now - at <= self._patience_s]
        return Elsewhere(
            sum(report.in_flight for report in reports), sum(report.uncached_tokens for report in reports)
        )

    def expires_at(self, now: float) -> float:
        """When the next view is too old for its requests to count; inf: none will be."""
        times = [at + self._patience_s for gates in self._units.values() for _, at in gates.values()]
        return min((at for at in times if at >= now), default=math.inf)

    def lived_at(self, unit: str) -> tuple[float, str] | None:
        """When another gate last saw the unit work, and which one."""
        said = self._units.get(unit, {}).items()
        lives = ((at - v.life_age_s, gate) for gate, (v, at) in said if v.life_age_s is not None)
        return max(lives, default=None)

    def everything(self) -> Iterator[tuple[RosterKey, UnitReport, float]]:
        """Each view that holds, and when it was written."""
        for unit, gates in self._units.items():
            for gate, (report, at) in gates.items():
                yield (unit, gate), report, at

    def units(self) -> set[str]:
        """All units that another gate has told of."""
        return set(self._units)

    def gates(self, now: float) -> set[str]:
        """The gates whose word is not too old."""
        said = [(gate, at) for gates in self._units.values() for gate, (_, at) in gates.items()]
        return {gate for gate, at in said if now - at <= self._patience_s}

    def _missed_keys(self, now: float) -> Iterator[RosterKey]:
        if self._answering_since is None or now - self._answering_since < self._patience_s:
            return
        for unit, gates in self._units.items():
            yield from ((unit, gate) for gate, (_, at) in gates.items() if now - at > self._patience_s)
