"""Requests that follow a stored response go to the unit that has it, or nowhere."""

from __future__ import annotations

from cellgate.proxy.control.plane import RESPONSES_KEPT, StoredResponses
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.router.nouns import Ask, Evidence, Sign, Strength
from tests.unit.router.test_dry_run import NOW, router_of


def stored() -> StoredResponses:
    """Of a board with two units; `resp_1` is of u1."""
    responses = StoredResponses(router_of(2).board)
    responses.made("resp_1", "u1")
    return responses


def test_a_request_goes_to_the_unit_that_has_what_it_follows() -> None:
    asked = stored().bind(Ask(follows="resp_1"))
    assert isinstance(asked, Ask)
    assert asked.unit == "u1"


def test_a_unit_that_has_left_is_a_404_and_one_that_is_down_a_409() -> None:
    responses = stored()
    board = responses._board
    board.observe(Evidence("u1", Sign.BAD, Strength.FATAL, "tcp", "refused", NOW))
    away = responses.bind(Ask(follows="resp_1"))
    assert isinstance(away, Failure)
    assert (away.kind, away.kind.row.status) == (FailureKind.RESPONSE_AWAY, 409)
    responses.made("resp_2", "c")
    gone = responses.bind(Ask(follows="resp_2", unit=""))
    assert isinstance(gone, Failure)
    assert (gone.kind, gone.kind.row.status) == (FailureKind.RESPONSE_GONE, 404)
    assert "c made response resp_2" in gone.message


def test_it_is_news_once_for_each_unit() -> None:
    responses = stored()
    responses.made("resp_2", "c")
    responses.made("resp_3", "c")
    lost = [Ask(follows="resp_2"), Ask(follows="resp_3")]
    assert [responses.newly_lost(ask) for ask in lost] == ["c", ""]
    assert responses.newly_lost(Ask(follows="resp_unknown")) == ""


def test_only_so_many_are_remembered() -> None:
    responses = stored()
    for number in range(RESPONSES_KEPT):
        responses.made(f"resp_more_{number}", "u0")
    forgotten = responses.bind(Ask(follows="resp_1"))
    assert isinstance(forgotten, Ask)
    assert forgotten.unit is None
