"""Who is taken to end units, and who is not: by who was there when they died."""

from __future__ import annotations

from typing import Any

import pytest

from cellgate.router.nouns import Ask, Unit
from cellgate.router.poison import (
    AT_ONCE_S,
    COMMITTED_S,
    FALL_S,
    MEMORY_S,
    RAN_S,
    SETTLED_S,
    SHOWN_S,
    SLACK_TOKENS,
    SPACE_S,
    UNSHOWN_S,
    Ban,
    Bans,
    Ledger,
    Loss,
    PromptVerdict,
)
from cellgate.router.unit_state import Lease
from tests.unit.router.fleets import board_of

POISON, X, Y, Z = 1, 2, 3, 4


class Scene:
    """A ledger, and units that die. `fates` are what became of each that was there, in the end."""

    def __init__(self, limit: int = 4096) -> None:
        self.full = 0
        self.ledger = Ledger(limit, self._reached)
        self.now = 1000.0

    def _reached(self) -> None:
        self.full += 1

    def dies(
        self,
        unit: str,
        *died: int,
        survive: tuple[int, ...] = (),
        lived_s: float = 0.1,
        works: bool = True,
        place: str = "",
        **more: Any,
    ) -> list[PromptVerdict]:
        """A unit breaks these requests, not those that `survive`; what becomes of each. `more` is of Loss."""
        self.now += 5.0
        there = [*died, *survive]
        times = self.now - lived_s, self.now
        losses = [Loss(unit, place or unit, each, "m", *times, **more) for each in died]
        return [self.ledger.lost(loss, lambda: there, works=works) for loss in losses]

    def settle(self) -> None:
        self.now += 2 * SETTLED_S

    def lease(self, unit: str, fingerprint: int) -> Lease:
        """Give a unit to one that has met a death."""
        board = board_of(Unit(unit, "c", "http://u:1"), at=self.now)
        lease = board.open(unit, Ask(fingerprint=fingerprint), self.now, retry=False)
        self.ledger.placed(self.ledger.records[fingerprint], lease)
        return lease


def test_who_was_alone_at_both_of_two_deaths_ends() -> None:
    """Deaths are counted by what is asked: many clients with one prompt are one, and met one death."""
    scene = Scene()
    assert scene.dies("a", POISON, POISON, X) == [PromptVerdict.MOVES] * 3
    assert scene.dies("b", Z, POISON, POISON) == [PromptVerdict.MOVES, PromptVerdict.ENDS, PromptVerdict.ENDS]


def test_units_that_are_lost_with_their_gate_have_died_once() -> None:
    """A router has them by way of other gates: a killed one breaks what it carried to each of its units."""
    scene = Scene()
    assert scene.dies("a", POISON, place="gate") == [PromptVerdict.MOVES]
    scene.now -= 5.0 - 0.01
    assert scene.dies("b", POISON, lived_s=0.005, place="gate") == [PromptVerdict.MOVES]
    assert scene.dies("c", POISON, place="another gate") == [PromptVerdict.ENDS]


def test_where_two_were_at_both_deaths_both_are_suspects_and_the_third_ends_the_one_that_was_there() -> None:
    scene = Scene()
    scene.dies("a", POISON, X, Y)
    assert scene.dies("b", POISON, X) == [PromptVerdict.SUSPECT, PromptVerdict.SUSPECT]
    assert scene.ledger.records[X].is_suspect
    assert scene.dies("c", POISON, Z) == [PromptVerdict.ENDS, PromptVerdict.MOVES]
    assert not scene.ledger.records[X].ended


def test_a_unit_that_only_cut_one_connection_ended_nobody_else_and_whoever_is_answered_is_innocent() -> None:
    """The other one is there, and lives: once that is seen it is no company."""
    scene = Scene()
    scene.dies("a", POISON, survive=(X,))
    scene.settle()
    assert scene.dies("b", POISON, survive=(Y,)) == [PromptVerdict.ENDS]
    scene.dies("a", Z)
    scene.ledger.answered(Z)
    assert scene.dies("b", Z) == [PromptVerdict.MOVES]


def test_units_that_are_restarted_one_after_another_die_under_requests_of_any_age() -> None:
    """A poisonous one ends units at one point; who was computed for longer before has passed that."""
    scene = Scene()
    # The first ones that break may be young.
    for unit, lives_s in {"a": (0.2, 5.0), "b": (0.2, 9.0), "c": (13.0,), "d": (17.0,)}.items():
        for lived_s in lives_s:
            verdict = scene.dies(unit, POISON, lived_s=lived_s, ran_s=max(lives_s) - 0.4)
            scene.now -= 5.0
            assert verdict == [PromptVerdict.MOVES]
        scene.now += 5.0
    # What was seen at the last one holds for a while, there.
    assert scene.dies("e", POISON, lived_s=13.0, ran_s=12.6) == [PromptVerdict.MOVES]
    scene.now += RAN_S
    assert scene.dies("f", POISON, lived_s=13.0, ran_s=12.6) == [PromptVerdict.ENDS]


@pytest.mark.parametrize(("up_s", "last"), [(60.0, PromptVerdict.ENDS), (4.5, PromptVerdict.MOVES)])
def test_whole_answers_that_end_units_thrice_after_as_long_are_found_where_the_first_unit_was_slow(
    up_s: float, last: PromptVerdict
) -> None:
    """Units that are restarted again and again were up for as long as their oldest request was there."""
    scene = Scene()
    assert scene.dies("a", POISON, lived_s=12.0, ran_s=11.8, up_s=up_s) == [PromptVerdict.MOVES]
    fates = [scene.dies(unit, POISON, lived_s=4.0, ran_s=3.8, up_s=up_s) for unit in "bcd"]
    assert fates == [[PromptVerdict.MOVES], [PromptVerdict.MOVES], [last]]


@pytest.mark.parametrize(
    ("ran_s", "cell"),
    [pytest.param(0.0, "", id="it may have waited there"), pytest.param(8.9, "slow", id="of another speed")],
)
def test_who_was_only_there_for_longer_has_passed_nothing(ran_s: float, cell: str) -> None:
    scene = Scene()
    assert scene.dies("a", POISON, lived_s=3.0) == [PromptVerdict.MOVES]
    assert scene.dies("b", POISON, lived_s=9.0, ran_s=ran_s, cell=cell) == [PromptVerdict.ENDS]


def test_a_stream_that_goes_on_past_the_point_at_which_it_died_is_not_blamed() -> None:
    """One that dies again after the same tokens is, or thrice after as many of each attempt."""
    scene = Scene()
    for number in range(8):
        tokens = number * (SLACK_TOKENS + 2) + number * number
        assert scene.dies(f"u{number}", X, tokens=tokens, shown=tokens) == [PromptVerdict.MOVES]
    for further in (0, 1, SLACK_TOKENS):
        scene = Scene()
        scene.dies("a", POISON, tokens=40)
        assert scene.dies("b", POISON, tokens=40 + further) == [PromptVerdict.ENDS]
    scene = Scene()
    fates = [scene.dies(unit, POISON, tokens=40 * n, shown=40) for n, unit in enumerate("abc", start=1)]
    assert fates == [[PromptVerdict.MOVES], [PromptVerdict.MOVES], [PromptVerdict.ENDS]]


@pytest.mark.parametrize(("tokens", "seconds"), [(0, COMMITTED_S), (3, SHOWN_S)])
def test_a_suspect_is_cleared_once_it_has_shown_tokens_for_long_enough(tokens: int, seconds: float) -> None:
    """Who has come past the death of others is no company of theirs any more."""
    scene = Scene()
    scene.dies("a", POISON, X, tokens=tokens)
    scene.dies("b", POISON, X, tokens=tokens)
    scene.lease("c", X).commit(scene.now)
    scene.ledger.tick(scene.now + 0.9 * seconds)
    assert scene.ledger.suspected() == {"c"}
    scene.ledger.tick(scene.now + seconds)
    assert scene.ledger.suspected() == set()
    assert not scene.ledger.records[X].is_suspect
    assert scene.dies("c", X, POISON, tokens=tokens) == [PromptVerdict.MOVES, PromptVerdict.ENDS]


def test_a_suspect_that_shows_nothing_for_long_keeps_the_others_waiting_no_more_and_is_not_cleared() -> None:
    scene = Scene()
    for unit in "ab":
        scene.dies(unit, X, Y, lived_s=2.0)
    scene.lease("c", X)
    for later_s, suspected in ((4.0, {"c"}), (4.0 + UNSHOWN_S + 0.1, set())):
        scene.ledger.tick(scene.now + later_s)
        assert scene.ledger.suspected() == suspected
    assert scene.ledger.records[X].is_suspect


def test_those_of_one_death_are_spread_over_the_units() -> None:
    scene, units, given = Scene(), {"b", "c", "d"}, []
    scene.dies("a", *range(10, 19))
    for each in range(10, 19):
        given.append(min(units - scene.ledger.crowded(scene.ledger.records[each], units)))
        scene.lease(given[-1], each)
    assert sorted(given) == sorted("bcd" * 3)


def test_three_units_that_die_at_once_are_the_doing_of_a_prompt_that_they_had_in_common_or_nobodys() -> None:
    nobody, scene, fates = Scene(), Scene(), []
    for number, unit in enumerate("abc"):
        nobody.dies(unit, X + number)
        nobody.now -= 5.0 - AT_ONCE_S / 4
        fates.append(scene.dies(unit, POISON, 10 + number)[0])
        scene.now -= 5.0 - AT_ONCE_S / 4
    assert fates == [PromptVerdict.MOVES, PromptVerdict.ENDS, PromptVerdict.ENDS]
    nobody.now += 2 * AT_ONCE_S
    assert nobody.dies("d", X) == [PromptVerdict.MOVES]
    assert not nobody.ledger.records[X].is_suspect


def test_what_breaks_later_with_a_unit_that_died_met_the_same_death_and_what_came_later_another() -> None:
    """A stream is given up a second after its unit is lost."""
    scene = Scene()
    scene.dies("a", POISON, survive=(X,))
    late = scene.now + 1.2
    loss = Loss("a", "a", X, "m", scene.now - 3.0, late, tokens=5)
    assert scene.ledger.lost(loss, lambda: (), works=True) is PromptVerdict.MOVES
    assert scene.ledger.records[X].marks[0].death is scene.ledger.records[POISON].marks[0].death
    scene.now -= 4.5
    assert scene.dies("a", POISON) == [PromptVerdict.ENDS]


@pytest.mark.parametrize(
    ("works", "others", "is_proven"), [(True, False, True), (False, False, True), (False, True, False)]
)
def test_a_prompt_is_proven_if_others_live_or_it_is_alone(works: bool, others: bool, is_proven: bool) -> None:
    """A fleet whose units die of everything (a bad rollout) is not to ban what its users ask."""
    scene = Scene()
    for unit, other in (("a", 10), ("b", 11)):
        scene.dies(unit, POISON, *[other] * others, works=works)
    assert scene.ledger.records[POISON].ended
    assert scene.ledger.is_proven(POISON) is is_proven


def test_an_error_that_an_engine_reports_is_a_death_once_it_is_lost() -> None:
    """Soon after: who got it ends with the second of these engines."""
    late, scene = Scene(), Scene()
    for unit in "ab":
        assert late.dies(unit, POISON, is_loss=False) == [PromptVerdict.MOVES]
    assert late.ledger.fell("a", late.now - 5.0 + 0.5) == []
    assert late.ledger.fell("b", late.now + FALL_S) == []
    assert not late.ledger.records[POISON].ended
    scene.dies("a", POISON, is_loss=False)
    scene.ledger.fell("a", scene.now + 0.5)
    scene.dies("b", POISON, is_loss=False)
    assert scene.ledger.fell("b", scene.now + 0.5) == [POISON]
    assert scene.ledger.is_proven(POISON)


def test_a_third_failure_behind_two_replies_is_waited_for() -> None:
    """The engines of all three may be dying of it, and only the last one is seen to be."""
    scene = Scene()
    for unit in "abc":
        is_last = unit == "c"
        loss = Loss(unit, unit, POISON, "m", scene.now, scene.now, is_loss=False, is_reply=not is_last)
        assert scene.ledger.lost(loss, lambda: (), works=True) is PromptVerdict.MOVES
        assert scene.ledger.records[POISON].is_to_wait(scene.now) is is_last
    assert not scene.ledger.records[POISON].is_to_wait(scene.now + SPACE_S)


def test_who_got_an_error_is_company_to_those_whose_connections_broke_as_the_engine_exited() -> None:
    """Also of one that came to the engine only then."""
    scene = Scene()
    for unit in "ab":
        scene.dies(unit, POISON, is_loss=False, survive=(X,))
        scene.now -= 5.0
        fates = scene.dies(unit, X)
    assert fates == [PromptVerdict.SUSPECT]
    scene = Scene()
    scene.dies("a", X, POISON)
    scene.dies("b", POISON, is_loss=False)
    scene.now -= 4.5
    assert scene.dies("b", X, lived_s=0.3) == [PromptVerdict.SUSPECT]


def test_what_is_kept_is_bounded_and_what_is_long_ago_forgotten() -> None:
    scene = Scene(limit=10)
    for number in range(30):
        scene.dies(f"u{number}", 100 + number)
    assert len(scene.ledger.records) == 10
    assert scene.full == 20
    scene.ledger.tick(scene.now + MEMORY_S + 1.0)
    assert not scene.ledger.records


def test_when_all_units_fall_silent_a_prompt_is_to_blame_only_where_they_do_one_by_one_under_it() -> None:
    """The first one's request moves to the third, which is as silent: it is on two of three."""

    def silent(unit: str, fingerprint: int, at: float) -> PromptVerdict:
        loss = Loss(unit, unit, fingerprint, "m", at - 3.0, at, is_silent=True)
        return ledger.lost(loss, lambda: (), works=True, places=3)

    ledger = Ledger()
    at_once = [("a", 1, 10.0), ("b", 2, 10.1), ("c", 1, 13.0), ("c", 2, 13.0)]
    assert PromptVerdict.ENDS not in [silent(*each) for each in at_once]
    assert not ledger.records[1].is_suspect
    ledger = Ledger()
    one_by_one = [("a", 2, 10.0), ("a", 1, 10.0), ("b", 3, 13.0), ("b", 1, 13.0)]
    assert [silent(*each) for each in one_by_one][-1] is PromptVerdict.ENDS


def test_what_comes_to_a_dead_unit_before_it_is_seen_to_be_dead_has_not_met_a_death() -> None:
    """Who comes from one unit to another that dies in the same instant is believed once."""
    scene = Scene()
    scene.dies("a", POISON, X)
    scene.dies("b", Y)
    late = Loss("b", "b", POISON, "m", scene.now + 0.01, scene.now + 0.02, worked_at=scene.now - 0.01)
    assert scene.ledger.lost(late, lambda: (), works=True) is PromptVerdict.MOVES
    assert not scene.ledger.records[POISON].is_suspect
    scene = Scene()
    scene.dies("a", POISON, lived_s=1.0)
    for unit, fate in (("b", PromptVerdict.MOVES), ("c", PromptVerdict.ENDS)):
        scene.now -= 4.99
        assert scene.dies(unit, POISON, survive=(Y,), lived_s=0.005) == [fate]


def test_a_ban_is_for_its_payer_until_there_are_two() -> None:
    bans = Bans()
    bans.add(Ban(1, "m", 0.0, 100.0, payer="a"))
    assert bans.find(1, 1.0, "a") is not None
    assert bans.find(1, 1.0, "b") is None
    assert bans.add(Ban(1, "m", 1.0, 90.0, payer="b"))
    assert all(bans.find(1, 99.0, payer) is not None for payer in ("a", "b", "c"))
    assert not bans.add(Ban(1, "m", 1.0, 90.0, payer="a")), "it holds for all already"
