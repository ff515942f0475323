"""Which reports of other gates are still valid, with Redis and without it. Pure.

1. While Redis does not answer, the last reports stay valid, however old.
2. A document may be missing because Redis has just come back empty: it counts as missed only after Redis has
   answered for three heartbeats without it.
3. Even then the gate that wrote it is probed: its reports end only if it is not ready either.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from cellgate.proxy.sharing.beats import Row, changed_report
from cellgate.proxy.sharing.unit_report import (
    EXPIRY_HEARTBEATS,
    HEARTBEAT_S,
    MergedReport,
    Seen,
    UnitReport,
    merge_reports,
)
from cellgate.router.other_gates import Elsewhere

RosterKey = tuple[str, str]
"""(unit, gate)"""


class Roster:
    """The valid reports, by unit and gate. `own` is the reading gate, whose own reports are ignored."""

    def __init__(self, own: str, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.own = own
        self._patience_s = EXPIRY_HEARTBEATS * heartbeat_s
        self._units: dict[str, dict[str, tuple[UnitReport, float]]] = {}
        """By unit and gate: the report and its time."""
        self._beat_at: dict[str, float] = {}
        """By gate: when it last said that what it has told still holds."""
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

    def beat(self, gate: str, at: float) -> None:
        """What the gate has told of its units still held then."""
        self._beat_at[gate] = max(at, self._beat_at.get(gate, at))

    def change(self, key: RosterKey, row: Row | None, at: float) -> UnitReport | None:
        """A beat that was written then says what has changed of a unit. Returns the new report; None: it has
        gone, is not known whole, or was told of later than that.
        """
        unit, gate = key
        known, told_at = self._units.get(unit, {}).get(gate, (None, at))
        if at < told_at:
            return None
        report = changed_report(gate, unit, row, known, at - told_at) if row is not None else None
        if report is not None:
            self._units.setdefault(unit, {})[gate] = report, at
        elif row is None:
            self._drop(key)
        return report

    def drop_older(self, gate: str, before: float) -> None:
        """The gate has told of all its units since then, and has no others."""
        for unit, gates in list(self._units.items()):
            if gate in gates and gates[gate][1] < before:
                self._drop((unit, gate))

    def silent(self) -> None:
        """Redis does not answer: keep what is known."""
        self._answering_since = None

    def missed(self, now: float) -> set[str]:
        """The gates with overdue reports, which must be probed."""
        return {gate for _, gate in self._missed_keys(now)}

    def not_ready(self, gates: Collection[str], now: float) -> None:
        """These missing gates do not answer either, or are not ready: their old reports end."""
        for key in [key for key in self._missed_keys(now) if key[1] in gates]:
            self._drop(key)

    def forget(self, before: float) -> None:
        """Drop reports from before then: their gates have ended, or no longer have the unit."""
        for unit, gates in list(self._units.items()):
            for gate in [gate for gate, (_, at) in gates.items() if self._at(gate, at) < before]:
                self._drop((unit, gate))
        self._beat_at = {gate: at for gate, at in self._beat_at.items() if at >= before}

    def of(self, unit: str, now: float) -> MergedReport | None:
        """The combined report of the other gates on a unit."""
        said = self._units.get(unit, {}).items()
        return merge_reports([Seen(report, now - self._at(gate, at)) for gate, (report, at) in said])

    def said(self, unit: str, gate: str) -> UnitReport | None:
        """The report of one other gate on a unit."""
        found = self._units.get(unit, {}).get(gate)
        return found[0] if found is not None else None

    def elsewhere(self, unit: str, now: float) -> Elsewhere:
        """What the other gates report of it. Old reports do not count."""
        said = self._units.get(unit, {}).items()
        reports = [report for gate, (report, at) in said if now - self._at(gate, at) <= self._patience_s]
        return Elsewhere(
            sum(report.in_flight for report in reports),
            sum(min(report.prefilling, report.in_flight) for report in reports),
            sum(report.uncached_tokens for report in reports),
            max((report.errors for report in reports), default=0.0),
            max((report.degraded for report in reports), default=0.0),
            max((report.itl_s or 0.0 for report in reports), default=0.0),
            any(report.drained for report in reports),
        )

    def expires_at(self, now: float) -> float:
        """When the next report becomes too old for its requests to count; inf: none will."""
        times = [at + self._patience_s for _, _, at in self.everything()]
        return min((at for at in times if at >= now), default=math.inf)

    def lived_at(self, unit: str) -> tuple[float, str] | None:
        """When another gate last saw progress of the unit, and which gate."""
        said = self._units.get(unit, {}).items()
        lives = ((at - v.life_age_s, gate) for gate, (v, at) in said if v.life_age_s is not None)
        return max(lives, default=None)

    def everything(self) -> Iterator[tuple[RosterKey, UnitReport, float]]:
        """Each valid report, and when its gate last said that it holds."""
        for unit, gates in self._units.items():
            for gate, (report, at) in gates.items():
                yield (unit, gate), report, self._at(gate, at)

    def told_at(self, unit: str, gate: str) -> float:
        """When that report was written: its ages are as of then."""
        return self._units[unit][gate][1]

    def units(self) -> set[str]:
        """All units that another gate reports."""
        return set(self._units)

    def gates(self, now: float) -> set[str]:
        """The gates whose reports are recent."""
        return {gate for (_, gate), _, at in self.everything() if now - at <= self._patience_s}

    def _missed_keys(self, now: float) -> Iterator[RosterKey]:
        if self._answering_since is None or now - self._answering_since < self._patience_s:
            return
        yield from (key for key, _, at in self.everything() if now - at > self._patience_s)

    def _at(self, gate: str, told_at: float) -> float:
        return max(told_at, self._beat_at.get(gate, told_at))

    def _drop(self, key: RosterKey) -> None:
        unit, gate = key
        gates = self._units.get(unit, {})
        gates.pop(gate, None)
        if not gates:
            self._units.pop(unit, None)
