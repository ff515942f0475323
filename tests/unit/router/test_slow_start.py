"""Which requests a unit gets that has just come up."""

from __future__ import annotations

import pytest

from cellgate.router.board import Board
from cellgate.router.nouns import Ask, Evidence, Fleet, Rules, Sign, Strength, Unit
from cellgate.router.pick import Bounds, find_candidates

NOW = 1000.0
ASK = Ask("m", stream=True, prompt_tokens=100, prompt_bytes=400)
NEVER_BY_CHANCE = 0.99
"""A chance with which a unit in slow start is no candidate."""


@pytest.fixture
def board() -> Board:
    """`a` and `b` have been up for long, `new` came up now."""
    board = Board(Rules())
    units = tuple(Unit(name, "c", f"http://{name}:1", ("m",)) for name in ("a", "b", "new"))
    board.configure(Fleet((), units), 0.0)
    for name, at in (("a", 1.0), ("b", 1.0), ("new", NOW)):
        board.observe(Evidence(name, Sign.GOOD, Strength.STRONG, "canary", "", at))
    board.tick(NOW)
    return board


def considered(board: Board) -> set[str]:
    """Who is a candidate for an ask to which chance gives no unit in slow start."""
    found = find_candidates(board, ASK, NOW, (), Bounds(backlog_s=10.0), chance=NEVER_BY_CHANCE)
    return {row.unit for row in found.rows}


def send(board: Board, *names: str) -> None:
    for name in names:
        board.open(name, ASK, NOW, retry=False)


def test_while_another_unit_is_idle_it_is_considered_by_chance_only(board: Board) -> None:
    assert considered(board) == {"a", "b"}
    send(board, "a")
    assert considered(board) == {"a", "b"}


def test_it_gets_one_request_at_a_time_while_all_others_have_some(board: Board) -> None:
    send(board, "a", "b")
    assert considered(board) == {"a", "b", "new"}
    send(board, "new")
    assert considered(board) == {"a", "b"}


def test_one_that_cools_off_gets_none_even_so(board: Board) -> None:
    send(board, "a", "b")
    board.units["new"].cool_until = NOW + 1.0
    assert considered(board) == {"a", "b"}
