"""When the gate takes itself to be cut off, and what it never holds."""

from __future__ import annotations

import pytest

from cellgate.router.board import Board
from cellgate.router.nouns import Evidence, Fleet, Rules, Sign, Strength, Unit, Verdict
from cellgate.router.outliers import UNREACHABLE_S, is_cut_off, is_unreachable

RULES = Rules()
NOW = 100.0


def board(units: int) -> Board:
    """So many units, all UP and heard of at NOW."""
    made = Board(RULES)
    made.configure(Fleet(units=tuple(Unit(n, "cell", f"http://{n}") for n in "abcdefgh"[:units])), 0.0)
    for name, state in made.units.items():
        made.observe(Evidence(name, Sign.GOOD, Strength.STRONG, "canary", "one token", NOW))
        state.answered_at = NOW
    return made


def fail(made: Board, name: str, at: float, strength: Strength = Strength.STRONG) -> None:
    """Two failures: suspicion, then the fall."""
    for _ in range(2):
        made.observe(Evidence(name, Sign.BAD, strength, "canary", "no answer in time", at))


def panics(made: Board) -> bool:
    return made.panic_at is not None


def down(made: Board) -> str:
    return "".join(state.unit.name for state in made if state.case.verdict is Verdict.DOWN)


def test_a_unit_is_mute_once_nothing_has_answered_for_longer_than_probes_pause() -> None:
    assert not is_unreachable(NOW, NOW + UNREACHABLE_S)
    assert is_unreachable(NOW, NOW + UNREACHABLE_S + 0.01)


@pytest.mark.parametrize(
    ("mute", "rotation", "panics"), [(2, 2, False), (3, 3, True), (3, 6, False), (4, 6, True)]
)
def test_panic_needs_three_and_more_than_half(mute: int, rotation: int, panics: bool) -> None:
    assert is_cut_off(mute, rotation, RULES) is panics


def test_when_nothing_answers_any_more_the_rotation_is_held_and_let_go_after_30_s() -> None:
    made = board(4)
    for name in made.units:
        fail(made, name, NOW + 3.0)
    assert down(made) == ""
    assert made.panic_at == NOW + 3.0
    made.tick(NOW + 20.0)
    assert made.panic_at == NOW + 3.0
    fail(made, "a", NOW + 32.9)
    assert down(made) == ""
    fail(made, "a", NOW + 33.0)
    assert down(made) == "a"


def test_panic_ends_when_units_answer_again() -> None:
    made = board(3)
    fail(made, "a", NOW + 3.0)
    assert panics(made)
    made.units["b"].answered_at = NOW + 4.0
    made.tick(NOW + 4.0)
    assert not panics(made)
    fail(made, "a", NOW + 4.0)
    assert down(made) == "a"


def test_a_unit_of_which_anything_answers_is_never_held() -> None:
    made = board(4)
    made.units["a"].answered_at = NOW + 2.9
    fail(made, "a", NOW + 3.0)
    fail(made, "b", NOW + 3.0)
    assert down(made) == "a"


@pytest.mark.parametrize("units", [1, 2])
def test_few_units_are_never_held(units: int) -> None:
    made = board(units)
    for name in made.units:
        fail(made, name, NOW + 3.0)
    assert down(made) == "ab"[:units]


def test_fatal_evidence_is_never_held() -> None:
    made = board(4)
    fail(made, "a", NOW + 3.0, Strength.FATAL)
    assert down(made) == "a"


def test_a_unit_that_is_held_is_asked_again_at_once() -> None:
    made = board(3)
    fail(made, "a", NOW + 3.0)
    consequence = made.observe(
        Evidence("a", Sign.BAD, Strength.STRONG, "canary", "no answer in time", NOW + 4.0)
    )
    assert consequence == (None, (), True)
