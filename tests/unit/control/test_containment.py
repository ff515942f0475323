"""What containment keeps of units does not outlive them; and what dies with a gate."""

from __future__ import annotations

from typing import Any, cast

from cellgate.proxy.control.containment import Containment
from cellgate.proxy.http.errors import FailureKind
from cellgate.proxy.observe.events import EventLog
from cellgate.router.board import Board, Flip
from cellgate.router.nouns import Ask, Evidence, Fleet, Refusal, Rules, Sign, Strength, Unit, Verdict
from tests.scenarios.day_sizes import sizes

PASSED = Evidence("", Sign.GOOD, Strength.STRONG, "canary", "one token", 1.0)


def test_a_prompt_whose_gate_was_killed_goes_to_another_one() -> None:
    """A router reaches u1 and u2 by way of one gate: with it both are lost, and that is one death."""
    board, now = Board(Rules()), 100.0
    places = {"u1": "http://gate", "u2": "http://gate", "u3": "http://other"}
    board.configure(Fleet(units=tuple(Unit(name, "a", url) for name, url in places.items())), now)
    for state in board:
        board.observe(Evidence(state.unit.name, Sign.GOOD, Strength.STRONG, "canary", "one token", now))
    tried: list[set[str]] = []

    def pick(*given: Any, **_: Any) -> Refusal:
        tried.append(set(given[2]))
        return Refusal.FULL

    events = EventLog(float, 2, log=lambda _level, _line: None)
    contained = Containment(board, pick, events, lambda: now, lambda _: None, answered=lambda _: 0, ban_s=1.0)
    ask = Ask(fingerprint=7)
    for name in ("u1", "u2"):
        lease = board.open(name, ask, now, retry=False)
        contained.broke(lease, FailureKind.CLOSED_EARLY, 0, 0)
    assert contained.bans.find(7, now) is None
    contained.pick(ask, ("u1",), evicted=True, retry=False)
    assert tried == [{"u1", "u2"}, {"u1"}]


def test_what_was_given_up_by_a_time_out_of_ours_makes_no_prompt_poison() -> None:
    """But the request goes to no third unit."""
    board, now = Board(Rules()), 100.0
    board.configure(Fleet(units=tuple(Unit(name, "a", f"http://{name}") for name in "abc")), now)
    events = EventLog(float, 2, log=lambda _level, _line: None)
    nobody = cast("Any", None)
    contained = Containment(board, nobody, events, lambda: now, nobody, answered=lambda _: 9, ban_s=1.0)
    ask = Ask(fingerprint=7)
    tried: list[str] = []
    for name in "ab":
        assert not contained.bars(ask, tried)
        lease = board.open(name, ask, now, retry=False)
        lease.evicted = lease.unit_state.fell_unseen = True
        contained.broke(lease, FailureKind.EVICTED, 0, 0)
        tried.append(name)
    assert contained.bars(ask, tried)
    assert contained.failure(ask, tried).kind is FailureKind.EVICTED
    assert contained.bans.find(7, now) is None
    assert not contained.bars(ask, ()), "whoever asks the same again is not refused"
    contained.tick(now + 1000.0)
    assert not contained.bars(ask, tried)
    assert not contained.watchful


def test_many_requests_of_one_prompt_at_one_unit_that_was_given_up_all_go_to_another() -> None:
    board, now = Board(Rules()), 100.0
    board.configure(Fleet(units=tuple(Unit(name, "a", f"http://{name}") for name in "ab")), now)
    events = EventLog(float, 2, log=lambda _level, _line: None)
    nobody = cast("Any", None)
    contained = Containment(board, nobody, events, lambda: now, nobody, answered=lambda _: 9, ban_s=1.0)
    ask = Ask(fingerprint=7)
    leases = [board.open("a", ask, now, retry=False) for _ in range(4)]
    for lease in leases:
        lease.evicted = lease.unit_state.fell_unseen = True
        contained.broke(lease, FailureKind.CUT, 5, 5)
    assert not contained.bars(ask, ("a",))
    assert not contained.bars(ask, ("b",))


def test_a_thousand_units_that_came_and_went_leave_nothing() -> None:
    board = Board(Rules())
    events = EventLog(float, 2, log=lambda _level, _line: None)
    nobody = cast("Any", None)
    contained = Containment(board, nobody, events, float, nobody, answered=len, ban_s=1.0)
    for number in range(1000):
        name = f"pod-{number}"
        board.configure(Fleet(units=(Unit(name, "a", f"http://{name}"),)), 0.0)
        contained.flipped(Flip(name, "a", Verdict.STARTING, Verdict.UP, 1.0, PASSED))
    assert sizes(contained)["Containment._answered_before"] == 1
