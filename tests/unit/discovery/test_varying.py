"""Addresses that DNS leaves out: kept as long as they may be there, and gone in bounded time if not."""

from __future__ import annotations

from random import Random

import pytest

from cellgate.proxy.discovery.base import Found
from cellgate.proxy.discovery.varying import LEAST, MOST, VaryingAnswers
from cellgate.router.nouns import Unit


def found(*numbers: int) -> Found:
    return Found(tuple(Unit(f"u{n}", "c", f"http://u{n}") for n in sorted(numbers)))


def names(answer: Found) -> set[str]:
    return {unit.name for unit in answer.units}


@pytest.mark.parametrize(("there", "named"), [(8, 4), (8, 2), (8, 7), (100, 50), (100, 10)])
def test_units_of_which_each_answer_names_a_random_part_stay_and_a_removed_one_goes(
    there: int, named: int
) -> None:
    lost = 0
    for seed in range(80 // there + 1):
        rng, answers = Random(seed), VaryingAnswers()
        known: set[str] = set()
        for number in range(400):
            before, known = known, names(answers.take(found(*rng.sample(range(there), named)), ()))
            # The first few answers have yet to show that others come back.
            lost += len(before - known) if number > MOST else 0
        assert len(known) == there
        rest = min(named, there - 1)
        for _ in range(MOST):
            known = names(answers.take(found(*rng.sample(range(1, there), rest)), ()))
        assert "u0" not in known
    # One in a thousand answers may be wrong.
    assert lost <= 5


def test_where_nothing_ever_comes_back_what_is_left_out_goes_after_three_answers() -> None:
    answers = VaryingAnswers()
    for _ in range(20):
        assert names(answers.take(found(1, 2), ())) == {"u1", "u2"}
    for _ in range(LEAST - 1):
        assert names(answers.take(found(1), ())) == {"u1", "u2"}
    assert names(answers.take(found(1), ())) == {"u1"}


def test_what_is_replaced_by_others_goes_at_once() -> None:
    answers = VaryingAnswers()
    answers.take(found(1, 2), ())
    assert names(answers.take(found(2, 3), ())) == {"u2", "u3"}
    assert names(answers.take(found(4), ())) == {"u4"}


def test_what_does_not_pass_its_probes_goes_once_it_is_left_out_and_may_come_back() -> None:
    answers = VaryingAnswers()
    answers.take(found(1, 2), ())
    assert names(answers.take(found(1, 2), {"u2"})) == {"u1", "u2"}, "it is named"
    assert names(answers.take(found(1), {"u2"})) == {"u1"}
    assert names(answers.take(found(1, 2), ())) == {"u1", "u2"}
