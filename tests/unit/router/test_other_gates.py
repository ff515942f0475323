"""What other gates have at units: what they send meanwhile goes where least is to be computed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.router.board import Board
from cellgate.router.cost import CostTerms
from cellgate.router.cost_model import MEAN_S, UNSEEN_S, Line, OtherGates, RemoteLoad, expected_s
from cellgate.router.nouns import Evidence, Fleet, Load, Rules, Sign, Strength, Unit

law = settings(derandomize=True, deadline=None, max_examples=300)
BEAT_S = 0.25
LINES = st.lists(st.builds(Line, st.floats(0, 1e4), st.floats(0, 1e4)), min_size=1, max_size=20)


def after(told: list[float]) -> float:
    """What counts when these numbers of requests were told one after the other."""
    gates, found = OtherGates(), None
    for beat, in_flight in enumerate(told):
        found = gates.hear(in_flight, beat * BEAT_S)
    assert found is not None
    return found


def lines(*told_s: float) -> list[Line]:
    return [Line(0.0, each) for each in told_s]


# -- prompts to be computed ---------------------------------------------------------------------------------


def test_units_with_little_look_alike_and_a_long_line_stays_apart() -> None:
    idle, other, little, long = expected_s(lines(0.0, 0.0, 0.2, 5.0))
    assert idle == other == little > 0.0
    assert long == pytest.approx(5.0 - UNSEEN_S)


def test_what_this_gate_has_there_fills_a_unit_as_well() -> None:
    with_own, without = expected_s([Line(3.0, 0.0), Line(0.0, 1.0)])
    assert with_own == 0.0
    assert without > UNSEEN_S


def test_where_others_have_nothing_nothing_is_expected() -> None:
    assert expected_s([Line(3.0, 0.0), Line(0.0, 0.0)]) == [0.0, 0.0]


@law
@given(found=LINES)
def test_all_together_it_stays_what_others_have(found: list[Line]) -> None:
    """Up to what units compute meanwhile."""
    expected = expected_s(found)
    told_s = sum(line.told_s for line in found)
    assert all(each >= 0.0 for each in expected)
    assert abs(sum(expected) - told_s) <= UNSEEN_S * len(found) * (1 + 1e-9) + 1e-6 * told_s


@law
@given(found=LINES)
def test_who_has_more_to_compute_is_never_expected_to_have_less(found: list[Line]) -> None:
    whole = [line.own_s + each for line, each in zip(found, expected_s(found), strict=True)]
    order = sorted(range(len(found)), key=lambda place: sum(found[place]))
    for before, behind in pairwise(order):
        assert whole[before] <= whole[behind] + UNSEEN_S + 1e-6 * whole[behind]


@law
@given(told=st.lists(st.floats(0, 1e4), min_size=1, max_size=20))
def test_of_others_alone_the_order_stays(told: list[float]) -> None:
    expected = expected_s(lines(*told))
    order = sorted(range(len(told)), key=told.__getitem__)
    for before, behind in pairwise(order):
        assert expected[before] <= expected[behind] + 1e-9 * expected[behind]


# -- on the board -------------------------------------------------------------------------------------------


def forecasts(told: dict[str, RemoteLoad], *units: Unit) -> list[CostTerms]:
    board = Board(Rules())
    board.configure(Fleet(units=units), 0.0)
    for unit in units:
        board.observe(Evidence(unit.name, Sign.GOOD, Strength.STRONG, "canary", "one token", 1.0))
        board.report(Load(unit.name, 1.25))
        board.units[unit.name].costs.rates.prefill_tokens_s.guess(1000.0)
    board.elsewhere = told
    board.tick(1.25)
    return [state.costs.forecast for state in board.units.values()]


def unit(name: str, model: str = "m") -> Unit:
    return Unit(name, "c", f"http://{name}", models=(model,))


def test_what_others_send_next_is_expected_at_the_idle_unit_of_the_same_model() -> None:
    told = {"a": RemoteLoad(in_flight=9, prefilling=9, uncached_tokens=3000)}
    busy, idle, other = forecasts(told, unit("a"), unit("b"), unit("n", "n"))
    assert busy.foreign_tokens == pytest.approx(3000.0 - UNSEEN_S * 1000.0)
    assert idle.foreign_tokens == pytest.approx(UNSEEN_S * 1000.0)
    assert other.foreign_tokens == 0.0


def test_a_prompt_that_is_to_be_computed_decodes_nothing_yet() -> None:
    told = {"a": RemoteLoad(in_flight=9, prefilling=2, uncached_tokens=3000)}
    assert forecasts(told, unit("a"))[0].foreign_batch == 7.0


# -- sequences that are decoded -----------------------------------------------------------------------------


def test_a_unit_that_is_idle_for_a_moment_does_not_count_as_idle() -> None:
    assert after([8.0] * 100 + [0.0]) > 7.0
    assert after([8.0] * 100 + [0.0] * int(3 * MEAN_S / BEAT_S)) < 1.0


def test_what_lasts_counts_in_full() -> None:
    assert after([8.0]) == 8.0, "the first word as well"
    assert after([0.0] * 100 + [8.0] * int(4 * MEAN_S / BEAT_S)) > 7.5


def test_gates_that_tell_of_nothing_are_forgotten() -> None:
    gates = OtherGates()
    assert gates.hear(None, 0.0) is None
    gates.hear(4.0, 0.0)
    found = [gates.hear(None, 1.0 + second) for second in range(60)]
    assert found[0] is not None
    assert found[-1] is None
    assert gates.hear(4.0, 100.0) == 4.0


@law
@given(told=st.lists(st.floats(0, 1e6), min_size=1))
def test_it_is_never_more_or_less_than_what_was_told(told: list[float]) -> None:
    assert min(told) - 1e-6 <= after(told) <= max(told) + 1e-6
