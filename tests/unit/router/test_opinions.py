"""Whose fault an answer is that is not good, and builds."""

from __future__ import annotations

from itertools import accumulate
from random import Random

import pytest

from cellgate.router.equals import ERROR, Comparison, Mending
from cellgate.router.nouns import UNKNOWN_BUILD, Build
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
def test_a_unit_worse_by_half_is_found_and_comes_back_once_it_is_not(worse: float, usual: float) -> None:
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
