"""Whose fault an answer is that is not good, whose answer to the known prompt is wrong, and builds."""

from __future__ import annotations

import math
from itertools import accumulate
from random import Random

import pytest

from cellgate.router.equals import ERROR, Comparison, Mending
from cellgate.router.known_answers import (
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
from cellgate.router.nouns import UNKNOWN_BUILD, Answered, AnswerToken, Build
from cellgate.router.opinions import (
    AGAIN,
    BUDGET,
    BUDGET_OF_ALL,
    HANDFUL,
    OPINIONS_MAX,
    Advice,
    Kind,
    Opinions,
    Refusing,
)

CHAT, IMAGES = Kind("m", "/chat"), Kind("m", "/chat", "images")
UNITS = ("a", "b")


def arrive(opinions: Opinions, times: int, kind: Kind = CHAT, size: int = 10) -> tuple[str, ...]:
    """So many requests come; which units the last one is spared."""
    found: tuple[str, ...] = ()
    for _ in range(times):
        found = opinions.arrived(kind, size, UNITS, 1.0)
    return found


def refuse(opinions: Opinions, times: int, kind: Kind = CHAT, size: int = 10) -> list[Refusing]:
    """Unit `a` refuses so many requests that `b` serves: what is found out."""
    found = []
    for _ in range(times):
        arrive(opinions, 1, kind, size)
        opinions.doubt("a", kind, "401", 0, 1.0)
        found.append(opinions.served("a", "b", kind, size, "401", is_fault=True))
        opinions.good("b", kind, size)
    return found


def test_a_unit_that_refuses_what_others_serve_is_spared_it_after_a_handful() -> None:
    opinions = Opinions()
    found = refuse(opinions, HANDFUL)
    assert [each.is_sure for each in found] == [*[False] * (HANDFUL - 1), True]
    assert found[-1] == Refusing(
        "a", "401", " of /chat of m", HANDFUL, HANDFUL, is_apart=True, by="b", arrived=1
    )
    assert found[-1].reason == "refuses what other units serve of /chat of m: 401 (5 of 5)"
    arrive(opinions, 1)  # A trial: it may be mended.
    assert arrive(opinions, 1) == ("a",)


@pytest.mark.parametrize("chance", [0.05, 0.3, 0.5, 0.7, 0.95])
def test_equals_that_refuse_by_chance_are_never_spared_anything_for_long(chance: float) -> None:
    """Whoever is asked first, whatever the chance is: a client may choose both."""
    rng, opinions, sure = Random(1), Opinions(), 0
    for _ in range(4000):
        arrive(opinions, 1)
        if rng.random() >= chance:
            opinions.good("a", CHAT, 10)
            continue
        opinions.doubt("a", CHAT, "401", 0, 1.0)
        if rng.random() < chance:
            opinions.same("a", "b", CHAT, "401", others=0, now=1.0)
        else:
            sure += opinions.served("a", "b", CHAT, 10, "401", is_fault=True).is_sure
            opinions.good("b", CHAT, 10)
    assert sure < 40


@pytest.mark.parametrize("chance", [0.0, 0.01, 0.2, 0.4, 0.5, 0.6, 0.8, 0.99, 1.0])
def test_the_mean_evidence_against_an_equal_is_at_most_one_whatever_the_chance_is(chance: float) -> None:
    mean = 0.0
    for bad in (False, True):
        for other in (False, True):
            comparison = Comparison()
            comparison.add(is_bad=bad, other_is_bad=other)
            share = (chance if bad else 1.0 - chance) * (chance if other else 1.0 - chance)
            mean += share * comparison.evidence
    assert mean <= 1.0 + 1e-9


@pytest.mark.parametrize(("worse", "usual"), [(1.0, 0.0), (0.5, 0.0), (1.0, 0.5), (0.8, 0.3)])
def test_a_unit_that_is_worse_by_half_is_found_and_comes_back_once_it_is_not(
    worse: float, usual: float
) -> None:
    rng, found, pairs = Random(2), 0, 0
    for _ in range(200):
        comparison = Comparison()
        while not comparison.is_over:
            comparison.add(is_bad=rng.random() < worse, other_is_bad=rng.random() < usual)
        found += comparison.is_worse
        pairs += comparison.pairs
        if comparison.is_worse:
            recovery, answers = Mending(comparison), 0
            while not recovery.is_mended:
                recovery.add(is_bad=rng.random() < usual)
                answers += 1
            assert answers < 100
    assert found >= 80
    assert pairs / 200 < 60


def test_equals_are_let_go_after_a_few_pairs_and_are_never_found() -> None:
    rng, pairs = Random(3), 0
    for number in range(2000):
        chance, comparison = number % 11 / 10, Comparison()
        while not comparison.is_over:
            comparison.add(is_bad=rng.random() < chance, other_is_bad=rng.random() < chance)
        assert not comparison.is_worse
        pairs += comparison.pairs
    assert pairs / 2000 < 6
    assert ERROR <= 1e-6


def test_a_unit_that_lacks_a_feature_is_spared_it_alone_and_long_prompts_that_it_refuses() -> None:
    opinions = Opinions()
    arrive(opinions, 20)
    refuse(opinions, 1, IMAGES)
    opinions.good("a", CHAT, 10)
    found = refuse(opinions, HANDFUL, IMAGES)
    assert found[-1].is_sure
    assert found[-2].reason == "refuses what other units serve of /chat of m with images: 401 (5 of 5)"
    arrive(opinions, 1, IMAGES)  # A trial: it may be mended.
    assert arrive(opinions, 1, IMAGES) == ("a",)
    assert arrive(opinions, 1) == ()
    opinions = Opinions()
    refuse(opinions, 1, size=900)
    opinions.good("a", CHAT, 100)
    refuse(opinions, HANDFUL, size=900)
    arrive(opinions, 1, size=900)
    assert [arrive(opinions, 1, size=size) for size in (50, 101)] == [(), ("a",)], "longer than it served"


def test_two_units_that_say_the_same_clear_each_other_and_few_are_asked_again() -> None:
    opinions = Opinions()
    assert opinions.doubt("a", CHAT, "400", 0, 1.0) is Advice.ASK
    assert opinions.same("a", "b", CHAT, "400", others=0, now=1.0)
    arrive(opinions, 1000)
    advice = [opinions.doubt("a", CHAT, "400", 0, 2.0) for _ in range(3 * AGAIN)]
    assert advice.count(Advice.ASK) == 3
    assert arrive(opinions, 1) == ()


def test_of_a_burst_a_few_are_asked_and_the_others_are_held_until_one_has_said_something() -> None:
    opinions = Opinions()
    advice = [opinions.doubt("a", CHAT, "401", 0, 1.0) for _ in range(60)]
    assert (advice.count(Advice.ASK), advice.count(Advice.HOLD)) == (BUDGET, 60 - BUDGET)
    settled = opinions.settled("a", CHAT)
    opinions.served("a", "b", CHAT, 10, "401", is_fault=True)
    assert opinions.settled("a", CHAT) > settled
    assert {opinions.doubt("a", CHAT, "401", 0, 1.0) for _ in range(54)} == {Advice.INSIST}
    # If it is the request, it is shown.
    other = Opinions()
    for _ in range(60):
        other.doubt("a", CHAT, "400", 0, 1.0)
    assert other.same("a", "b", CHAT, "400", others=0, now=1.0)
    assert {other.doubt("a", CHAT, "400", 0, 1.0) for _ in range(5)} == {Advice.SHOW}


def test_so_many_units_are_asked_about_one_request_and_in_vain() -> None:
    assert Opinions().doubt("a", CHAT, "400", OPINIONS_MAX, 1.0) is Advice.SHOW
    opinions = Opinions()
    advice = [opinions.doubt("a", Kind("m", f"/{n}"), "400", 0, 1.0) for n in range(20)]
    assert advice.count(Advice.ASK) == BUDGET


def test_what_one_payer_asks_for_is_known_of_no_other_one_and_spends_nothing_of_others() -> None:
    """Nor does it count for a unit: it may refuse all that others ask for at the same time."""
    opinions = Opinions()
    assert opinions.doubt("a", CHAT, "400", 0, 1.0, "masker") is Advice.ASK
    assert opinions.same("a", "b", CHAT, "400", 0, 1.0, "masker")
    for number in range(200):
        opinions.arrived(CHAT, 10, UNITS, 1.0, "masker")
        opinions.doubt("a", Kind("m", f"/{number}"), "400", 0, 1.0, "masker")
    for _ in range(HANDFUL):
        if opinions.doubt("a", CHAT, "400", 0, 1.0, "masker") is Advice.ASK:
            opinions.same("a", "b", CHAT, "400", 0, 1.0, "masker")
        assert opinions.doubt("a", CHAT, "400", 0, 1.0, "victim") in (Advice.ASK, Advice.INSIST)
        found = opinions.served("a", "b", CHAT, 10, "400", "victim", is_fault=True)
    assert found.is_sure
    # All payers together have a bound as well.
    kinds = [(Kind("m", f"/{n}"), f"payer {n}") for n in range(200)]
    advice = [opinions.doubt("b", kind, "400", 0, 1.0, payer) for kind, payer in kinds]
    assert advice.count(Advice.ASK) <= BUDGET_OF_ALL


def test_a_unit_about_which_nobody_can_be_asked_is_compared_with_its_peers() -> None:
    opinions = Opinions()
    for _ in range(12):
        arrive(opinions, 1)
        opinions.good("b", CHAT, 10)
    found = [each for _ in range(12) if (each := opinions.unasked("a", CHAT, "401", 1.0))]
    assert [each.unit for each in found][:1] == ["a"]
    assert opinions.unasked("b", CHAT, "401", 1.0) is None
    # Units in doubt are not asked about each other until one has served.
    opinions = Opinions()
    for unit in "ab":
        opinions.doubt(unit, CHAT, "401", 0, 1.0)
    assert opinions.unsure(CHAT, "abc", 1.5) == ["a", "b"]
    opinions.good("b", CHAT, 10)
    assert [opinions.unsure(CHAT, "abc", now) for now in (1.5, 9.0)] == [["a"], []]


@pytest.mark.parametrize("others_repeat", [False, True])
def test_one_token_again_and_again_is_looked_at_where_others_do_not_say_so(others_repeat: bool) -> None:
    opinions = Opinions()
    opinions.watching = True
    for prompt in range(10):
        for unit in "abc":
            opinions.good(unit, CHAT, 10)
            if others_repeat and unit != "a":
                opinions.by_rate(unit, CHAT, "one token", prompt, 1.0, has_begun=True)
    found = [opinions.by_rate("a", CHAT, "one token", prompt, 1.0, has_begun=True) for prompt in range(10)]
    assert any(found) is not others_repeat
    again = opinions.by_rate("a", CHAT, "one token", 9, 1.0, has_begun=True)
    assert again is None, "a prompt counts once"


# Whose answer to the known prompt is wrong, and who only differs.

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


# What an engine says that it is, over the answers of an epoch.


def told(*fingerprints: str, version: str = "") -> Build:
    news = [UNKNOWN_BUILD, Build(version=version), *(Build(each) for each in fingerprints)]
    return list(accumulate(news, Build.updated))[-1]


def test_a_build_is_its_fingerprint_or_else_its_version() -> None:
    """A fingerprint that is made up for each answer says nothing; builds are compared by what both tell."""
    assert told("fp", "fp", "", version="1.2").key == "fp"
    assert told(version="1.2").key == "1.2"
    assert told().key == ""
    assert told("fp", "other", "other").key == "other"
    assert told("a", "b", "c").key == told("a", "b", "c", "d", "d", "d").key == ""
    assert told("a", "b", "c", version="1.2") == Build("", "1.2", 2)
    whole, started = Build("vllm-1.2-abc", "1.2"), Build("", "1.2")
    assert not started.differs(whole)
    assert not whole.differs(started)
    assert Build("", "1.3").differs(whole)
    assert Build("vllm-1.2-def", "1.2").differs(whole)
    assert not Build("vllm-1.2-abc").differs(started)
