"""What units that fail together share."""

from __future__ import annotations

from cellgate.router.board import Board
from cellgate.router.health import CommonCause, shared_fates
from cellgate.router.nouns import Cell, Evidence, Fleet, Node, Role, Rules, Sign, Strength, Unit


def board(**places: tuple[str, ...]) -> Board:
    """Units with a node at each of these places."""
    units = []
    for name, spots in places.items():
        nodes = tuple(
            Node(f"{name}-{at}", Role.FOLLOWER if at else Role.LEADER, place=tuple(spot.split("/")))
            for at, spot in enumerate(spots)
        )
        units.append(Unit(name, "c", f"http://{name}", nodes=nodes))
    found = Board(Rules())
    found.configure(Fleet((Cell("c"),), tuple(units)), 0.0)
    return found


def fall(found: Board, *names: str) -> None:
    for name in names:
        found.observe(Evidence(name, Sign.BAD, Strength.FATAL, "canary", "gone", 1.0, "e", None))


def rise(found: Board, *names: str) -> None:
    for name in names:
        for _ in range(2):
            found.observe(Evidence(name, Sign.GOOD, Strength.STRONG, "canary", "well", 2.0, "e", None))


def test_the_narrowest_place_that_explains_all_is_named() -> None:
    found = board(a=("z/s1/l1", "z/s1/l2"), b=("z/s1/l1",), c=("z/s1/l2",), d=("z/s2/l9",))
    fall(found, "a", "b", "c")
    assert shared_fates(found) == [CommonCause(("z", "s1"), ("a", "b", "c"))]


def test_a_place_where_one_unit_works_is_not_to_blame() -> None:
    found = board(a=("z/l1",), b=("z/l1",), c=("z/l1",))
    fall(found, "a", "b")
    assert shared_fates(found) == []


def test_one_unit_shares_its_fate_with_nobody() -> None:
    found = board(a=("z/l1",), b=("z/l2",))
    fall(found, "a")
    assert shared_fates(found) == []


def test_two_switches_are_two_fates() -> None:
    found = board(a=("z/l1",), b=("z/l1",), c=("z/l2",), d=("z/l2",), e=("z/l3",))
    fall(found, "a", "b", "c", "d")
    assert shared_fates(found) == [CommonCause(("z", "l1"), ("a", "b")), CommonCause(("z", "l2"), ("c", "d"))]


def test_units_without_places_say_nothing() -> None:
    found = board(a=(), b=())
    fall(found, "a", "b")
    assert shared_fates(found) == []
