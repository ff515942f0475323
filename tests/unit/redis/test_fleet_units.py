"""Which units a fleet has by what gates tell, and by way of which gate each is reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from cellgate.probes.readiness import VIA_GATE, name_there
from cellgate.proxy.redis.fleet import FORGET_S, SETTLE_S, FleetUnit, FleetUnits, found
from cellgate.proxy.redis.reports import Roster, Seen, UnitReport
from cellgate.router.nouns import Cell, Verdict

A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"
VIEW = UnitReport(
    "u1", "east", "a", Verdict.UP, "http://u1:1", gate_url=A, models=("m",), weight=2.0, max_in_flight=8
)
MANY = tuple(f"u{number}" for number in range(40))


class Fleet:
    """What gates have told, and the ways that follow."""

    def __init__(self) -> None:
        self.roster = Roster("me")
        self.ways = FleetUnits(self.roster)

    def tell(self, now: float, *reports: UnitReport, age_s: float = 0.0) -> None:
        """Redis answers with these."""
        self.roster.answered({(report.unit, report.gate): Seen(report, age_s) for report in reports}, now)

    def urls(self, now: float) -> dict[str, str]:
        return {
            name: fleet_unit.latest.report.gate_url for name, fleet_unit in self.ways.refresh(now).items()
        }

    def one(self, now: float) -> FleetUnit:
        (fleet_unit,) = self.ways.refresh(now).values()
        return fleet_unit


def both(unit: str = "u1", **changes: Any) -> tuple[UnitReport, UnitReport]:
    """The unit, as two gates tell of it."""
    report = replace(VIEW, unit=unit, **changes)
    return report, replace(report, gate="b", gate_url=B)


def by_way_of(url: str) -> Callable[[dict[str, str]], set[str]]:
    return lambda urls: {name for name, way in urls.items() if way == url}


def test_a_unit_is_reached_at_its_gate_under_its_own_name() -> None:
    fleet = Fleet()
    fleet.tell(0.0, VIEW)
    (unit,) = found(fleet.ways.refresh(0.0).values()).units
    assert (unit.name, unit.cell, unit.url, name_there(unit)) == ("u1", "east", A, "u1")
    assert (unit.models, unit.weight, unit.max_in_flight, unit.engine) == (("m",), 2.0, 8, VIA_GATE)
    assert found(fleet.ways.refresh(0.0).values()).cells == (Cell("east"),)


def test_a_unit_has_the_role_that_its_gate_tells() -> None:
    fleet = Fleet()
    fleet.tell(0.0, replace(VIEW, unit="p1", role="prefill"), replace(VIEW, unit="d1", role="decode"))
    assert [(unit.name, unit.role) for unit in found(fleet.ways.refresh(0.0).values()).units] == [
        ("d1", "decode"),
        ("p1", "prefill"),
    ]


def test_a_gate_that_says_nowhere_where_it_is_is_no_way() -> None:
    fleet = Fleet()
    fleet.tell(0.0, replace(VIEW, gate_url=""))
    assert fleet.ways.refresh(0.0) == {}


def test_units_of_one_name_in_two_cells_are_two() -> None:
    fleet = Fleet()
    fleet.tell(0.0, VIEW, replace(VIEW, cell="west", gate="b", gate_url=B))
    fleet_units = fleet.ways.refresh(0.0)
    assert fleet.urls(0.0) == {"east.u1": A, "west.u1": B}
    assert {name_there(unit) for unit in found(fleet_units.values()).units} == {"u1"}


def test_gates_of_the_same_units_share_them_and_keep_them() -> None:
    fleet = Fleet()
    fleet.tell(0.0, *(report for name in MANY for report in both(name)))
    urls = fleet.urls(0.0)
    assert 10 <= len(by_way_of(A)(urls)) <= 30
    for now in (0.1, SETTLE_S, SETTLE_S + 1.0):
        assert fleet.urls(now) == urls


def test_requests_of_all_gates_count() -> None:
    fleet = Fleet()
    fleet.tell(0.0, *(replace(report, in_flight=3) for report in both()))
    assert fleet.one(0.0).in_flight == 6


def test_who_is_lost_or_stopping_is_no_way_while_there_is_another() -> None:
    for other in (A, B):
        fleet = Fleet()
        fleet.tell(0.0, *both())
        fleet.ways.lost = {other}
        assert fleet.one(0.0).latest.report.gate_url != other
        fleet = Fleet()
        fleet.tell(0.0, *(replace(report, stopping=report.gate_url == other) for report in both()))
        assert fleet.one(0.0).latest.report.gate_url != other


def test_who_has_just_come_gets_its_share_once_it_has_settled() -> None:
    fleet = Fleet()
    reports = [both(name) for name in MANY]
    fleet.tell(0.0, *(a for a, _ in reports))
    fleet.ways.refresh(0.0)
    fleet.tell(100.0, *(report for pair in reports for report in pair))
    assert by_way_of(B)(fleet.urls(100.0)) == set()
    fleet.tell(100.0 + SETTLE_S, *(report for pair in reports for report in pair))
    assert 10 <= len(by_way_of(B)(fleet.urls(100.0 + SETTLE_S))) <= 30


def test_a_gate_that_knows_the_unit_to_be_well_comes_before_one_that_does_not() -> None:
    fleet = Fleet()
    a, b = both()
    fleet.tell(0.0, replace(a, verdict=Verdict.STARTING), b)
    assert fleet.one(0.0).latest.report.gate == "b"
    # But the way does not change because the unit is down: the other gate may only be later to know.
    fleet.tell(0.1, a, replace(b, verdict=Verdict.DOWN))
    assert fleet.one(0.1).latest.report.gate == "b"


def test_a_gate_that_hands_over_to_a_successor_at_its_place_stops_nothing() -> None:
    fleet = Fleet()
    fleet.tell(0.0, replace(VIEW, gate="a2"))
    fleet.tell(0.1, replace(VIEW, stopping=True))
    assert fleet.one(0.1).latest.report.gate == "a2"


def test_whoever_drains_it_drains_it() -> None:
    fleet = Fleet()
    a, b = both()
    fleet.tell(0.0, a, replace(b, drained=True))
    assert fleet.one(0.0).drained_by == "b"


def test_a_unit_that_no_gate_holds_on_to_is_gone_and_later_forgotten() -> None:
    fleet = Fleet()
    fleet.tell(0.0, VIEW)
    fleet.ways.refresh(0.0)
    fleet.tell(1.0)
    fleet.roster.not_ready({"a"}, 1.0)
    assert fleet.one(1.0).gone_since == 1.0
    assert fleet.one(FORGET_S).gone_since == 1.0
    assert fleet.ways.refresh(1.0 + FORGET_S) == {}
    fleet.tell(2.0 + FORGET_S, VIEW)
    assert fleet.one(2.0 + FORGET_S).gone_since is None


def test_many_gates_that_are_missed_at_once_are_looked_for_in_one_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, passes, everything = Fleet(), count(1), Roster.everything

    def counted(roster: Roster) -> Iterator[Any]:
        next(passes)
        return everything(roster)

    gates = [f"g{number}" for number in range(64)]
    fleet.tell(0.0, *(replace(VIEW, unit=f"u{n}", gate=gate) for n in range(40) for gate in gates))
    monkeypatch.setattr(Roster, "everything", counted)
    assert fleet.roster.missed(1.0) == set(gates)
    assert fleet.ways.restarted(gates) == set()
    fleet.roster.not_ready(gates, 1.0)
    assert fleet.roster.units() == set()
    assert next(passes) == 4, "one pass each"


def test_a_gate_started_anew_at_its_place_is_the_successor_of_itself() -> None:
    fleet = Fleet()
    fleet.tell(0.0, VIEW)
    assert not fleet.ways.restarted({"a"})
    fleet.tell(0.5, replace(VIEW, gate="a2", verdict=Verdict.STARTING))
    assert fleet.ways.restarted({"a", "a2", "nobody"}) == {"a"}
    assert fleet.one(0.5).latest.report.gate == "a2"
