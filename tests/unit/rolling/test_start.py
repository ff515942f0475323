"""How slow a rolled unit is beside its cell."""

from __future__ import annotations

import pytest

from cellgate.proxy.rolling.start import slower_than_cell


@pytest.mark.parametrize(
    ("gap_s", "others_s", "slower"),
    [
        (0.04, (0.01, 0.01), 0.75),
        (0.04, (0.01, 0.0), 0.75),
        (0.019, (0.01, 0.01), 0.0),
        (0.0, (0.01,), 0.0),
        (0.04, (0.0,), 0.0),
        (0.04, (), 0.0),
        (0.005, (0.01,), 0.0),
    ],
)
def test_half_as_fast_is_the_least_that_counts(
    gap_s: float, others_s: tuple[float, ...], slower: float
) -> None:
    assert slower_than_cell(gap_s, others_s) == pytest.approx(slower)
