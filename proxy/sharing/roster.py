"""Which reports of other gates are still valid, with Redis and without it. Pure.

1. While Redis does not answer, the last reports stay valid, however old.
2. A document may be missing because Redis has just come back empty: it counts as missed only after Redis has
   answered for three heartbeats without it.
3. Even then the gate that wrote it is probed: its reports end only if it is not ready either.
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
    """The valid reports, by unit and gate. `own` is the reading gate, whose own reports are ignored."""

    def __init__(self, own: str, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.own = own
        self._patience_s = EXPIRY_HEARTBEATS * heartbeat_s
        self._units: dict[str, dict[str, tuple[UnitReport, float]]] = {}
        """By unit and gate: the report and its time."""
        self._answering_since: float | None = None

    def answered(self, seen: Mapping[RosterKey, Seen], now: float) -> list[RosterKey]:
        """Redis has answered with all reports. Returns those that are new."""
        if self._answering_since is None:
            self._answering_since = now
        return [key for key, one in seen.items() if self.update(key, one, now)]

    def update(self, key: RosterKey, one: Seen, now: float) -> bool:
        """One report has arrived, in an answer or on the channel. False: it is older than the known one."""
        unit, gate = key
        if gate == self.own:
            return False
        gates, at = self._units.setdefault(unit, {}), now - one.age_s
        if gate in gates and at < gates[gate][1]:
            return False
        gates[gate] = one.report, at
        return True

    def silent(self) -> None:
        """Redis does not answer: keep what is known."""
        self._answering_since = None

    def missed(self, now: float) -> set[str]:
        """The gates with overdue reports, which must be probed."""
        return {gate for _, gate in self._missed_keys(now)}

    def not_ready(self, gate: str, now: float) -> None:
        """A missing gate does not answer either, or is not ready: its old reports end."""
        for unit, missed in list(self._missed_keys(now)):
            if missed == gate:
                del self._units[unit][gate]
                if not self._units[unit]:
                    del self._units[unit]

    def forget(self, before: float) -> None:
        """Drop reports from before `at`: their gates have ended, or no longer have the unit."""
        for unit, gates in list(self._units.items()):
            self._units[unit] = {gate: said for gate, said in gates.items() if said[1] >= before}
            if not self._units[unit]:
                del self._units[unit]

    def of(self, unit: str, now: float) -> MergedReport | None:
        """The combined report of the other gates on a unit."""
        return merge_reports([Seen(report, now - at) for report, at in self._units.get(unit, {}).values()])

    def said(self, unit: str, gate: str) -> UnitReport | None:
        """The report of one other gate on a unit."""
        found = self._units.get(unit, {}).get(gate)
        return found[0] if found is not None else None

    def elsewhere(self, unit: str, now: float) -> Elsewhere:
        """The requests of the other gates there. Old reports do not count."""
        said = self._units.get(unit, {}).values()
        reports = [report for report, at in said if now - at <= self._patience_s]
        return Elsewhere(
            sum(report.in_flight for report in reports), sum(report.uncached_tokens for report in reports)
        )

    def expires_at(self, now: float) -> float:
        """When the next report becomes too old for its requests to count; inf: none will."""
        times = [at + self._patience_s for gates in self._units.values() for _, at in gates.values()]
        return min((at for at in times if at >= now), default=math.inf)

    def lived_at(self, unit: str) -> tuple[float, str] | None:
        """When another gate last saw progress of the unit, and which gate."""
        said = self._units.get(unit, {}).items()
        lives = ((at - v.life_age_s, gate) for gate, (v, at) in said if v.life_age_s is not None)
        return max(lives, default=None)

    def everything(self) -> Iterator[tuple[RosterKey, UnitReport, float]]:
        """Each valid report, and when it was written."""
        for unit, gates in self._units.items():
            for gate, (report, at) in gates.items():
                yield (unit, gate), report, at

    def units(self) -> set[str]:
        """All units that another gate reports."""
        return set(self._units)

    def gates(self, now: float) -> set[str]:
        """The gates whose reports are recent."""
        said = [(gate, at) for gates in self._units.values() for gate, (_, at) in gates.items()]
        return {gate for gate, at in said if now - at <= self._patience_s}

    def _missed_keys(self, now: float) -> Iterator[RosterKey]:
        if self._answering_since is None or now - self._answering_since < self._patience_s:
            return
        for unit, gates in self._units.items():
            yield from ((unit, gate) for gate, (_, at) in gates.items() if now - at > self._patience_s)
