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
from operator import attrgetter

from cellgate.extras.redis.reports import (
    EXPIRY_HEARTBEATS,
    HEARTBEAT_S,
    Row,
    Seen,
    UnitReport,
    changed_report,
    read_count,
)
from cellgate.router.cost_model import NO_REMOTE_LOAD, RemoteLoad
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
        self._gates: dict[str, dict[str, RemoteLoad]] = {}
        """By gate: the units that it reports, and what others have there by that."""
        self._beat_at: dict[str, float] = {}
        """By gate: when it last said that what it has told still holds."""
        self._said_at: dict[str, float] = {}
        """By gate: when it said anything of a unit."""
        self._fresh: set[str] = set()
        """The gates whose requests count."""
        self._silent_at = math.inf
        """When the first of them may have been silent for too long."""
        self._totals: dict[str, RemoteLoad] = {}
        self._summed: frozenset[str] = frozenset()
        """The gates of which these are the sums."""
        self._aside: tuple[frozenset[str], dict[str, RemoteLoad]] = frozenset(), {}
        """Those of before: where this gate was late, all others were silent and are not, in a moment."""
        self._lives: dict[str, tuple[float, str] | None] = {}
        """By unit: what was asked of it last, kept with each change: of many gates, one has changed."""
        self._changed: dict[str, None] = {}
        self._answering_since: float | None = None
        self._numbers: dict[RosterKey, int] = {}
        """Of the newest verdicts that were heard, also of reports that have ended."""
        self._passed_on: dict[RosterKey, tuple[int, Verdict]] = {}
        """The verdicts that others here were told of last."""
        self._dropped: dict[RosterKey, float] = {}
        """When the reports ended whose verdicts are still known."""
        self._ended: set[str] = set()
        """Gates whose reports were ended here, and not by themselves."""

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
        gone, or was told of later than that.
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
            report.number = max(report.number, newest)
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
            self._ended.add(key[1])

    def forget(self, before: float) -> None:
        """Drop the reports of gates that have said nothing since then."""
        for gate in [gate for gate in self._gates if self._spoke_at(gate) < before]:
            for unit in list(self._gates[gate]):
                self._drop((unit, gate), before)
            self._ended.add(gate)
        self._beat_at = {gate: at for gate, at in self._beat_at.items() if at >= before}

    def take_ended(self) -> set[str]:
        """The gates of which less is known than they have told: of one that goes on, all is read again."""
        ended, self._ended = self._ended, set()
        return ended

    def forget_verdicts(self, before: float) -> None:
        """Those of reports that had ended by then."""
        for key in list(takewhile(lambda key: self._dropped[key] < before, self._dropped)):
            for known in (self._dropped, self._numbers, self._passed_on):
                known.pop(key, None)

    def said(self, unit: str, gate: str) -> UnitReport | None:
        """The report of one other gate on a unit."""
        found = self._units.get(unit, {}).get(gate)
        return found[0] if found is not None else None

    def remote_load(self, unit: str, now: float) -> RemoteLoad:
        """What the other gates report of it. Old reports do not count."""
        self._prune(now)
        if unit not in self._units or not self._fresh:
            return NO_REMOTE_LOAD
        self._sum_fresh()
        if unit not in self._totals:
            self._totals[unit] = NO_REMOTE_LOAD
            for gate in self._units[unit]:
                if gate in self._fresh:
                    self._change(unit, NO_REMOTE_LOAD, self._gates[gate][unit])
        return self._totals[unit]

    def changed(self, now: float) -> list[str]:
        """The units of which anything was told since the last call, or what was told counts no more."""
        self._prune(now)
        changed, self._changed = self._changed, {}
        return list(changed)

    def expires_at(self, now: float) -> float:
        """When the next report becomes too old for its requests to count; inf: none will."""
        times = [self._spoke_at(gate) + self._patience_s for gate in self._gates]
        return min((at for at in times if at >= now), default=math.inf)

    def lived_at(self, unit: str) -> tuple[float, str] | None:
        """When another gate last saw progress of the unit, and which gate."""
        if unit not in self._units:
            return None
        if unit not in self._lives:
            said = self._units[unit].items()
            lives = ((at - v.life_age_s, gate) for gate, (v, at) in said if v.life_age_s is not None)
            self._lives[unit] = max(lives, default=None)
        return self._lives[unit]

    def everything(self) -> Iterator[tuple[RosterKey, UnitReport, float]]:
        """Each valid report that is whole, and when its gate last said that it holds."""
        for unit, gates in self._units.items():
            for gate, (report, at) in gates.items():
                if report.is_whole:
                    yield (unit, gate), report, self._at(gate, at)

    def reported_at(self, unit: str, gate: str) -> float:
        """When that report was written: its ages are as of then."""
        return self._units[unit][gate][1]

    def units(self) -> set[str]:
        """All units that another gate reports."""
        return set(self._units)

    def gates(self, now: float) -> set[str]:
        """The gates that have said something recently, be it that nothing has changed."""
        spoke_at = self._beat_at | {gate: self._spoke_at(gate) for gate in self._gates}
        return {gate for gate, at in spoke_at.items() if now - at <= self._patience_s}

    def _missed_keys(self, now: float) -> Iterator[RosterKey]:
        if self._answering_since is None or now - self._answering_since < self._patience_s:
            return
        yield from (key for key, _, at in self.everything() if now - at > self._patience_s)

    def _at(self, gate: str, reported_at: float) -> float:
        return max(reported_at, self._beat_at.get(gate, reported_at))

    def _spoke_at(self, gate: str) -> float:
        """When a gate with reports said anything."""
        return self._at(gate, self._said_at[gate])

    def _prune(self, now: float) -> None:
        """The requests of gates that are silent for too long count no more."""
        if now <= self._silent_at:
            return
        for gate in [gate for gate in self._fresh if now - self._spoke_at(gate) > self._patience_s]:
            self._fresh.discard(gate)
            self._changed |= dict.fromkeys(self._gates.get(gate, ()))
        self._silent_at = min(map(self._spoke_at, self._fresh), default=math.inf) + self._patience_s

    def _freshen(self, gate: str) -> None:
        if gate not in self._fresh and gate in self._gates:
            self._fresh.add(gate)
            self._silent_at = min(self._silent_at, self._spoke_at(gate) + self._patience_s)
            self._changed |= dict.fromkeys(self._gates[gate])

    def _sum_fresh(self) -> None:
        """Have the sums be those of the gates that count now."""
        if self._summed == self._fresh:
            return
        before, (gates, totals) = (self._summed, self._totals), self._aside
        changed, self._summed = self._summed ^ self._fresh, frozenset(self._fresh)
        if gates == self._fresh:
            self._aside, self._totals = before, totals
        elif len(changed) <= SUMS_CHANGED:
            for gate in changed:
                self._change_all(gate)
        else:
            self._aside, self._totals = before, {}

    def _change_all(self, gate: str) -> None:
        """What a gate says of its units begins or ends to count."""
        begins = gate in self._fresh
        for unit, load in self._gates.get(gate, {}).items():
            if unit in self._totals:
                self._change(unit, *((NO_REMOTE_LOAD, load) if begins else (load, NO_REMOTE_LOAD)))

    def _change(self, unit: str, old: RemoteLoad, new: RemoteLoad) -> None:
        """One gate reports `new` of a unit, in the place of `old`."""
        if old != new and (total := self._totals.pop(unit).changed(old, new)) is not None:
            self._totals[unit] = total

    def _recount(
        self, unit: str, gate: str, load: RemoteLoad, life_age_s: float | None, at: float = 0.0
    ) -> None:
        """A gate is about to say that of a unit."""
        self._aside[1].pop(unit, None)
        if unit in self._totals and (gate in self._summed or gate in self._fresh):
            if self._summed == self._fresh:
                self._change(unit, self._gates.get(gate, {}).get(unit, NO_REMOTE_LOAD), load)
            else:
                del self._totals[unit]
        if unit in self._lives:
            best = self._lives[unit]
            if life_age_s is not None and (best is None or (at - life_age_s, gate) >= best):
                self._lives[unit] = at - life_age_s, gate
            elif best is not None and best[1] == gate:
                del self._lives[unit]

    def _set(self, key: RosterKey, report: UnitReport, at: float) -> None:
        unit, gate = key
        gates = self._units.setdefault(unit, {})
        written_at, load = max(at, gates[gate][1]) if gate in gates else at, _load(report)
        self._recount(unit, gate, load, report.life_age_s, written_at)
        gates[gate] = report, written_at
        self._gates.setdefault(gate, {})[unit] = load
        self._said_at[gate] = max(at, self._said_at.get(gate, at))
        self._numbers[key] = report.number
        self._dropped.pop(key, None)
        self._changed[unit] = None
        self._freshen(gate)

    def _drop(self, key: RosterKey, at: float) -> None:
        unit, gate = key
        gates, units = self._units.get(unit, {}), self._gates.get(gate, {})
        self._recount(unit, gate, NO_REMOTE_LOAD, None)
        gates.pop(gate, None)
        units.pop(unit, None)
        if not gates:
            for known in (self._units, self._totals, self._lives, self._aside[1]):
                known.pop(unit, None)
        if not units and self._gates.pop(gate, None) is not None:
            del self._said_at[gate]
            self._fresh.discard(gate)
        self._dropped.setdefault(key, at)
        self._changed[unit] = None


SUMS_CHANGED = 4
"""Of so many gates that begin or end to count the sums are changed, and not made anew."""
_fields_of = attrgetter(*RemoteLoad._fields)


def _load(report: UnitReport) -> RemoteLoad:
    """What a report adds to what others have at its unit."""
    if (values := _fields_of(report)) == _WITHOUT_LOAD:
        return NO_REMOTE_LOAD
    if None in values:
        values = tuple([value or 0.0 for value in values])
    load = RemoteLoad(*values)
    return load if load.prefilling <= load.in_flight else load._replace(prefilling=load.in_flight)


_WITHOUT_LOAD = _fields_of(UnitReport("", "", "", Verdict.UP))
"""What most reports say: the unit is idle."""
