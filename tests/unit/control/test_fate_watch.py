"""One event for units that fail together, once it is known which."""

from __future__ import annotations

from cellgate.proxy.control.comparisons import FateWatch
from cellgate.proxy.observe.events import Action
from cellgate.router.board import Board
from tests.unit.router.test_shared_fate import board, fall, rise


class Told:
    """Keeps what is added."""

    def __init__(self) -> None:
        self.actions: list[Action] = []

    def add(self, action: Action) -> None:
        self.actions.append(action)


def watch(found: Board) -> tuple[FateWatch, Told]:
    told = Told()
    return FateWatch(found, told), told  # type: ignore[arg-type]


def test_a_switch_is_named_once_when_its_last_unit_has_been_down_for_a_while() -> None:
    found = board(a=("z/s1",), b=("z/s1",), c=("z/s1",), d=("z/s2",))
    look, told = watch(found)
    fall(found, "a", "b")
    for now in range(5):
        look.tick(float(now))
    assert told.actions == [], "one unit under it works"
    fall(found, "c")
    for now in range(5, 30):
        look.tick(float(now))
    assert [action.kind for action in told.actions] == ["shared_fate"]
    assert told.actions[0].detail.startswith("all 3 units with a node under z/s1 are DOWN: a, b, c;")


def test_a_switch_that_is_lost_again_is_named_again() -> None:
    found = board(a=("z/s1",), b=("z/s1",), c=("z/s2",))
    look, told = watch(found)
    for begin in (0, 100):
        fall(found, "a", "b")
        for now in range(begin, begin + 10):
            look.tick(float(now))
        rise(found, "a", "b")
        look.tick(float(begin + 20))
    assert len(told.actions) == 2
