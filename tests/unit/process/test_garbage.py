"""Old garbage is collected when memory has doubled, and now and then while nobody waits."""

from __future__ import annotations

import gc
import sys
import weakref

from cellgate.proxy.process.memory import GROWTH, IDLE_S, Garbage


class Memory:
    """So many blocks are in use; a collection leaves `kept` of them. `waiting` requests are in flight."""

    def __init__(self) -> None:
        self.used = self.kept = 1_000
        self.collections = self.looks = self.waiting = 0

    def garbage(self, now: float = 0.0) -> Garbage:
        return Garbage(now, lambda: not self.waiting, lambda: self.used, self.collect)

    def collect(self, oldest: int) -> None:
        if oldest:
            self.used = self.kept
            self.collections += 1
        else:
            self.looks += 1


def test_memory_that_has_doubled_is_looked_through() -> None:
    memory = Memory()
    collector = memory.garbage()
    memory.used = int(GROWTH * 1_000)
    collector.tick(1.0)
    assert memory.collections == 0
    memory.used += 1
    collector.tick(2.0)
    assert memory.collections == 1


def test_streams_that_live_are_not_looked_through_again_and_again() -> None:
    memory = Memory()
    collector = memory.garbage()
    memory.waiting, memory.used, memory.kept = 1, 2_001, 2_001
    for at in range(1, 100):
        collector.tick(float(at))
    assert (memory.collections, memory.looks) == (1, 98)


def test_it_is_looked_for_every_ten_minutes_while_nobody_waits() -> None:
    memory = Memory()
    collector = memory.garbage(5.0)
    for at in range(5, 5 + 3 * int(IDLE_S)):
        collector.tick(float(at))
    assert memory.collections == 2


def test_streams_do_not_stop_for_it_however_long_ago_it_was() -> None:
    memory = Memory()
    collector = memory.garbage()
    memory.waiting = 1
    collector.tick(10 * IDLE_S)
    assert memory.collections == 0
    memory.waiting = 0
    collector.tick(10 * IDLE_S + 1.0)
    assert memory.collections == 1


def test_new_objects_are_looked_at_in_each_tick() -> None:
    """Those that are freed are old, so the interpreter's own count of new ones stays at nothing."""

    class Stream:
        def __init__(self) -> None:
            self.chunks: list[object] = []

    before = gc.get_threshold()
    gc.set_threshold(1_000, 1_000_000_000, 1_000_000_000)
    try:
        streams = [Stream() for _ in range(4_000)]
        gc.collect(1)
        collector = Garbage(0.0, lambda: False)
        for number in range(len(streams)):
            streams[number] = Stream()
        made = len(gc.get_objects(generation=0))
        collector.tick(0.25)
        assert made > 4_000 > 400 > len(gc.get_objects(generation=0))
    finally:
        gc.set_threshold(*before)


def test_a_cycle_that_has_become_old_is_freed() -> None:
    class Link:
        def __init__(self) -> None:
            self.other = self

    before = gc.get_threshold()
    gc.set_threshold(before[0], 1_000_000_000, 1_000_000_000)
    try:
        collector = Garbage(0.0, lambda: True)
        link = Link()
        left = weakref.ref(link)
        gc.collect(0)
        del link
        gc.collect(0)
        assert left() is not None or sys.version_info >= (3, 14)
        collector.tick(IDLE_S)
        assert left() is None
    finally:
        gc.set_threshold(*before)
