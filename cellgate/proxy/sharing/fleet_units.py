"""The units of the fleet by the reports of gates, and through which gate each is reached. Pure.

1. A unit stays as long as a gate reports it (see Roster), and for FORGET_S more, so that a fleet that is down
   is not taken for an empty one.
2. Of several gates of a unit one is its route: the same as long as it is available, and different ones for
   different units, so that gates share the work.
3. A unit that computes prompts for others gets no whole request; its gate splits what goes to the others.
4. A gate that has just appeared gets units of others only after SETTLE_S: it may be about to restart again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple
from zlib import crc32

from cellgate.probes.gate_word import VIA_GATE, via_gate
from cellgate.proxy.discovery.base import Found
from cellgate.proxy.sharing.roster import Roster
from cellgate.proxy.sharing.unit_report import UnitReport
from cellgate.router.nouns import Cell, Unit, Verdict

FORGET_S = 60.0
SETTLE_S = 10.0
_LEAST_WEIGHT = 0.001
_DEFAULT = Unit("", "", "")
USABLE = (Verdict.UP, Verdict.SUSPECT)


class TimedView(NamedTuple):
    """The report of one gate, and when the gate last said that it holds. `told_at`: when it was written, if
    that was earlier.
    """

    report: UnitReport
    at: float
    told_at: float | None = None

    def lived_at(self) -> float | None:
        """When the unit last made progress."""
        age_s = self.report.life_age_s
        return None if age_s is None else (self.at if self.told_at is None else self.told_at) - age_s


class FleetUnit(NamedTuple):
    """One unit of the fleet. `name` is its name on the Board; `latest` is the report of the gate that is its
    route, `in_flight` how many requests all gates have there, `drained_by` names a gate that has drained it.

    `gone_since`: no gate reports it since then, and `latest` is the last report.
    """

    name: str
    latest: TimedView
    in_flight: int
    drained_by: str = ""
    gone_since: float | None = None


class FleetUnits:
    """The known fleet. `lost` are URLs of gates that do not answer, set by the caller."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._sights: dict[tuple[str, str], FleetUnit] = {}
        self._since: dict[str, float] = {}
        """Since when each gate, by its URL, reports."""
        self.lost: set[str] = set()

    def refresh(self, now: float) -> dict[str, FleetUnit]:
        """All units now, by their name on the Board."""
        told: defaultdict[tuple[str, str], dict[str, TimedView]] = defaultdict(dict)
        for (unit, gate), report, at in self._roster.everything():
            if report.gate_url:
                by_url = told[report.cell, unit]
                one = TimedView(report, at, self._roster.told_at(unit, gate))
                # One URL may belong to a gate that stops and to its successor.
                by_url[report.gate_url] = max(by_url.get(report.gate_url, one), one, key=_standing)
        self._note_gates((url for by_url in told.values() for url in by_url), now)
        shared = _shared(unit for _, unit in told.keys() | self._sights.keys())
        self._sights = {
            key: self._sight(key, told.get(key), now, shared)
            for key in sorted(told.keys() | self._sights.keys())
            if key in told or not self._is_forgotten(key, now)
        }
        return {fleet_unit.name: fleet_unit for fleet_unit in self._sights.values()}

    def restarted(self, gates: Collection[str]) -> set[str]:
        """Those of these gates at whose URL another one has reported since."""
        last: dict[str, tuple[float, str]] = {}
        for (_, gate), report, at in self._roster.everything():
            last[gate] = max(last.get(gate, (at, report.gate_url)), (at, report.gate_url))
        newest: dict[str, float] = {}
        for at, url in last.values():
            newest[url] = max(newest.get(url, at), at)
        return {gate for gate in gates if gate in last and newest[last[gate][1]] > last[gate][0]}

    def _sight(
        self, key: tuple[str, str], told: Mapping[str, TimedView] | None, now: float, shared: frozenset[str]
    ) -> FleetUnit:
        cell, unit = key
        name = f"{cell}.{unit}" if unit in shared else unit
        before = self._sights.get(key)
        if told is None:
            assert before is not None
            since = before.gone_since if before.gone_since is not None else now
            return before._replace(name=name, in_flight=0, gone_since=since)
        url = self._choose(unit, told, before.latest.report.gate_url if before is not None else "", now)
        drained_by = next((one.report.gate for one in told.values() if one.report.drained), "")
        return FleetUnit(name, told[url], sum(one.report.in_flight for one in told.values()), drained_by)

    def _choose(self, unit: str, told: Mapping[str, TimedView], known: str, now: float) -> str:
        if len(told) == 1:
            return next(iter(told))

        def rank(url: str) -> tuple[bool, bool, bool, bool, int]:
            is_new = url != known and now - self._since[url] < SETTLE_S
            is_usable = url == known or told[url].report.verdict in USABLE
            tie = crc32(f"{unit} {url}".encode())
            return url in self.lost, told[url].report.stopping, not is_usable, is_new, tie

        return min(told, key=rank)

    def _is_forgotten(self, key: tuple[str, str], now: float) -> bool:
        since = self._sights[key].gone_since
        return since is not None and now - since >= FORGET_S

    def _note_gates(self, urls: Iterable[str], now: float) -> None:
        self._since = {url: self._since.get(url, now) for url in urls}
        self.lost &= self._since.keys()


def found(fleet_units: Iterable[FleetUnit]) -> Found:
    """The fleet, as discovery has it."""
    units = tuple(_unit(fleet_unit) for fleet_unit in fleet_units)
    cells = tuple(Cell(name) for name in sorted({unit.cell for unit in units}))
    return Found(units, cells)


def _unit(fleet_unit: FleetUnit) -> Unit:
    report = fleet_unit.latest.report
    return Unit(
        fleet_unit.name,
        report.cell,
        report.gate_url,
        report.models,
        max(report.weight, _LEAST_WEIGHT),
        report.max_in_flight or _DEFAULT.max_in_flight,
        nodes=via_gate(report.unit),
        engine=VIA_GATE,
        role=report.role,
    )


def _standing(told: TimedView) -> tuple[bool, float]:
    return not told.report.stopping, told.at


def _shared(names: Iterable[str]) -> frozenset[str]:
    """Names that units of several cells have."""
    return frozenset(name for name, count in Counter(names).items() if count > 1)
