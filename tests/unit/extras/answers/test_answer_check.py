"""What is known of those that agree saves the comparison, and changes nothing that follows."""

from __future__ import annotations

from typing import cast
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from cellgate.extras.answers.answer_check import AnswerCheck
from cellgate.extras.answers.answer_pairs import AnswerPairs
from cellgate.proxy.observe.events import EventLog
from cellgate.router.nouns import Answered, AnswerToken, Evidence, Unit
from tests.unit.router.fleets import board_up

UNITS, QUESTIONS = 5, ("completions m", "chat m")
TEXTS = ("a", "b", "")
TIED = AnswerToken("a", -0.5, (("b", -0.6),))
"""Like either, which are not like each other."""

Step = tuple[int, str, str, bool]
"""A unit, the question, what it says ("tie": as likely one as the other), and whether it restarts before."""
steps = st.lists(
    st.tuples(
        st.integers(0, UNITS - 1),
        st.sampled_from(QUESTIONS[:1] * 4 + QUESTIONS[1:]),
        st.sampled_from(("a",) * 4 + ("tie",) + TEXTS),
        st.sampled_from((False,) * 4 + (True,)),
    ),
    max_size=40,
)


def play(steps: list[Step], *, compares_all: bool) -> list[object]:
    """All that follows from these answers, one each minute."""
    board = board_up(*(Unit(f"u{n}", "c", f"http://u{n}", ("m",)) for n in range(UNITS)))
    found: list[object] = []

    def observe(evidence: Evidence) -> None:
        found.append(evidence)
        board.observe(evidence)

    events = EventLog(lambda: 0.0, 64, lambda *_: None)
    asked: list[object] = []
    check = AnswerCheck(board, events, observe, lambda *who: asked.append(who), cast(AnswerPairs, None))
    with (
        patch.object(check, "_question", lambda state, claim, _: found.append((state.unit.name, claim))),
        patch.object(check, "_is_agreed", (lambda *_: False) if compares_all else check._is_agreed),
    ):
        for number, (unit, question, text, restarts) in enumerate(steps):
            state = board.units[f"u{unit}"]
            if restarts:
                state.answers = None
            tokens = (TIED,) if text == "tie" else (AnswerToken(text, -0.5, (("z", -5.0),)),) if text else ()
            check.take(state, Answered(state.unit.name, question, tokens, 60.0 * number))
            found.append([(each.answers, each.urgency) for each in board])
    return [*found, asked, check.counts, check._reported, events.last()]


@given(steps)
def test_who_says_what_all_agreed_with_is_judged_as_if_it_were_compared(steps: list[Step]) -> None:
    assert play(steps, compares_all=False) == play(steps, compares_all=True)
