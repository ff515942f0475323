"""Which reports of other gates are still valid, with Redis and without it. Pure.

1. While Redis does not answer, the last reports stay valid, however old.
2. A document may be missing because Redis has just come back empty: it counts as missed only after Redis
   has answered for three heartbeats without it.
3. Even then the gate that wrote it is probed: its reports end only if it is not ready either.
4. A verdict comes by several ways (channel, document, beat), which overtake each other. Its number decides,
   not the time at which it seems to have been written: an older one changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from itertools import takewhile

from cellgate.proxy.redis.reports import (
    EXPIRY_HEARTBEATS,
    HEARTBEAT_S,
    MergedReport,
    Row,
    Seen,
    UnitReport,
    changed_report,
    merge_reports,
    read_count,
)
from cellgate.router.cost_model import RemoteLoad
from cellgate.router.nouns import Verdict

RosterKey = tuple[str, str]
"""(unit, gate)"""


class Roster:
    """The valid reports, by unit and gate. `own` is the reading gate, whose own reports are ignored."""

    def __init__(self, own: str, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.own = own
        self._patience_s = EXPIRY_HEARTBEATS * heartbeat_s
        self._units: dict[str, dict[str, tuple[UnitReport, float]]] = {}
        """By unit and gate: the report and its time."""
        self._gates: dict[str, dict[str, None]] = {}
        """By gate: the units that it reports."""
        self._beat_at: dict[str, float] = {}
        """By gate: when it last said that what it has told still holds."""
        self._said_at: dict[str, float] = {}
        """By gate: when it said anything of a unit."""
        self._fresh: set[str] = set()
        """The gates whose requests count."""
        self._changed: dict[str, None] = {}
        self._answering_since: float | None = None
        self._numbers: dict[RosterKey, int] = {}
        """Of the newest verdicts that were heard, also of reports that have ended."""
        self._passed_on: dict[RosterKey, tuple[int, Verdict]] = {}
        """The verdicts that others here were told of last."""
        self._dropped: dict[RosterKey, float] = {}
        """When the reports ended whose verdicts are still known."""

    def answered(self, now: float) -> None:
        """Redis has answered."""
        if self._answering_since is None:
            self._answering_since = now

    def update(self, key: RosterKey, one: Seen, now: float) -> bool:
        """One report has arrived, in a document or on the channel. False: it is older than the known one."""
        unit, gate = key
        number, at = one.report.number, now - one.age_s
        newest = self._numbers.get(key, 0)
        if gate == self.own or number < newest:
            return False
        known = self._units.get(unit, {}).get(gate)
        if known is not None and at < known[1] and number == newest:
            return False
        self._set(key, one.report, at)
        return True

    def is_news(self, key: RosterKey, report: UnitReport) -> bool:
        """Whether its verdict is one that others here were not told of; it counts as told from now on."""
        number, verdict = self._passed_on.get(key, (-1, report.verdict))
        if (report.number, report.verdict) == (number, verdict) or report.number < number:
            return False
        self._passed_on[key] = report.number, report.verdict
        return True

    def beat(self, gate: str, at: float) -> None:
        """What the gate has told of its units still held then."""
        self._beat_at[gate] = max(at, self._beat_at.get(gate, at))
        self._freshen(gate)

    def change(self, key: RosterKey, row: Row | None, at: float) -> UnitReport | None:
        """A beat that was written then says what has changed of a unit. Returns the new report; None: it has
        gone, is not known whole, or was told of later than that.
        """
        unit, gate = key
        known, reported_at = self._units.get(unit, {}).get(gate, (None, at))
        newest = self._numbers.get(key, 0)
        number = read_count(row.get("number")) if row is not None else None
        if (number or newest) < newest or (at < reported_at and (number or 0) <= newest):
            return None
        report = (
            changed_report(gate, unit, row, known, max(at - reported_at, 0.0)) if row is not None else None
        )
        if report is not None:
            self._set(key, report, at)
        elif row is None:
            self._drop(key, at)
        return report

    def drop_others(self, gate: str, units: Collection[str], before: float) -> None:
        """The gate has no other units than these, but for those that it has told of since then."""
        for unit in self._gates.get(gate, {}).keys() - units:
            if self._units[unit][gate][1] < before:
                self._drop((unit, gate), before)

    def silent(self) -> None:
        """Redis does not answer: keep what is known."""
        self._answering_since = None

    def missed(self, now: float) -> set[str]:
        """The gates with overdue reports, which must be probed."""
        return {gate for _, gate in self._missed_keys(now)}

    def not_ready(self, gates: Collection[str], now: float) -> None:
        """These missing gates do not answer either, or are not ready: their old reports end."""
        for key in [key for key in self._missed_keys(now) if key[1] in gates]:
            self._drop(key, now)

    def forget(self, before: float) -> None:
        """Drop the reports of gates that have said nothing since then."""
        for gate in [gate for gate in self._gates if self._spoke_at(gate) < before]:
            for unit in list(self._gates[gate]):
                self._drop((unit, gate), before)
        self._beat_at = {gate: at for gate, at in self._beat_at.items() if at >= before}

    def forget_verdicts(self, before: float) -> None:
        """Those of reports that had ended by then."""
        for key in list(takewhile(lambda key: self._dropped[key] < before, self._dropped)):
            for known in (self._dropped, self._numbers, self._passed_on):
                known.pop(key, None)

    def of(self, unit: str, now: float) -> MergedReport | None:
        """The combined report of the other gates on a unit."""
        said = self._units.get(unit, {}).items()
        return merge_reports([Seen(report, now - self._at(gate, at)) for gate, (report, at) in said])

    def said(self, unit: str, gate: str) -> UnitReport | None:
        """The report of one other gate on a unit."""
        found = self._units.get(unit, {}).get(gate)
        return found[0] if found is not None else None

    def remote_load(self, unit: str, now: float) -> RemoteLoad:
        """What the other gates report of it. Old reports do not count."""
        said = self._units.get(unit, {}).items()
        reports = [
            report
            for gate, (report, at) in said
            if _has_load(report) and now - self._at(gate, at) <= self._patience_s
        ]
        return RemoteLoad(
            sum(report.in_flight for report in reports),
            sum(min(report.prefilling, report.in_flight) for report in reports),
            sum(report.uncached_tokens for report in reports),
            max((report.errors for report in reports), default=0.0),
            max((report.degraded for report in reports), default=0.0),
            max((report.itl_s or 0.0 for report in reports), default=0.0),
            any(report.drained for report in reports),
        )

    def changed(self, now: float) -> list[str]:
        """The units of which anything was told since the last call, or what was told counts no more."""
        for gate in [gate for gate in self._fresh if now - self._spoke_at(gate) > self._patience_s]:
            self._fresh.discard(gate)
            self._change_all(gate)
        changed, self._changed = self._changed, {}
        return list(changed)

    def expires_at(self, now: float) -> float:
        """When the next report becomes too old for its requests to count; inf: none will."""
        times = [self._spoke_at(gate) + self._patience_s for gate in self._gates]
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

    def reported_at(self, unit: str, gate: str) -> float:
        """When that report was written: its ages are as of then."""
        return self._units[unit][gate][1]

    def units(self) -> set[str]:
        """All units that another gate reports."""
        return set(self._units)

    def gates(self, now: float) -> set[str]:
        """The gates whose reports are recent."""
        return {gate for gate in self._gates if now - self._spoke_at(gate) <= self._patience_s}

    def _missed_keys(self, now: float) -> Iterator[RosterKey]:
        if self._answering_since is None or now - self._answering_since < self._patience_s:
            return
        yield from (key for key, _, at in self.everything() if now - at > self._patience_s)

    def _at(self, gate: str, reported_at: float) -> float:
        return max(reported_at, self._beat_at.get(gate, reported_at))

    def _spoke_at(self, gate: str) -> float:
        """When a gate with reports said anything."""
        return self._at(gate, self._said_at[gate])

    def _freshen(self, gate: str) -> None:
        if gate not in self._fresh and gate in self._gates:
            self._fresh.add(gate)
            self._change_all(gate)

    def _change_all(self, gate: str) -> None:
        """What a gate says of its units begins or ends to count."""
        for unit in self._gates.get(gate, ()):
            if _has_load(self._units[unit][gate][0]):
                self._changed[unit] = None

    def _set(self, key: RosterKey, report: UnitReport, at: float) -> None:
        unit, gate = key
        gates = self._units.setdefault(unit, {})
        gates[gate] = report, max(at, gates[gate][1]) if gate in gates else at
        self._gates.setdefault(gate, {})[unit] = None
        self._said_at[gate] = max(at, self._said_at.get(gate, at))
        self._numbers[key] = report.number
        self._dropped.pop(key, None)
        self._changed[unit] = None
        self._freshen(gate)

    def _drop(self, key: RosterKey, at: float) -> None:
        unit, gate = key
        gates, units = self._units.get(unit, {}), self._gates.get(gate, {})
        gates.pop(gate, None)
        units.pop(unit, None)
        if not gates:
            self._units.pop(unit, None)
        if not units and self._gates.pop(gate, None) is not None:
            del self._said_at[gate]
            self._fresh.discard(gate)
        self._dropped.setdefault(key, at)
        self._changed[unit] = None


def _has_load(report: UnitReport) -> bool:
    """Whether a report adds anything to what others do at its unit."""
    return bool(
        report.in_flight
        or report.uncached_tokens
        or report.errors
        or report.degraded
        or report.itl_s
        or report.drained
    )
