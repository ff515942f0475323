"""What is kept of split requests: as much as there are units, however long the gate runs."""

from __future__ import annotations

from typing import Any

from cellgate.proxy.control.watches import LinkWatch
from cellgate.router.board import Board
from cellgate.router.nouns import ORPHAN_S, ORPHANED, TRANSFERRED, Fleet, Rules, SplitStep, Unit


class Site:
    """A gate whose units come and go, on a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.board = Board(Rules())
        events: Any = self
        self.watch = LinkWatch(self.board, events, lambda: self.now)

    def add(self, *_: object) -> None:
        """An event."""

    def have(self, *names: str) -> None:
        units = tuple(Unit(name, "c", f"http://{name}") for name in names)
        self.board.configure(Fleet(units=units), self.now)


def test_units_that_are_gone_are_not_counted_for_ever() -> None:
    site = Site()
    for number in range(50):
        site.have("p", f"d{number}")
        site.watch.apply(SplitStep(TRANSFERRED, "p", f"d{number}", tokens=1, seconds=0.1))
    assert list(site.watch.pairs) == [("p", "d49")]
    assert site.watch.steps == {("p", "d49", TRANSFERRED): 1}


def test_orphans_are_forgotten_also_where_nobody_reads_the_metrics() -> None:
    site = Site()
    site.have("p", "d")
    for _ in range(100):
        site.watch.apply(SplitStep(ORPHANED, "p", "d"))
        site.now += ORPHAN_S / 2
    assert len(site.watch._orphaned_at) <= 3
