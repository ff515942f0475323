"""Whose fault an answer is that is not good."""

from __future__ import annotations

import pytest

from cellgate.router.opinions import AGAIN, HANDFUL, OPINIONS_MAX, PURSE, Advice, Kind, Opinions, Refusing

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
        opinions.doubt("a", kind, size, "401", 0, 1.0)
        found.append(opinions.served("a", kind, size, "401", is_fault=True))
        opinions.good("b", kind, size)
    return [each for each in found if each]


def test_a_unit_that_refuses_what_others_serve_is_out_once_it_is_known_what_is_asked_for() -> None:
    found = refuse(Opinions(), 2 * HANDFUL)
    assert [(each.is_out, each.is_sure) for each in found[:HANDFUL]] == [
        *[(True, False)] * (HANDFUL - 1),
        (False, True),
    ]
    last = found[-1]
    assert last == Refusing("a", "401", " of /chat of m", 2 * HANDFUL, 2 * HANDFUL, is_out=True)
    assert last.reason.startswith("refuses what other units serve: 401 (")


def test_a_unit_that_lacks_a_feature_is_spared_it_alone() -> None:
    opinions = Opinions()
    arrive(opinions, 20)
    refuse(opinions, 1, IMAGES)
    opinions.good("a", CHAT, 10)
    found = refuse(opinions, HANDFUL, IMAGES)
    assert [(each.is_out, each.is_sure) for each in found] == [(False, True)] * 2
    assert found[0].reason == "refuses what other units serve of /chat of m with images: 401 (5 of 5)"
    arrive(opinions, 1, IMAGES)  # A trial: it may be mended.
    assert arrive(opinions, 1, IMAGES) == ("a",)
    assert arrive(opinions, 1) == ()


def test_prompts_longer_than_any_that_it_served_go_to_others() -> None:
    opinions = Opinions()
    refuse(opinions, 1, size=900)
    opinions.good("a", CHAT, 100)
    refuse(opinions, HANDFUL, size=900)
    arrive(opinions, 1, size=900)
    assert [arrive(opinions, 1, size=size) for size in (50, 101)] == [(), ("a",)]


def test_two_units_that_say_the_same_clear_each_other_and_few_are_asked_again() -> None:
    opinions = Opinions()
    assert opinions.doubt("a", CHAT, 10, "400", 0, 1.0) is Advice.ASK
    assert opinions.same("a", "b", CHAT, "400", others=0, now=1.0)
    arrive(opinions, 1000)
    advice = [opinions.doubt("a", CHAT, 10, "400", 0, 2.0) for _ in range(3 * AGAIN)]
    assert advice.count(Advice.ASK) == 3
    assert arrive(opinions, 1) == ()


@pytest.mark.parametrize(("asked", "advice"), [(0, Advice.ASK), (OPINIONS_MAX, Advice.SHOW)])
def test_so_many_units_are_asked_about_one_request(asked: int, advice: Advice) -> None:
    assert Opinions().doubt("a", CHAT, 10, "400", asked, 1.0) is advice


def test_what_opinions_that_change_nothing_cost_is_bounded() -> None:
    opinions = Opinions()
    advice = [opinions.doubt("a", Kind("m", f"/{n}"), 10, "400", 0, 1.0) for n in range(20)]
    assert advice.count(Advice.ASK) == PURSE


def test_a_unit_about_which_nobody_can_be_asked_is_compared_with_its_peers() -> None:
    opinions = Opinions()
    for _ in range(12):
        arrive(opinions, 1)
        opinions.good("b", CHAT, 10)
    found = [each for _ in range(12) if (each := opinions.unasked("a", CHAT, "401", 1.0))]
    assert [each.unit for each in found][:1] == ["a"]
    assert opinions.unasked("b", CHAT, "401", 1.0) is None


@pytest.mark.parametrize(("others_repeat", "is_found"), [(False, True), (True, False)])
def test_one_token_again_and_again_is_a_fault_where_peers_do_not(others_repeat: bool, is_found: bool) -> None:
    opinions = Opinions()
    arrive(opinions, 10)
    opinions.good("c", CHAT, 10)
    opinions.good("b", CHAT, 10)
    if others_repeat:
        for unit in "bc":
            opinions.repeated(unit, CHAT, 10, "one token", 7, 1.0)
    found = [opinions.repeated("a", CHAT, 10, "one token", prompt, 1.0) for prompt in (1, 2)]
    assert [each is not None and each.is_sure for each in found] == [False, is_found]


def test_units_in_doubt_are_not_asked_about_each_other_until_one_has_served() -> None:
    opinions = Opinions()
    for unit in "ab":
        opinions.doubt(unit, CHAT, 10, "401", 0, 1.0)
    assert opinions.unsure(CHAT, "abc", 1.5) == ["a", "b"]
    opinions.good("b", CHAT, 10)
    assert opinions.unsure(CHAT, "abc", 1.5) == ["a"]
    assert opinions.unsure(CHAT, "abc", 9.0) == []
