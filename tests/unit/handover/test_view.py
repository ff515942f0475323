"""What a successor is told of units, and what it makes of it."""

from __future__ import annotations

import orjson
import pytest

from cellgate.proxy.handover import VERSION, InheritedView, drained, view_of
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


def test_the_same_incarnation_is_no_other_one_to_the_successor() -> None:
    old, new = known(), board(*"abcde")
    handed(old).apply(new)
    verdicts = []
    for epoch in ("e1", "e2"):
        say(new, "a", Sign.GOOD, epoch=epoch)
        verdicts.append(new.units["a"].case.verdict)
    assert verdicts == [Verdict.UP, Verdict.STARTING]


def test_a_unit_at_another_address_is_another_unit() -> None:
    new = board("a", host="elsewhere")
    handed(known()).apply(new)
    assert new.units["a"].case.verdict is Verdict.STARTING


def test_what_is_configured_wins_over_what_was_found_out() -> None:
    old, new = known(), board()
    new.configure(Fleet(units=(Unit("a", "c", "http://h/a", models=("mine",), engine="sglang"),)), NOW)
    handed(old).apply(new)
    assert (new.units["a"].models, new.units["a"].engine) == (frozenset({"mine"}), "sglang")


def test_a_view_of_another_version_says_nothing() -> None:
    new = board("a")
    view = InheritedView(view_of(known()) | {"version": VERSION + 1})
    view.apply(new)
    assert new.units["a"].case.verdict is Verdict.STARTING
    assert view.is_warm(new, may_come=True)


def test_it_is_warm_once_it_has_heard_of_every_unit_that_is_used() -> None:
    new = board(*"abcde")
    view = handed(known())
    view.apply(new)
    assert not view.is_warm(new, may_come=False)
    new.units["a"].answered_at = NOW
    assert not view.is_warm(new, may_come=False), "c is used as well"
    new.units["c"].answered_at = NOW
    assert view.is_warm(new, may_come=False)


def test_a_unit_that_the_successor_finds_down_holds_nothing_up() -> None:
    new = board(*"abcde")
    view = handed(known())
    view.apply(new)
    new.units["a"].answered_at = NOW
    say(new, "c", Sign.BAD, Strength.FATAL)
    assert view.is_warm(new, may_come=False)


def test_one_that_uses_no_unit_is_not_warm_where_the_gate_before_used_one() -> None:
    new = board("z")
    view = handed(known())
    view.apply(new)
    assert not view.is_warm(new, may_come=False)
    say(new, "z", Sign.GOOD)
    new.units["z"].answered_at = NOW
    assert view.is_warm(new, may_come=False)


@pytest.mark.parametrize("may_come", [True, False])
def test_units_that_are_yet_to_be_discovered_are_waited_for(may_come: bool) -> None:
    new = board("a")
    view = handed(known())
    view.apply(new)
    new.units["a"].answered_at = NOW
    assert view.is_warm(new, may_come=may_come) is not may_come
    new.configure(Fleet(units=tuple(Unit(name, "c", f"http://h/{name}") for name in "ac")), NOW)
    view.apply(new)
    assert new.units["c"].case.verdict is Verdict.SUSPECT
    new.units["c"].answered_at = NOW
    assert view.is_warm(new, may_come=may_come)


def test_where_no_unit_was_used_there_is_nothing_to_wait_for() -> None:
    old, new = board("a"), board("a")
    view = handed(old)
    view.apply(new)
    assert view.is_warm(new, may_come=False)
