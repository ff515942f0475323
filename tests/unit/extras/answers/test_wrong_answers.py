"""Whose answer to the known prompt is wrong, and who only differs."""

from __future__ import annotations

import math

import pytest

from cellgate.extras.answers.wrong_answers import condemned, doubted, is_right, recorded, why_wrong
from cellgate.router.known_answers import AnswerRecord, AnswerTokens, is_implausible, is_same
from cellgate.router.nouns import Answered, AnswerToken

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
        record = self.records[unit] = recorded(self.records, answered)
        return record

    def round(self, **texts: str) -> list[str]:
        """Each says a text; the units that are wrong are out from then on."""
        for unit, text in texts.items():
            self.say(unit, said(text))
        return self.judge()

    def judge(self) -> list[str]:
        found = []
        for unit in self.records:
            if unit not in self.out and why_wrong(unit, self.records, self.out):
                self.out.add(unit)
                self.records[unit] = condemned(self.records[unit])
                found.append(unit)
        return found

    def may_return(self, unit: str) -> bool:
        return is_right(unit, self.records, self.out)


def test_units_that_do_not_agree_with_themselves_are_no_measure_of_others() -> None:
    fleet = Fleet(a=PARIS, b=PARIS, c=PARIS)
    assert fleet.round(b=ROME) == []
    assert fleet.round(b=PARIS, c=PARIS) == [], "it came back by itself"
    assert fleet.round(a=ROME, b=PARIS, c=PARIS) == []
    assert fleet.round(a=ROME, b=PARIS, c=PARIS) == []
    # Where all others agree with themselves, it is wrong.
    steady = Fleet(a=PARIS, b=PARIS, c=PARIS)
    assert steady.round(a=ROME, b=PARIS, c=PARIS) == []
    assert steady.round(a=ROME, b=PARIS, c=PARIS) == ["a"]


TIED = said("a b", next_one="c", lead=0.5)
FLAT = (AnswerToken("a", -4.0, (("b", -4.1), ("c", -4.2))),)
NAN = said("a", logprob=math.nan)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        # Rounding makes no other answer.
        (said("a b", logprob=-0.5), said("a b", logprob=-0.7), True),
        (said("a b", logprob=-0.5), said("a b", logprob=-0.8), False),
        # Another token counts only where it was no tie, and a tie explains only the tokens that were tied.
        (said("a b"), said("a c"), False),
        (TIED, said("a c d", logprob=-0.75), True),
        (said("a c d", logprob=-0.75), TIED, True),
        (said("a b", next_one="c", lead=0.6), said("a c", logprob=-1.0), False),
        ((AnswerToken("b", -0.5),), (AnswerToken("c", -0.5),), False),
        (TIED, said("a d"), False),
        (TIED, said("a c", logprob=-2.0), False),
        # Where all that is shown is tied any other token may be.
        (FLAT, (AnswerToken("q", -4.0, (("r", -4.1), ("s", -4.2))),), True),
        # One that ends sooner is another one unless that was a tie.
        (said("a b"), said("a"), False),
        (said("a b", lead=0.1), said("a", lead=0.1), True),
        # No answer and no numbers are like nothing.
        ((), said("a"), False),
        (NAN, said("a"), False),
        (said("a", logprob=None), said("a"), False),
        ((), (), False),
        (NAN, NAN, False),
    ],
)
def test_answers_are_the_same_but_for_rounding_and_ties(
    one: AnswerTokens, other: AnswerTokens, same: bool
) -> None:
    assert is_same(one, other) is same


def test_of_three_the_one_that_never_agreed_is_wrong_after_two_answers() -> None:
    """In whatever order they come; when all change together nobody is."""
    fleet = Fleet(a=PARIS, b=PARIS, c=ROME)
    assert fleet.judge() == []
    assert fleet.round(a=PARIS, b=PARIS, c=ROME) == ["c"]
    fleet = Fleet(c=ROME, a=PARIS, b=PARIS)
    assert fleet.round(c=ROME) == []
    assert fleet.round(a=PARIS, b=PARIS, c=ROME) == ["c"]
    for units in ("ab", "abc", "abcd"):
        fleet = Fleet(**dict.fromkeys(units, PARIS))
        assert [fleet.round(**dict.fromkeys(units, ROME)) for _ in range(3)] == [[]] * 3
        assert not any(record.differing for record in fleet.records.values())


def test_old_answers_of_others_prove_nothing_and_one_odd_answer_is_forgiven() -> None:
    fleet = Fleet(a=PARIS, b=PARIS, c=PARIS)
    assert fleet.round(c=ROME) == []
    assert fleet.round(c=ROME) == []
    assert fleet.round(a=PARIS, b=PARIS) == ["c"]
    fleet = Fleet(a=PARIS, b=PARIS, c=PARIS)
    for text in (ROME, PARIS, ROME):
        assert fleet.round(a=PARIS, b=PARIS, c=text) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": PARIS, "b": ROME}, {"a": PARIS, "b": ROME}),
        ({"a": PARIS}, {"a": ROME}),
        ({"a": PARIS, "b": PARIS, "c": ROME, "d": ROME},) * 2,
    ],
)
def test_where_there_is_no_majority_all_stay_and_are_known_to_differ(
    before: dict[str, str], after: dict[str, str]
) -> None:
    fleet = Fleet(**before)
    for _ in range(4):
        assert fleet.round(**after) == []
    assert all(record.is_confirmed for record in fleet.records.values())


@pytest.mark.parametrize("other", [PARIS, "London is large"])
def test_of_two_the_one_that_changed_is_wrong_until_it_says_what_it_said_before(other: str) -> None:
    fleet = Fleet(a=PARIS, b=other)
    fleet.round(a=PARIS, b=other)
    found = fleet.round(a=ROME, b=other) + fleet.round(a=ROME, b=other)
    assert found == ["a"]
    assert not fleet.may_return("a")
    fleet.round(a=PARIS)
    assert fleet.may_return("a")


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
    split = {"a": PARIS, "b": PARIS, "c": PARIS, "d": "Oslo", "e": ROME}
    for texts, found in (({"a": PARIS, "b": PARIS, "c": ROME}, [[], [], ["c"]]), (split, [[]] * 5)):
        fleet = Fleet()
        for expected in found:
            for unit, text in texts.items():
                fleet.say(unit, (AnswerToken(text),))
            assert fleet.judge() == expected


def test_a_wrong_unit_returns_when_it_agrees_with_the_others_and_not_before() -> None:
    fleet = Fleet(a=PARIS, b=PARIS, c=ROME)
    assert fleet.round(a=PARIS, b=PARIS, c=ROME) == ["c"]
    fleet.round(c=ROME)
    assert not fleet.may_return("c")
    del fleet.records["b"]
    assert not fleet.may_return("c"), "it was wrong from the start, so its own past is no reference"
    fleet.round(c=PARIS)
    assert fleet.may_return("c")
    # One that has restarted is compared with the majority if there is one.
    for others, text, may in (("ab", ROME, False), ("ab", PARIS, True), ("a", ROME, True)):
        fleet = Fleet(**dict.fromkeys(others, PARIS))
        fleet.out = {"c"}
        fleet.say("c", said(text))
        assert fleet.may_return("c") is may


def test_corrupted_requests_count_as_one_answer_that_differs_and_another_question_begins_anew() -> None:
    for text, found in ((ROME, ["c"]), (PARIS, [])):
        fleet = Fleet(a=PARIS, b=PARIS, c=PARIS)
        fleet.records["c"] = doubted(fleet.records["c"], fleet.now)
        assert fleet.round(a=PARIS, b=PARIS, c=text) == found
    record = recorded(Fleet(a=PARIS).records, Answered("a", "chat tiny", said(ROME), 9.0))
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
    # Text alone says nothing.
    assert not is_implausible((AnswerToken("other"),), [(AnswerToken("text"),)])
    assert not is_implausible(nonsense, [(AnswerToken("text"),), ()])
    assert not is_implausible((), [])
