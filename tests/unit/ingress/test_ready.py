"""The reason that people and load balancers are told is the present one."""

from __future__ import annotations

from dataclasses import replace

from cellgate.proxy.ingress.reasons import why
from cellgate.router.board import Board
from cellgate.router.nouns import Cell, Evidence, Fleet, Rules, Sign, Strength, Unit

PASSED = Evidence("a", Sign.GOOD, Strength.STRONG, "canary", "one token by chat", 1.0)
REFUSED = Evidence("a", Sign.BAD, Strength.FATAL, "readiness", "connection refused by a:1", 2.0)
TURNED_DOWN = Evidence("a", Sign.BAD, Strength.STRONG, "canary", "the canary was refused: HTTP 401", 3.0)
UNREADY = Evidence("a", Sign.BAD, Strength.STRONG, "readiness", "GET /health: HTTP 500", 2.0)


def told(*evidence: Evidence) -> str:
    """What is said of a unit after this evidence."""
    board = Board(Rules())
    board.configure(Fleet((Cell("c"),), (Unit("a", "c", "http://a:1"),)), 0.0)
    for piece in evidence:
        board.observe(piece)
    return why(board.units["a"])


def test_a_unit_that_is_down_is_down_for_what_is_wrong_now() -> None:
    assert told(PASSED, REFUSED) == "connection refused by a:1 (source readiness)"
    assert told(PASSED, REFUSED, TURNED_DOWN) == "the canary was refused: HTTP 401 (source canary)"


def test_a_unit_that_is_up_is_up_for_its_last_proof() -> None:
    newest = replace(PASSED, reason="one token by completions", at=9.0)
    assert told(PASSED, newest) == "one token by completions (source canary)"


def test_a_unit_that_works_and_calls_itself_unready_says_both() -> None:
    said = told(PASSED, UNREADY, replace(PASSED, at=3.0))
    assert said == "one token by chat (source canary); but its readiness says: GET /health: HTTP 500"


def test_before_the_first_verdict_it_is_said_what_its_canary_was_told() -> None:
    assert told() == "no probe has answered yet"
    neutral = replace(TURNED_DOWN, sign=Sign.NEUTRAL)
    assert told(neutral) == "the canary was refused: HTTP 401 (source canary)"
