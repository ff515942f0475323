"""Whose answer to the known prompt is wrong, and who only differs."""

from __future__ import annotations

import math

import pytest

from cellgate.router.judge import (
    AnswerRecord,
    AnswerTokens,
    condemned,
    doubted,
    is_implausible,
    is_right,
    is_same,
    recorded,
    why_wrong,
)
from cellgate.router.nouns import Answered, AnswerToken

TOLERANCE = 0.25
PARIS, ROME = "Paris is old", "Rome is older"


def said(text: str, *, next_one: str = "z", lead: float = 3.0, logprob: float | None = -0.5) -> AnswerTokens:
    behind = ((next_one, -0.5 - lead), ("y", -9.0))
    return tuple(AnswerToken(word, logprob, behind) for word in text.split())


class Fleet:
    """Units that answer, one after another, and what is decided."""

    def __init__(self, **texts: str) -> None:
        self.records: dict[str, AnswerRecord] = {}
        self.out: set[str] = set()
        self.now = 0.0
        for unit, text in texts.items():
            self.say(unit, said(text))

    def say(self, unit: str, tokens: AnswerTokens) -> AnswerRecord:
        self.now += 1.0
        answered = Answered(unit, "completions tiny", tokens, self.now)
        record = self.records[unit] = recorded(self.records, answered, TOLERANCE)
        return record

    def round(self, **texts: str) -> list[str]:
        """Each says a text; the units that are wrong are out from then on."""
        for unit, text in texts.items():
            self.say(unit, said(text))
        return self.judge()

    def judge(self) -> list[str]:
        found = []
        for unit in self.records:
            if unit not in self.out and why_wrong(unit, self.records, self.out, TOLERANCE):
                self.out.add(unit)
                self.records[unit] = condemned(self.records[unit], TOLERANCE)
                found.append(unit)
        return found

    def may_return(self, unit: str) -> bool:
        return is_right(unit, self.records, self.out, TOLERANCE)


def test_rounding_makes_no_other_answer() -> None:
    assert is_same(said("a b", logprob=-0.5), said("a b", logprob=-0.7), TOLERANCE)
    assert not is_same(said("a b", logprob=-0.5), said("a b", logprob=-0.8), TOLERANCE)


def test_another_token_counts_only_where_it_was_no_tie() -> None:
    assert not is_same(said("a b"), said("a c"), TOLERANCE)
    assert is_same(said("a b", next_one="c", lead=0.5), said("a c d", logprob=-0.75), TOLERANCE)
    assert is_same(said("a c d", logprob=-0.75), said("a b", next_one="c", lead=0.5), TOLERANCE)
    assert not is_same(said("a b", next_one="c", lead=0.6), said("a c", logprob=-1.0), TOLERANCE)
    assert not is_same((AnswerToken("b", -0.5),), (AnswerToken("c", -0.5),), TOLERANCE)


def test_a_tie_explains_only_the_tokens_that_were_tied() -> None:
    assert not is_same(said("a b", next_one="c", lead=0.1), said("a d"), TOLERANCE)
    assert not is_same(said("a b", next_one="c", lead=0.1), said("a c", logprob=-2.0), TOLERANCE)


def test_where_all_that_is_shown_is_tied_any_other_token_may_be() -> None:
    flat = (AnswerToken("a", -4.0, (("b", -4.1), ("c", -4.2))),)
    assert is_same(flat, (AnswerToken("q", -4.0, (("r", -4.1), ("s", -4.2))),), TOLERANCE)


def test_an_answer_that_ends_sooner_is_another_one_unless_that_was_a_tie() -> None:
    assert not is_same(said("a b"), said("a"), TOLERANCE)
    assert is_same(said("a b", lead=0.1), said("a", lead=0.1), TOLERANCE)


@pytest.mark.parametrize("broken", [(), said("a", logprob=math.nan), said("a", logprob=None)])
def test_no_answer_and_no_numbers_are_like_nothing(broken: AnswerTokens) -> None:
    assert not is_same(broken, said("a"), TOLERANCE)
    assert not is_same((), (), TOLERANCE)
    assert not is_same(said("a", logprob=math.nan), said("a", logprob=math.nan), TOLERANCE)


def test_units_that_agree_are_well() -> None:
    fleet = Fleet(a=PARIS, b=PARIS, c=PARIS)
    assert fleet.round(a=PARIS, b=PARIS, c=PARIS) == []
    assert not any(record.differing for record in fleet.records.values())


def test_of_three_the_one_that_never_agreed_is_wrong_after_two_answers() -> None:
    fleet = Fleet(a=PARIS, b=PARIS, c=ROME)
    assert fleet.judge() == []
    assert fleet.round(a=PARIS, b=PARIS, c=ROME) == ["c"]


def test_the_order_of_the_first_answers_does_not_matter() -> None:
    fleet = Fleet(c=ROME, a=PARIS, b=PARIS)
    assert fleet.round(c=ROME) == []
    assert fleet.round(a=PARIS, b=PARIS, c=ROME) == ["c"]


def test_old_answers_of_others_prove_nothing() -> None:
    fleet = Fleet(a=PARIS, b=PARIS, c=PARIS)
    assert fleet.round(c=ROME) == []
    assert fleet.round(c=ROME) == []
    assert fleet.round(a=PARIS, b=PARIS) == ["c"]


def test_one_odd_answer_is_forgiven() -> None:
    fleet = Fleet(a=PARIS, b=PARIS, c=PARIS)
    fleet.round(a=PARIS, b=PARIS, c=ROME)
    assert fleet.round(a=PARIS, b=PARIS, c=PARIS) == []
    assert fleet.round(a=PARIS, b=PARIS, c=ROME) == []


def test_two_that_never_agreed_both_stay_and_are_known_to_differ() -> None:
    fleet = Fleet(a=PARIS, b=ROME)
    for _ in range(5):
        assert fleet.round(a=PARIS, b=ROME) == []
    assert all(record.is_confirmed for record in fleet.records.values())


@pytest.mark.parametrize("other", [PARIS, "London is large"])
def test_of_two_the_one_that_changed_is_wrong(other: str) -> None:
    fleet = Fleet(a=PARIS, b=other)
    fleet.round(a=PARIS, b=other)
    found = fleet.round(a=ROME, b=other) + fleet.round(a=ROME, b=other)
    assert found == ["a"]


def test_when_all_change_together_nobody_is_wrong() -> None:
    for units in ("ab", "abc", "abcd"):
        fleet = Fleet(**dict.fromkeys(units, PARIS))
        for _ in range(3):
            assert fleet.round(**dict.fromkeys(units, ROME)) == []
        assert not any(record.differing for record in fleet.records.values())


def test_a_unit_alone_that_changed_stays_and_is_known_to_differ() -> None:
    fleet = Fleet(a=PARIS)
    for _ in range(3):
        assert fleet.round(a=ROME) == []
    assert fleet.records["a"].is_confirmed


def test_halves_that_disagree_both_stay() -> None:
    fleet = Fleet(a=PARIS, b=PARIS, c=ROME, d=ROME)
    for _ in range(4):
        assert fleet.round(a=PARIS, b=PARIS, c=ROME, d=ROME) == []


def test_weights_updated_one_unit_after_another_never_take_out_more_than_a_minority() -> None:
    for size in range(2, 8):
        names = [f"u{number}" for number in range(size)]
        fleet = Fleet(**dict.fromkeys(names, PARIS))
        texts = dict.fromkeys(names, PARIS)
        for name in names:
            texts[name] = ROME
            for _ in range(3):
                fleet.round(**texts)
                fleet.out -= {unit for unit in fleet.out if fleet.may_return(unit)}
                assert 2 * len(fleet.out) <= size - (size % 2), (size, fleet.out)
        assert fleet.out == set()


def test_only_one_unit_is_out_for_its_own_past() -> None:
    fleet = Fleet(a=PARIS, b="Oslo is cold", c="Bern is small")
    fleet.round(a=ROME, b="Oslo is cold", c="Bern is small")
    assert fleet.round(a=ROME, b="Oslo is cold", c="Bern is small") == ["a"]
    fleet.round(a=ROME, b="Kiev is far", c="Bern is small")
    assert fleet.round(a=ROME, b="Kiev is far", c="Bern is small") == []


def test_without_log_probabilities_three_answers_and_all_others_are_needed() -> None:
    fleet = Fleet()

    def rounds(**texts: str) -> list[str]:
        for unit, text in texts.items():
            fleet.say(unit, (AnswerToken(text),))
        return fleet.judge()

    one_against_two = {"a": PARIS, "b": PARIS, "c": ROME}
    assert rounds(**one_against_two) == rounds(**one_against_two) == []
    assert rounds(**one_against_two) == ["c"]
    fleet.records, fleet.out = {}, set()
    split = {"a": PARIS, "b": PARIS, "c": PARIS, "d": "Oslo", "e": ROME}
    assert [rounds(**split) for _ in range(5)] == [[]] * 5


def test_a_wrong_unit_returns_when_it_agrees_with_the_others_and_not_before() -> None:
    fleet = Fleet(a=PARIS, b=PARIS, c=ROME)
    assert fleet.round(a=PARIS, b=PARIS, c=ROME) == ["c"]
    fleet.round(c=ROME)
    assert not fleet.may_return("c")
    del fleet.records["b"]
    assert not fleet.may_return("c"), "it was wrong from the start, so its own past is no reference"
    fleet.round(c=PARIS)
    assert fleet.may_return("c")


def test_a_wrong_unit_returns_with_what_it_said_before() -> None:
    fleet = Fleet(a=PARIS, b="London is large")
    fleet.round(a=ROME, b="London is large")
    assert fleet.round(a=ROME, b="London is large") == ["a"]
    assert not fleet.may_return("a")
    fleet.round(a=PARIS)
    assert fleet.may_return("a")


def test_a_restarted_unit_is_compared_with_the_majority_if_there_is_one() -> None:
    fleet = Fleet(a=PARIS, b=PARIS)
    fleet.out = {"c"}
    fleet.say("c", said(ROME))
    assert not fleet.may_return("c")
    fleet.say("c", said(PARIS))
    assert fleet.may_return("c")
    alone = Fleet(a=PARIS)
    alone.out = {"c"}
    alone.say("c", said(ROME))
    assert alone.may_return("c")


def test_corrupted_requests_count_as_one_answer_that_differs() -> None:
    fleet = Fleet(a=PARIS, b=PARIS, c=PARIS)
    fleet.records["c"] = doubted(fleet.records["c"], fleet.now)
    assert fleet.round(a=PARIS, b=PARIS, c=ROME) == ["c"]
    fleet = Fleet(a=PARIS, b=PARIS, c=PARIS)
    fleet.records["c"] = doubted(fleet.records["c"], fleet.now)
    assert fleet.round(a=PARIS, b=PARIS, c=PARIS) == []


def test_another_question_begins_anew() -> None:
    fleet = Fleet(a=PARIS)
    record = recorded(fleet.records, Answered("a", "chat tiny", said(ROME), 9.0), TOLERANCE)
    assert (record.first, record.differing) == (said(ROME), 0)


def test_another_build_may_say_what_was_likely_and_not_what_nobody_expected() -> None:
    old = (AnswerToken("Paris", -0.1, (("The", -2.5),)), AnswerToken(".", -0.1, ((",", -3.0),)))
    rounded = (AnswerToken("The", -0.9, (("Paris", -1.0),)), AnswerToken("city", -0.1, (("town", -2.0),)))
    nonsense = (AnswerToken("zz", -0.1, (("qq", -2.0),)),)
    assert not is_implausible(old, [old])
    assert not is_implausible(rounded, [old])
    assert is_implausible(nonsense, [old])
    assert is_implausible((old[0], AnswerToken("!", -0.1, (("?", -2.0),))), [old])
    assert not is_implausible(nonsense, [old, nonsense])


def test_text_alone_says_nothing_of_another_build() -> None:
    assert not is_implausible((AnswerToken("other"),), [(AnswerToken("text"),)])
    assert not is_implausible((AnswerToken("zz", -0.1, (("qq", -2.0),)),), [(AnswerToken("text"),), ()])
    assert not is_implausible((), [])
