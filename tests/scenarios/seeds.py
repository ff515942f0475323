"""How many seeds a scenario is played with: one in `make test`, all of them in `make test-all`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

IN_EVERY_RUN = 1


def seeds(numbers: Sequence[int]) -> list[object]:
    """Parameters of a test, by seed. All but the first bear the mark `nightly`."""
    rest = [pytest.param(number, marks=pytest.mark.nightly) for number in numbers[IN_EVERY_RUN:]]
    return [*numbers[:IN_EVERY_RUN], *rest]
