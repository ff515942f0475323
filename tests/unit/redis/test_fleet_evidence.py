"""What the word of a unit's gate does to the Board of a fleet's router."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cellgate.proxy.observe.events import Action
from cellgate.proxy.redis.fleet import FleetEvidence, FleetUnit, TimedView, found
from cellgate.proxy.redis.reports import UnitReport
from cellgate.router import health
from cellgate.router.board import Board, Consequence, Flip
from cellgate.router.nouns import Ask, Evidence, Fleet, HoldKind, Rules, Sign, Strength, Verdict

VIEW = UnitReport("u1", "east", "a", Verdict.UP, "http://u1:1", gate_url="http://a:1", epoch="e1")
GONE = FleetUnit("u1", TimedView(VIEW, 0.0), 0, gone_since=5.0)


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
        self.see(FleetUnit("u1", TimedView(replace(VIEW, **changes), at - age_s), in_flight), at)

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


def test_the_first_word_is_believed() -> None:
    router = Router()
    router.hear(10.0)
    assert router.verdict() is Verdict.UP
    (flip,) = router.flips
    assert flip.evidence.reason == "gate a: up at its gate"


@pytest.mark.parametrize("first", [Verdict.UP, Verdict.DOWN, Verdict.STARTING, Verdict.SUSPECT])
@pytest.mark.parametrize(
    ("then", "becomes"),
    [(Verdict.UP, Verdict.UP), (Verdict.SUSPECT, Verdict.SUSPECT), (Verdict.DOWN, Verdict.DOWN)],
)
def test_the_verdict_follows_that_of_its_gate(first: Verdict, then: Verdict, becomes: Verdict) -> None:
    router = Router()
    router.hear(10.0, verdict=first, reason="r")
    router.hear(11.0, verdict=then, reason="it says why")
    assert router.verdict() is becomes
    flips = len(router.flips)
    router.hear(12.0, verdict=then, reason="it says why")
    assert len(router.flips) == flips
    if becomes is Verdict.DOWN:
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
    router = Router()
    router.hear(10.0)
    router.sees(Sign.BAD, Strength.FATAL, "request", 10.1)
    for at in (10.2, 10.4, 20.0):
        router.hear(at)
        assert router.verdict() is Verdict.DOWN
    for at in (20.1, 20.2):
        router.sees(Sign.GOOD, Strength.STRONG, "canary", at)
    assert router.verdict() is Verdict.UP


def test_a_suspicion_ends_with_a_word_that_is_newer() -> None:
    router = Router()
    router.hear(10.0)
    router.sees(Sign.BAD, Strength.STRONG, "request", 10.2)
    router.hear(10.3, age_s=0.2)
    assert router.verdict() is Verdict.SUSPECT
    router.hear(10.5)
    assert router.verdict() is Verdict.UP


def test_a_unit_started_anew_evicts() -> None:
    router = Router()
    router.hear(10.0)
    lease = router.board.open("u1", Ask(), 10.0, retry=False)
    router.hear(11.0, epoch="e1,f1")
    assert [open_.evicted for open_ in router.board.units["u1"].leases] == [False]
    router.hear(12.0, epoch="e2,f1", verdict=Verdict.STARTING)
    assert lease.evicted
    assert router.verdict() is Verdict.STARTING
    router.hear(13.0, epoch="e2,f1")
    assert router.verdict() is Verdict.UP


def test_another_gate_reads_other_epochs_of_the_same_incarnation() -> None:
    router = Router()
    router.hear(10.0, epoch="e1,f1")
    router.hear(11.0, epoch="f1", gate="b", gate_url="http://b:1")
    router.hear(12.0, epoch="f1,e1", gate="b", gate_url="http://b:1")
    assert {flip.after for flip in router.flips} == {Verdict.UP}


def test_reached_by_another_way_it_is_the_same_unit() -> None:
    router = Router()
    router.hear(10.0)
    before = router.board.units["u1"]
    before.drained = True
    router.hear(20.0, gate="b", gate_url="http://b:1")
    state = router.board.units["u1"]
    assert state is not before
    assert (state.costs, state.step_times, state.drained, state.up_since) == (
        before.costs,
        before.step_times,
        True,
        10.0,
    )


def test_what_no_gate_holds_on_to_is_down_and_back_when_one_does() -> None:
    router = Router()
    router.hear(4.0)
    router.see(GONE, 5.0)
    assert router.verdict() is Verdict.DOWN
    assert "sends no more reports" in router.flips[-1].evidence.reason
    router.hear(6.0)
    assert router.verdict() is Verdict.UP


def test_a_drain_at_its_gate_is_one_here_and_ends_with_it() -> None:
    router = Router()
    router.hear(10.0)
    fleet_unit = FleetUnit("u1", TimedView(VIEW, 11.0), 0, drained_by="a")
    for at in (11.0, 11.2):
        router.see(fleet_unit, at)
        assert router.is_drained()
    router.hear(12.0)
    assert not router.is_drained()
    router.hear(13.0, stopping=True)
    assert router.is_drained()
    assert [(action.kind, action.by) for action in router.told] == [
        ("drain", "gate a"),
        ("undrain", "gate a"),
        ("drain", "gate a"),
    ]


def test_what_its_own_operator_drained_stays_so() -> None:
    router = Router()
    router.hear(10.0)
    router.drain("u1", True)
    router.hear(11.0)
    assert router.is_drained()


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


def test_the_engine_is_the_one_behind_the_gate() -> None:
    router = Router()
    router.hear(10.0, engine="sglang")
    assert router.board.units["u1"].engine == "sglang"


def test_proof_of_life_comes_along() -> None:
    router = Router()
    router.hear(10.0)
    router.hear(20.0, age_s=0.25, life_age_s=1.0)
    state = router.board.units["u1"]
    assert (state.progress_at, state.answered_at) == (18.75, 19.75)


def test_a_hold_at_its_gate_is_one_here_until_that_says_it_is_over() -> None:
    router = Router()
    router.hear(10.0)
    router.hear(11.0, hold=HoldKind.PAUSED)
    state = router.board.units["u1"]
    assert (router.verdict(), state.is_usable()) == (Verdict.UP, False)
    router.hear(12.0)
    assert state.hold is not None
    assert state.hold.ended_at == 12.0
    assert len(router.flips) == 1
