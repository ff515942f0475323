"""What an answer to the known prompt costs: what is compared is bounded, however many units there are."""

from __future__ import annotations

from typing import cast

from cellgate.extras.answers.answer_check import AnswerCheck
from cellgate.extras.answers.answer_pairs import AnswerPairs
from cellgate.proxy.observe.events import EventLog
from cellgate.router.nouns import Answered, AnswerToken, Unit
from tests.cost.bench import costs_what_works, counted
from tests.unit.router.fleets import board_up

QUESTION = "completions m"
FEW, MANY = 100, 1000
"""Units; of the first there are more than are compared with each other."""
ROUNDS = 40


def answers(units: int, *, another: bool) -> list[int]:
    """Bytecodes of each answer to a gate of so many units, each after another unit has changed: the same as
    always, or one that nobody has given (`another`).
    """
    board = board_up(*(Unit(f"u{n}", "c", f"http://u{n}", ("m",)) for n in range(units)))
    events = EventLog(lambda: 0.0, 2, lambda *_: None)
    check = AnswerCheck(board, events, board.observe, lambda *_: None, cast(AnswerPairs, None))
    at, found = 1.0, list[int]()
    states = list(board)
    for state in states:
        check.take(state, said(state.unit.name, "a", at := at + 0.001))
    if not another:
        # A start asks all units for the first time.
        states = states[: ROUNDS // 2] * 2
        for state in states[: ROUNDS // 2]:
            state.answers = None
    for number in range(ROUNDS):
        state, at = states[number], at + 60.0
        list(board)[-1 - number].restart_suspected_at = at
        answered = said(state.unit.name, "ab"[another and number % 2], at)
        with counted() as counts:
            check.take(state, answered)
        found.append(counts.total())
    assert check.counts["u0"]["same"] == (2 if another else 3)
    return found


def said(unit: str, text: str, at: float) -> Answered:
    return Answered(unit, QUESTION, (AnswerToken(text, -0.5, (("z", -0.9),)),), at)


def test_an_answer_costs_as_much_with_a_thousand_units_and_the_first_one_as_much_as_others() -> None:
    found = [answers(units, another=False) for units in (FEW, MANY)]
    costs_what_works("an answer as always", *found)
    assert max(found[1]) < 1_000


def test_another_answer_is_compared_with_as_many_as_in_a_small_fleet() -> None:
    costs_what_works("another answer", *(answers(units, another=True) for units in (FEW, MANY)))
