"""What HAProxy's agent check is told of a verdict, and to how many load balancers."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.ingress.haproxy import (
    SEEN_S,
    AgentReply,
    Balancers,
    ReplyFormatter,
    ServerState,
    gate_reply,
    unit_reply,
)
from cellgate.router.board import Board
from cellgate.router.nouns import Evidence, Fleet, Rules, Sign, Strength, Unit
from cellgate.router.outliers import Outlier

LINE = re.compile(rb"up ready ([1-9]\d?|100)% maxconn:[1-9]\d*\n|drain\n|down #[ -~]{0,80}\n")
RULES = Rules(slow_start_s=10.0)
LATE = 100.0
"""Long after slow start."""


def board(*units: Unit) -> Board:
    """Units that are all UP since 0."""
    made = Board(RULES)
    made.configure(Fleet(units=units), 0.0)
    for unit in units:
        tell(made, unit.name, Sign.GOOD)
    return made


def unit(name: str, weight: float = 1.0) -> Unit:
    return Unit(name, "c", f"http://{name}", weight=weight, max_in_flight=32)


def tell(on: Board, name: str, sign: Sign, strength: Strength = Strength.STRONG) -> None:
    on.observe(Evidence(name, sign, strength, "canary", "no token in 2 s", 0.0))


def said(on: Board, name: str, now: float = LATE) -> bytes:
    return ReplyFormatter().line(name, unit_reply(on.units[name], now, on), 1)


def test_a_unit_in_good_order() -> None:
    assert said(board(unit("a")), "a") == b"up ready 100% maxconn:32\n"


def test_a_unit_that_has_just_come_up_gets_more_and_more() -> None:
    here = board(unit("a", weight=2.0))
    assert [said(here, "a", at).split()[2] for at in (0.1, 5.0, 10.0)] == [b"10%", b"50%", b"100%"]


def test_a_slow_unit_weighs_less() -> None:
    here = board(unit("a"))
    here.units["a"].outlier = Outlier(0.4)
    assert said(here, "a") == b"up ready 60% maxconn:32\n"


def test_a_suspected_unit_comes_last_but_is_in() -> None:
    here = board(unit("a"))
    tell(here, "a", Sign.BAD)
    assert said(here, "a") == b"up ready 1% maxconn:32\n"


def test_a_unit_that_is_down_or_not_proven_says_why() -> None:
    here = board(unit("a"))
    tell(here, "a", Sign.BAD, Strength.FATAL)
    assert said(here, "a") == b"down #down: no token in 2 s (source canary)\n"
    fresh = Board(RULES)
    fresh.configure(Fleet(units=(unit("b"),)), 0.0)
    assert said(fresh, "b") == b"down #starting: no probe has answered yet\n"


def test_a_drained_unit_is_drained_whatever_else_is_so() -> None:
    here = board(unit("a"))
    here.drain("a", drained=True)
    assert said(here, "a") == b"drain\n"
    tell(here, "a", Sign.BAD, Strength.FATAL)
    assert said(here, "a") == b"drain\n"


def test_whatever_was_said_the_next_good_word_takes_it_back() -> None:
    """Down ends by `up` alone and drain by `ready` alone, and whoever said them may be gone."""
    here, speaker = board(unit("a")), ReplyFormatter()
    state = here.units["a"]
    for stand in ServerState:
        speaker.line("a", AgentReply(stand), 1)
        assert speaker.line("a", unit_reply(state, LATE, here), 1).startswith(b"up ready ")


def test_the_gate_is_what_its_usable_units_are() -> None:
    here = board(unit("a"), unit("b"), unit("c", weight=2.0))
    assert gate_reply(here, LATE, stopping=False) == AgentReply(ServerState.UP, 100, 96)
    tell(here, "c", Sign.BAD, Strength.FATAL)
    assert gate_reply(here, LATE, stopping=False) == AgentReply(ServerState.UP, 50, 64)
    tell(here, "a", Sign.BAD, Strength.FATAL)
    tell(here, "b", Sign.BAD, Strength.FATAL)
    assert (
        ReplyFormatter().line("gate", gate_reply(here, LATE, stopping=False), 1)
        == b"down #0/3 units usable\n"
    )
    assert gate_reply(here, LATE, stopping=True) == AgentReply(ServerState.DRAIN)


def test_small_changes_are_not_worth_a_word() -> None:
    speaker = ReplyFormatter()

    def weight(percent: int) -> int:
        line = speaker.line("a", AgentReply(ServerState.UP, percent, 32), 1)
        return int(line.split()[2].rstrip(b"%"))

    assert [weight(p) for p in (80, 84, 76, 74, 78, 96, 99, 100, 97)] == [
        80,
        80,
        80,
        74,
        74,
        96,
        96,
        100,
        100,
    ]


def test_each_load_balancer_gets_its_part_of_the_places() -> None:
    lines = [
        ReplyFormatter().line("a", AgentReply(ServerState.UP, 100, 32), balancers)
        for balancers in (1, 2, 3, 100)
    ]
    assert [int(line.split(b"maxconn:")[1]) for line in lines] == [32, 16, 10, 1]


@given(
    stand=st.sampled_from(ServerState),
    words=st.lists(st.tuples(st.integers(1, 100), st.integers(1, 10**6), st.integers(1, 500)), min_size=1),
    reason=st.text(),
)
def test_every_line_is_one_that_haproxy_understands(
    stand: ServerState, words: list[tuple[int, int, int]], reason: str
) -> None:
    speaker = ReplyFormatter()
    for percent, places, balancers in words:
        assert LINE.fullmatch(speaker.line("a", AgentReply(stand, percent, places, reason), balancers))


def test_load_balancers_are_counted_by_address_and_name() -> None:
    seen = Balancers()
    for who in ("10.0.0.1 ", "10.0.0.2 ", "10.0.0.1 ", "10.0.0.2 lb2"):
        seen.asked("gate", who, 0.0)
    assert (seen.count("gate", SEEN_S), seen.count("a", SEEN_S)) == (3, 1)
    assert seen.count("gate", SEEN_S + 0.1) == 1


def test_the_load_balancers_that_are_counted_are_bounded() -> None:
    seen = Balancers()
    seen.asked("b", "10.0.0.1 ", 0.0)
    for number in range(3 * LIMITS.balancers):
        seen.asked("a", f"10.0.0.{number} ", 0.0)
    assert seen.count("a", 0.0) == LIMITS.balancers
    assert seen.count("b", 0.0) == 1
