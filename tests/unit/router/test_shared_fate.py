"""What units that fail together share."""

from __future__ import annotations

from typing import Any

import pytest

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


@pytest.mark.parametrize(
    ("places", "fallen", "causes"),
    [
        # The narrowest place that explains all is named.
        (
            [("z/s1/l1", "z/s1/l2"), ("z/s1/l1",), ("z/s1/l2",), ("z/s2/l9",)],
            "abc",
            [(("z", "s1"), ("a", "b", "c"))],
        ),
        # One where a unit works is not to blame, nor is one where nobody else is, nor none.
        ([("z/l1",)] * 3, "ab", []),
        ([("z/l1",), ("z/l2",)], "a", []),
        ([(), ()], "ab", []),
        # Two switches are two fates.
        (
            [("z/l1",), ("z/l1",), ("z/l2",), ("z/l2",), ("z/l3",)],
            "abcd",
            [(("z", "l1"), ("a", "b")), (("z", "l2"), ("c", "d"))],
        ),
    ],
)
def test_units_that_fail_together_share_a_place(
    places: list[tuple[str, ...]], fallen: str, causes: list[Any]
) -> None:
    found = board(**dict(zip("abcde", places, strict=False)))
    fall(found, *fallen)
    assert shared_fates(found) == [CommonCause(*cause) for cause in causes]
