"""What other gates have at a unit: a moment counts little, what lasts counts in full."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.router.other_gates import MEAN_S, OtherGates, OthersWork

law = settings(derandomize=True, deadline=None, max_examples=100)
BEAT_S = 0.25


def after(told: list[float]) -> float:
    """What counts when these numbers of requests were told one after the other."""
    gates, found = OtherGates(), None
    for beat, in_flight in enumerate(told):
        found = gates.hear(OthersWork(in_flight, 100.0 * in_flight), beat * BEAT_S)
    assert found is not None
    assert found.uncached_tokens == pytest.approx(100.0 * found.in_flight)
    return found.in_flight


def test_a_unit_that_is_idle_for_a_moment_does_not_count_as_idle() -> None:
    assert after([8.0] * 100 + [0.0]) > 7.0
    assert after([8.0] * 100 + [0.0] * int(3 * MEAN_S / BEAT_S)) < 1.0


def test_what_lasts_counts_in_full() -> None:
    assert after([8.0]) == 8.0, "the first word as well"
    assert after([0.0] * 100 + [8.0] * int(4 * MEAN_S / BEAT_S)) > 7.5


def test_gates_that_tell_of_nothing_are_forgotten() -> None:
    gates = OtherGates()
    assert gates.hear(None, 0.0) is None
    gates.hear(OthersWork(4.0, 0.0), 0.0)
    found = [gates.hear(None, 1.0 + second) for second in range(60)]
    assert found[0] is not None
    assert found[-1] is None
    assert gates.hear(OthersWork(4.0, 0.0), 100.0) == OthersWork(4.0, 0.0)


@law
@given(told=st.lists(st.floats(0, 1e6), min_size=1))
def test_it_is_never_more_or_less_than_what_was_told(told: list[float]) -> None:
    assert min(told) - 1e-6 <= after(told) <= max(told) + 1e-6
