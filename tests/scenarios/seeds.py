"""What of a scenario `make test` plays: one seed, and causes in pairs. `make test-all` plays the rest."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest

IN_EVERY_RUN = 1


def seeds(numbers: Sequence[int]) -> list[object]:
    """Parameters of a test, by seed. All but the first bear the mark `nightly`."""
    rest = [pytest.param(number, marks=pytest.mark.nightly) for number in numbers[IN_EVERY_RUN:]]
    return [*numbers[:IN_EVERY_RUN], *rest]


def crossed(*values: Iterable[object]) -> list[object]:
    """Parameters of a test: the values of each list with those of the others. Half of them bear the mark
    `nightly`, as half of a chess board is black: among the rest, any two values of three lists still meet.
    """
    found: list[object] = []
    for square in itertools.product(*map(enumerate, values)):
        marks = [pytest.mark.nightly] if sum(at for at, _ in square) % 2 else []
        found.append(pytest.param(*(value for _, value in square), marks=marks))
    return found
