"""What the reports of gates make of a fleet: its units, their addresses, and what is believed of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from cellgate.extras.redis.fleet import (
    FLEET_FORGET_S,
    FLEET_SETTLE_S,
    FleetEvidence,
    FleetUnit,
    FleetUnits,
    TimedView,
    found,
)
from cellgate.extras.redis.reports import Seen, UnitReport
from cellgate.extras.redis.roster import Roster
from cellgate.probes.readiness import VIA_GATE, name_there
from cellgate.proxy.observe.events import Action
from cellgate.router import health
from cellgate.router.board import Board, Consequence, Flip
from cellgate.router.nouns import Ask, Cell, Evidence, Fleet, HoldKind, Rules, Sign, Strength, Verdict
from tests.unit.extras.redis.told import answered

A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"
VIEW = UnitReport(
    "u1", "east", "a", Verdict.UP, "http://u1:1", gate_url=A, models=("m",), weight=2.0, max_in_flight=8
)
MANY = tuple(f"u{number}" for number in range(40))


class ToldFleet:
    """What gates have told, and the ways that follow."""

    def __init__(self) -> None:
        self.roster = Roster("me")
        self.ways = FleetUnits(self.roster)

    def tell(self, now: float, *reports: UnitReport, age_s: float = 0.0) -> None:
        """Redis answers with these."""
        answered(self.roster, {(report.unit, report.gate): Seen(report, age_s) for report in reports}, now)

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


def test_a_unit_is_reached_at_its_gate_under_its_own_name_and_in_two_cells_it_is_two() -> None:
    fleet = ToldFleet()
    fleet.tell(0.0, VIEW, replace(VIEW, unit="d1", role="decode"), replace(VIEW, unit="x", gate_url=""))
    decoder, unit = found(fleet.ways.refresh(0.0).values()).units
    assert (unit.name, unit.cell, unit.url, name_there(unit)) == ("u1", "east", A, "u1")
    assert (unit.models, unit.weight, unit.max_in_flight, unit.engine) == (("m",), 2.0, 8, VIA_GATE)
    assert (decoder.name, decoder.role, unit.role) == ("d1", "decode", "both")
    assert found(fleet.ways.refresh(0.0).values()).cells == (Cell("east"),)
    fleet = ToldFleet()
    fleet.tell(0.0, VIEW, replace(VIEW, cell="west", gate="b", gate_url=B))
    fleet_units = fleet.ways.refresh(0.0)
    assert fleet.urls(0.0) == {"east.u1": A, "west.u1": B}
    assert {name_there(unit) for unit in found(fleet_units.values()).units} == {"u1"}
    fleet = ToldFleet()
    a, b = both()
    fleet.tell(0.0, replace(a, in_flight=3), replace(b, in_flight=3, drained=True))
    assert (fleet.one(0.0).in_flight, fleet.one(0.0).drained_by) == (6, "b")


def test_gates_of_the_same_units_share_them_and_keep_them_and_who_has_just_come_settles_first() -> None:
    reports, fleet, late = [both(name) for name in MANY], ToldFleet(), ToldFleet()
    fleet.tell(0.0, *(report for pair in reports for report in pair))
    urls = fleet.urls(0.0)
    assert 10 <= len(by_way_of(A)(urls)) <= 30
    for now in (0.1, FLEET_SETTLE_S, FLEET_SETTLE_S + 1.0):
        assert fleet.urls(now) == urls
    late.tell(0.0, *(a for a, _ in reports))
    late.ways.refresh(0.0)
    for now, least, most in ((100.0, 0, 0), (100.0 + FLEET_SETTLE_S, 10, 30)):
        late.tell(now, *(report for pair in reports for report in pair))
        assert least <= len(by_way_of(B)(late.urls(now))) <= most


def test_who_is_lost_stopping_or_does_not_know_the_unit_to_be_well_is_no_way_while_there_is_another() -> None:
    for other in (A, B):
        lost, stopping, unsure = ToldFleet(), ToldFleet(), ToldFleet()
        lost.tell(0.0, *both())
        lost.ways.lost = {other}
        stopping.tell(0.0, *(replace(each, stopping=each.gate_url == other) for each in both()))
        starting = [
            replace(each, verdict=Verdict.STARTING) if each.gate_url == other else each for each in both()
        ]
        unsure.tell(0.0, *starting)
        way = {fleet.one(0.0).latest.report.gate_url for fleet in (lost, stopping, unsure)}
        assert way == {A, B} - {other}
        # But the way does not change because the unit is down: the other gate may only be later to know.
        unsure.tell(
            0.1, *(replace(each, verdict=Verdict.DOWN) if each.gate_url in way else each for each in both())
        )
        assert unsure.one(0.1).latest.report.gate_url in way


def test_a_gate_started_anew_at_its_place_is_the_successor_of_itself() -> None:
    """One that hands over to a successor there stops nothing."""
    fleet = ToldFleet()
    fleet.tell(0.0, VIEW)
    assert not fleet.ways.restarted({"a"})
    fleet.tell(0.5, replace(VIEW, gate="a2", verdict=Verdict.STARTING))
    assert fleet.ways.restarted({"a", "a2", "nobody"}) == {"a"}
    fleet.tell(0.6, replace(VIEW, stopping=True))
    assert fleet.one(0.6).latest.report.gate == "a2"


def test_a_unit_that_no_gate_holds_on_to_is_gone_and_later_forgotten() -> None:
    fleet = ToldFleet()
    fleet.tell(0.0, VIEW)
    fleet.ways.refresh(0.0)
    fleet.tell(1.0)
    fleet.roster.not_ready({"a"}, 1.0)
    assert fleet.one(1.0).gone_since == 1.0
    assert fleet.one(FLEET_FORGET_S).gone_since == 1.0
    assert fleet.ways.refresh(1.0 + FLEET_FORGET_S) == {}
    fleet.tell(2.0 + FLEET_FORGET_S, VIEW)
    assert fleet.one(2.0 + FLEET_FORGET_S).gone_since is None


def test_many_gates_that_are_missed_at_once_are_looked_for_in_one_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, passes = ToldFleet(), Mock(side_effect=Roster.everything)
    gates = [f"g{number}" for number in range(8)]
    fleet.tell(0.0, *(replace(VIEW, unit=f"u{n}", gate=gate) for n in range(4) for gate in gates))
    monkeypatch.setattr(Roster, "everything", lambda roster: passes(roster))
    assert fleet.roster.missed(1.0) == set(gates)
    assert fleet.ways.restarted(gates) == set()
    fleet.roster.not_ready(gates, 1.0)
    assert fleet.roster.units() == set()
    assert passes.call_count == 3, "one pass each"


# What the word of a unit's gate does to the Board of a fleet's router.

WHOLE_VIEW = UnitReport("u1", "east", "a", Verdict.UP, "http://u1:1", gate_url="http://a:1", epoch="e1")
GONE = FleetUnit("u1", TimedView(WHOLE_VIEW, 0.0), 0, gone_since=5.0)


class Router:
    """A board with what is told of one unit folded in."""

    def __init__(self) -> None:
        self.board = Board(Rules())
        self.flips: list[Flip] = []
        self.told: list[Action] = []
        self.fold = FleetEvidence(self.board, self.observe, self.drain, self.told.append, health.hear)

    def observe(self, evidence: Evidence) -> Consequence:
        consequence = self.board.observe(evidence)
        if consequence.flip is not None:
            self.flips.append(consequence.flip)
        return consequence

    def drain(self, unit: str, drained: bool) -> None:
        assert self.board.drain(unit, drained=drained)

    def hear(self, at: float, age_s: float = 0.0, in_flight: int = 0, **changes: Any) -> None:
        """The gate has said so."""
        self.see(FleetUnit("u1", TimedView(replace(WHOLE_VIEW, **changes), at - age_s), in_flight), at)

    def see(self, fleet_unit: FleetUnit, at: float) -> None:
        self.board.configure(Fleet(units=found([fleet_unit]).units), at)
        self.fold.take(fleet_unit, at)

    def sees(self, sign: Sign, strength: Strength, source: str, at: float) -> None:
        """This gate finds something out itself."""
        self.observe(Evidence("u1", sign, strength, source, "it saw so", at))

    def is_drained(self) -> bool:
        return self.board.units["u1"].drained

    def verdict(self) -> Verdict:
        return self.board.units["u1"].case.verdict


def test_the_first_word_is_believed_and_tells_engine_and_proof_of_life() -> None:
    router = Router()
    router.hear(10.0, engine="sglang")
    assert router.verdict() is Verdict.UP
    assert [flip.evidence.reason for flip in router.flips] == ["gate a: up at its gate"]
    router.drain("u1", True)
    router.hear(20.0, age_s=0.25, life_age_s=1.0, engine="sglang")
    state = router.board.units["u1"]
    assert (state.engine, state.progress_at, state.answered_at) == ("sglang", 18.75, 19.75)
    assert router.is_drained(), "what its own operator drained stays so"


def test_a_unit_that_is_gone_by_its_gate_and_answers_all_the_same_does_not_go_down_again_and_again() -> None:
    """Its gate may be slow, or cut off from Redis, or about to end."""
    router = Router()
    router.hear(0.0)
    for at in (5.0, 6.0, 7.0):
        router.see(GONE, at)
        router.sees(Sign.GOOD, Strength.STRONG, "canary", at + 0.5)
    assert [flip.after for flip in router.flips[1:]] == [Verdict.DOWN, Verdict.PROBATION, Verdict.UP]
    router.hear(8.0)
    router.see(GONE._replace(gone_since=9.0), 9.0)
    assert router.verdict() is Verdict.DOWN


@pytest.mark.parametrize("first", [Verdict.UP, Verdict.DOWN, Verdict.STARTING, Verdict.SUSPECT])
def test_the_verdict_follows_that_of_its_gate(first: Verdict) -> None:
    for then in (Verdict.UP, Verdict.SUSPECT, Verdict.DOWN):
        router = Router()
        router.hear(10.0, verdict=first, reason="r")
        router.hear(11.0, verdict=then, reason="it says why")
        assert router.verdict() is then
        flips = len(router.flips)
        router.hear(12.0, verdict=then, reason="it says why")
        assert len(router.flips) == flips
    assert router.flips[-1].evidence.reason.startswith("down at its gate")


@pytest.mark.parametrize("unready", [Verdict.STARTING, Verdict.PROBATION])
def test_a_unit_that_its_gate_does_not_use_yet_gets_nothing(unready: Verdict) -> None:
    router = Router()
    router.hear(10.0, verdict=unready)
    assert router.verdict() is Verdict.STARTING
    router.hear(11.0)
    router.hear(12.0, verdict=unready)
    assert not router.board.units["u1"].is_usable()


def test_a_unit_found_out_of_reach_comes_back_by_the_gates_own_look() -> None:
    """A suspicion ends with a word of its gate that is newer."""
    router = Router()
    router.hear(10.0)
    router.sees(Sign.BAD, Strength.STRONG, "request", 10.2)
    router.hear(10.3, age_s=0.2)
    assert router.verdict() is Verdict.SUSPECT
    router.hear(10.5)
    assert router.verdict() is Verdict.UP
    router.sees(Sign.BAD, Strength.FATAL, "request", 11.1)
    for at in (11.2, 11.4, 20.0):
        router.hear(at)
        assert router.verdict() is Verdict.DOWN
    for at in (20.1, 20.2):
        router.sees(Sign.GOOD, Strength.STRONG, "canary", at)
    assert router.verdict() is Verdict.UP


def test_a_unit_started_anew_evicts_and_other_epochs_of_the_same_incarnation_do_not() -> None:
    router = Router()
    for at, epoch, gate in ((10.0, "e1,f1", "a"), (11.0, "f1", "b"), (11.1, "f1,e1", "b")):
        router.hear(at, epoch=epoch, gate=gate, gate_url=f"http://{gate}:1")
    router.hear(11.2)
    lease = router.board.open("u1", Ask(), 11.2, retry=False)
    router.hear(11.3, epoch="e1,f1")
    assert {flip.after for flip in router.flips} == {Verdict.UP}
    assert [each.evicted for each in router.board.units["u1"].leases] == [False]
    router.hear(12.0, epoch="e2,f1", verdict=Verdict.STARTING)
    assert lease.evicted
    assert router.verdict() is Verdict.STARTING
    router.hear(13.0, epoch="e2,f1")
    assert router.verdict() is Verdict.UP


def test_reached_by_another_way_it_is_the_same_unit() -> None:
    router = Router()
    router.hear(10.0)
    before = router.board.units["u1"]
    before.drained = True
    router.hear(20.0, gate="b", gate_url="http://b:1")
    state = router.board.units["u1"]
    assert state is not before
    assert (state.costs, state.step_times) == (before.costs, before.step_times)
    assert (state.drained, state.up_since) == (True, 10.0)


def test_a_hold_at_its_gate_is_one_here_and_what_no_gate_holds_on_to_is_down() -> None:
    router = Router()
    router.hear(1.0)
    router.hear(2.0, hold=HoldKind.PAUSED)
    state = router.board.units["u1"]
    assert (router.verdict(), state.is_usable()) == (Verdict.UP, False)
    router.hear(3.0)
    assert state.hold is not None
    assert state.hold.ended_at == 3.0
    assert len(router.flips) == 1
    router.see(GONE, 5.0)
    assert router.verdict() is Verdict.DOWN
    assert "sends no more reports" in router.flips[-1].evidence.reason
    router.hear(6.0)
    assert router.verdict() is Verdict.UP


def test_a_drain_at_its_gate_is_one_here_and_ends_with_it() -> None:
    router = Router()
    router.hear(10.0)
    for at in (11.0, 11.2):
        router.see(FleetUnit("u1", TimedView(WHOLE_VIEW, 11.0), 0, drained_by="a"), at)
        assert router.is_drained()
    router.hear(12.0)
    assert not router.is_drained()
    router.hear(13.0, stopping=True)
    assert router.is_drained()
    kinds = [(action.kind, action.by) for action in router.told]
    assert kinds == [("drain", "gate a"), ("undrain", "gate a"), ("drain", "gate a")]


def test_load_is_what_others_have_there() -> None:
    router = Router()
    router.hear(10.0)
    leases = [router.board.open("u1", Ask(), at, retry=False) for at in (10.1, 10.2, 10.9)]
    # Written at 10.5: two of the seven are ours, the third was sent since.
    router.hear(11.0, age_s=0.5, in_flight=7, running=4, waiting=1)
    state = router.board.units["u1"]
    assert (state.foreign, state.in_flight) == (5, len(leases))
    assert state.load is not None
    assert (state.load.running, state.load.waiting, state.load.at) == (4, 3, 10.5)
