"""Why a unit went DOWN: a wedge is what answers its health check and generates nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cellgate.router.board import Board, DownCause, down_cause
from cellgate.router.judge import ANSWER_SOURCE
from cellgate.router.nouns import Case, Evidence, Fleet, Rules, Sign, Strength, Unit, Verdict
from cellgate.router.opinions import REFUSING_SOURCE

SUSPECT = Case(Verdict.SUSPECT, 10.0)
NO_TOKEN = Evidence("a1", Sign.BAD, Strength.STRONG, "canary", "no token in 2 s", 12.0)
REFUSED = replace(NO_TOKEN, strength=Strength.FATAL, reason="connection refused")
HEALTHY = Evidence("a1", Sign.GOOD, Strength.WEAK, "readiness", "HTTP 200", 11.0)


@pytest.mark.parametrize(
    ("evidence", "health", "cause"),
    [
        (NO_TOKEN, HEALTHY, DownCause.WEDGED),
        (replace(NO_TOKEN, source=REFUSING_SOURCE), HEALTHY, DownCause.REFUSES_REQUESTS),
        (NO_TOKEN, None, DownCause.UNHEALTHY),
        (NO_TOKEN, replace(HEALTHY, at=9.0), DownCause.UNHEALTHY),
        (NO_TOKEN, replace(HEALTHY, sign=Sign.BAD), DownCause.UNHEALTHY),
        (REFUSED, HEALTHY, DownCause.REFUSED),
        (replace(REFUSED, source="agent", node="a1-1"), HEALTHY, DownCause.NODE),
        (replace(REFUSED, source=ANSWER_SOURCE), HEALTHY, DownCause.WRONG_ANSWERS),
    ],
)
def test_the_cause_is_what_was_seen(evidence: Evidence, health: Evidence | None, cause: DownCause) -> None:
    assert down_cause(SUSPECT, evidence, health) is cause


def test_a_flip_to_down_has_a_cause_and_no_other_flip_has() -> None:
    board = Board(Rules())
    board.configure(Fleet(units=(Unit("a1", "a", "http://127.0.0.1:8101"),)), 0.0)
    passed = replace(NO_TOKEN, sign=Sign.GOOD, at=1.0)
    causes = {}
    for evidence in (passed, NO_TOKEN, replace(HEALTHY, at=13.0), replace(NO_TOKEN, at=14.0)):
        flip = board.observe(evidence).flip
        if flip is not None:
            causes[flip.after] = flip.cause
    assert causes == {Verdict.UP: None, Verdict.SUSPECT: None, Verdict.DOWN: DownCause.WEDGED}
