"""Units that are equals stay, whatever is asked and answered; one that is worse goes, and comes back.

A handful of the scenes of tests/scenarios/equals.py, which plays any number of them.
"""

from __future__ import annotations

import pytest

from tests.scenarios.equals import check, check_mirror

EQUALS = (4, 73)
"""A line again and again, and nothing at all: to clients, and to canaries as well."""
WORSE = (0, 1, 2, 3, 6, 7, 9)


@pytest.mark.parametrize("seed", EQUALS)
def test_equals_are_never_told_apart(seed: int) -> None:
    _, problems, _ = check(seed)
    assert problems == []


@pytest.mark.parametrize("seed", WORSE)
def test_a_unit_that_answers_worse_by_half_goes_and_comes_back(seed: int) -> None:
    _, problems, _ = check_mirror(seed)
    assert problems == []
