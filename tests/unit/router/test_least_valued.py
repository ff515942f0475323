"""The unit that is missed least."""

from __future__ import annotations

from cellgate.router.board import Board
from cellgate.router.nouns import Evidence, Fleet, Rules, Sign, Strength, Unit
from cellgate.router.scaling import least_valued


def board(**blocks: list[int]) -> Board:
    """Usable units that hold these blocks."""
    found = Board(Rules())
    found.configure(Fleet(units=tuple(Unit(name, "c", f"http://{name}") for name in blocks)), 0.0)
    for name, held in blocks.items():
        found.observe(Evidence(name, Sign.GOOD, Strength.STRONG, "canary", "a token", 1.0))
        found.units[name].costs.prefixes.record(held)
    assert all(state.is_usable() for state in found)
    return found


def least(found: Board) -> str | None:
    valued = least_valued(list(found))
    return None if valued is None else valued.unit


def test_it_is_the_one_whose_blocks_others_hold_too() -> None:
    found = board(a=[1, 2, 3], b=[1, 2, 3, 4, 5], c=[4, 5, 6, 7])
    assert least(found) == "a"
    valued = least_valued(list(found))
    assert valued is not None
    assert valued.value_s == 0.0


def test_what_it_is_worth_is_the_prefill_of_what_nobody_else_holds() -> None:
    found = board(a=[1, 2], b=[3, 4, 5])
    valued = least_valued(list(found))
    assert valued is not None
    assert valued.unit == "a"
    assert valued.value_s > 0.0


def test_a_unit_that_does_not_work_goes_first_and_a_drained_one_is_gone() -> None:
    found = board(a=[1], b=[2, 3], c=[4, 5, 6])
    found.observe(Evidence("c", Sign.BAD, Strength.FATAL, "readiness", "refused", 2.0))
    assert least(found) == "c"
    found.drain("c", drained=True)
    assert least(found) == "a"


def test_the_last_one_stays() -> None:
    found = board(a=[1], b=[2])
    found.drain("a", drained=True)
    assert least(found) is None


def test_the_last_one_stays_also_when_it_does_not_work() -> None:
    found = board(a=[1])
    found.observe(Evidence("a", Sign.BAD, Strength.FATAL, "readiness", "refused", 2.0))
    assert least(found) is None
