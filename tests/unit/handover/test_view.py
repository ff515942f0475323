"""What a successor is told of units, and what it makes of it."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from cellgate.proxy.control.stored_responses import StoredResponses
from cellgate.proxy.handover import VERSION, InheritedView, drained, frame_document, view_of
from cellgate.router.board import Board
from cellgate.router.nouns import Evidence, Fleet, Rules, Sign, Strength, Unit, Verdict

NOW = 100.0


def board(*names: str, host: str = "h") -> Board:
    made = Board(Rules())
    made.configure(Fleet(units=tuple(Unit(name, "c", f"http://{host}/{name}") for name in names)), NOW)
    return made


def say(
    on: Board, name: str, sign: Sign, strength: Strength = Strength.STRONG, epoch: str | None = None
) -> None:
    on.observe(Evidence(name, sign, strength, "canary", "so it is", NOW + 1.0, epoch))


def handed(on: Board) -> InheritedView:
    return InheritedView(orjson.loads(orjson.dumps(view_of(on))))


def successor(*names: str) -> tuple[Board, InheritedView]:
    """A board that has taken over what is known of these units."""
    new, view = board(*names), handed(known())
    view.apply(new)
    return new, view


def known() -> Board:
    """Units a (up), b (down), c (suspect) and d (up, drained); e is starting."""
    old = board(*"abcde")
    for name in "abcd":
        say(old, name, Sign.GOOD, epoch="e1")
    say(old, "b", Sign.BAD, Strength.FATAL)
    say(old, "c", Sign.BAD)
    old.drain("d", drained=True)
    old.units["a"].models = frozenset({"llama"})
    old.units["a"].engine = "vllm"
    return old


def test_what_was_known_is_known() -> None:
    old, new = known(), board(*"abcde")
    handed(old).apply(new)
    for name in "abcde":
        before, after = old.units[name], new.units[name]
        assert after.case.verdict is before.case.verdict
        assert (after.case.since, after.case.epochs, after.case.restarted) == (
            before.case.since,
            before.case.epochs,
            before.case.restarted,
        )
        assert (after.models, after.engine, after.drained) == (before.models, before.engine, before.drained)
        assert (after.progress_at, after.up_since) == (before.progress_at, before.up_since)
    assert new.units["b"].case.because is not None
    assert new.units["b"].case.because.reason == "so it is"
    assert drained(new) == ["d"]
    for epoch, verdict in (("e1", Verdict.UP), ("e2", Verdict.STARTING)):
        say(new, "a", Sign.GOOD, epoch=epoch)
        assert new.units["a"].case.verdict is verdict, "the same incarnation is no other one"


def test_what_is_configured_wins_over_what_was_found_out() -> None:
    old, new = known(), board()
    new.configure(Fleet(units=(Unit("a", "c", "http://h/a", models=("mine",), engine="sglang"),)), NOW)
    handed(old).apply(new)
    assert (new.units["a"].models, new.units["a"].engine) == (frozenset({"mine"}), "sglang")
    new = board("a", host="elsewhere")
    handed(old).apply(new)
    assert new.units["a"].case.verdict is Verdict.STARTING, "at another address it is another unit"


def test_what_the_successor_has_found_out_since_is_not_undone() -> None:
    """A unit may be discovered, and judged, before the view is applied to it."""
    old, new = known(), board("a")
    say(new, "a", Sign.BAD, Strength.FATAL)
    new.units["a"].case = replace(new.units["a"].case, since=old.units["a"].case.since + 1.0)
    handed(old).apply(new)
    assert (old.units["a"].case.verdict, new.units["a"].case.verdict) == (Verdict.UP, Verdict.DOWN)


def test_a_view_of_another_version_says_nothing() -> None:
    new = board("a")
    view = InheritedView(view_of(known()) | {"version": VERSION + 1})
    view.apply(new)
    assert new.units["a"].case.verdict is Verdict.STARTING
    assert view.is_warm(new, may_come=True)


@pytest.mark.parametrize("is_down", [False, True])
def test_it_is_warm_once_it_has_heard_of_every_unit_that_is_used(is_down: bool) -> None:
    new, view = successor(*"abcde")
    assert not view.is_warm(new, may_come=False)
    new.units["a"].answered_at = NOW
    assert not view.is_warm(new, may_come=False), "c is used as well"
    if is_down:
        say(new, "c", Sign.BAD, Strength.FATAL)
    else:
        new.units["c"].answered_at = NOW
    assert view.is_warm(new, may_come=False)


def test_one_that_uses_no_unit_is_not_warm_where_the_gate_before_used_one() -> None:
    new, view = successor("z")
    assert not view.is_warm(new, may_come=False)
    say(new, "z", Sign.GOOD)
    new.units["z"].answered_at = NOW
    assert view.is_warm(new, may_come=False)
    new, view = board("a"), handed(board("a"))
    view.apply(new)
    assert view.is_warm(new, may_come=False), "where none was used there is nothing to wait for"


@pytest.mark.parametrize("may_come", [True, False])
def test_units_that_are_yet_to_be_discovered_are_waited_for(may_come: bool) -> None:
    new, view = successor("a")
    new.units["a"].answered_at = NOW
    assert view.is_warm(new, may_come=may_come) is not may_come
    new.configure(Fleet(units=tuple(Unit(name, "c", f"http://h/{name}") for name in "ac")), NOW)
    view.apply(new)
    assert new.units["c"].case.verdict is Verdict.SUSPECT
    new.units["c"].answered_at = NOW
    assert view.is_warm(new, may_come=may_come)


def test_stored_responses_reach_the_successor() -> None:
    old, new = StoredResponses(board("a"), keyed=True), StoredResponses(board("a"), keyed=True)
    old.made("resp_1", "a", "alice")
    told = orjson.loads(frame_document({"stored": list(old)})[4:])
    new.inherit(told["stored"])
    assert list(new) == list(old)
