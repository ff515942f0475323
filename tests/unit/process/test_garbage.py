"""Old garbage is collected when memory has grown, and every ten minutes."""

from __future__ import annotations

import gc
import sys
import weakref

from cellgate.proxy.process.garbage import GROWTH, LATEST_S, OldGarbage


class Memory:
    """So many blocks are in use; a collection leaves `kept` of them."""

    def __init__(self) -> None:
        self.used = self.kept = 1_000
        self.collections = 0

    def collect(self) -> None:
        self.used = self.kept
        self.collections += 1


def test_memory_that_has_grown_by_a_quarter_is_looked_through() -> None:
    memory = Memory()
    old = OldGarbage(0.0, lambda: memory.used, memory.collect)
    memory.used = int(GROWTH * 1_000)
    old.tick(1.0)
    assert memory.collections == 0
    memory.used += 1
    old.tick(2.0)
    assert memory.collections == 1


def test_streams_that_live_are_not_looked_through_again_and_again() -> None:
    memory = Memory()
    old = OldGarbage(0.0, lambda: memory.used, memory.collect)
    memory.used = memory.kept = 2_000
    for at in range(1, 100):
        old.tick(float(at))
    assert memory.collections == 1


def test_it_is_looked_for_every_ten_minutes_whatever_the_memory() -> None:
    memory = Memory()
    old = OldGarbage(5.0, lambda: memory.used, memory.collect)
    for at in range(5, 5 + 3 * int(LATEST_S)):
        old.tick(float(at))
    assert memory.collections == 2


def test_a_cycle_that_has_become_old_is_freed() -> None:
    class Link:
        def __init__(self) -> None:
            self.other = self

    before = gc.get_threshold()
    gc.set_threshold(before[0], 1_000_000_000, 1_000_000_000)
    try:
        old = OldGarbage(0.0)
        link = Link()
        left = weakref.ref(link)
        gc.collect(0)
        del link
        gc.collect(0)
        assert left() is not None or sys.version_info >= (3, 14)
        old.tick(LATEST_S)
        assert left() is None
    finally:
        gc.set_threshold(*before)
