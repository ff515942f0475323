"""The memory that all request bodies share."""

from __future__ import annotations

from math import inf

import pytest

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.http.errors import FailureKind
from cellgate.proxy.http.turns import BodyMemory
from tests.wire.door import Door

MIB = 1 << 20


def test_it_gives_what_it_has_and_no_more() -> None:
    memory = BodyMemory(100, 100)
    assert memory.take(60)
    assert not memory.take(41)
    assert memory.used == 60
    assert memory.take(40)
    memory.give(100)
    assert memory.used == 0


def test_who_waits_is_called_once_and_in_order() -> None:
    memory = BodyMemory(100, 100)
    called: list[str] = []
    first, second, gone = (lambda: called.append("first")), (lambda: called.append("second")), lambda: None
    assert memory.take(100)
    for waiter in (first, gone, second, first):
        memory.wait(waiter)
    memory.forget(gone)
    memory.forget(gone)
    assert called == []
    memory.give(1)
    memory.give(1)
    assert called == ["first", "second"]


def test_who_still_lacks_memory_waits_again_in_the_same_order() -> None:
    memory = BodyMemory(100, 100)
    served: list[int] = []

    def wait_for(size: int) -> None:
        def ask() -> None:
            if memory.take(size):
                served.append(size)
            else:
                memory.wait(ask)

        ask()

    assert memory.take(100)
    for size in (50, 60, 30):
        wait_for(size)
    memory.give(50)
    assert served == [50]
    memory.give(50)
    # 60 still finds too little, so 30 goes first.
    assert served == [50, 30]
    memory.give(80)
    assert served == [50, 30, 60]


class Body:
    """One that arrives; it gives back what it holds when it is given up."""

    def __init__(self, memory: BodyMemory, payer: str, size: int, whole_in_s: float = inf) -> None:
        self.payer, self.size, self.is_given_up = payer, size, False
        self._memory, self._whole_in_s = memory, whole_in_s
        self.has_memory = memory.take(size, 0, self)
        if not self.has_memory:
            memory.wait(self._again, payer)

    def whole_in_s(self, now: float) -> float:
        return self._whole_in_s

    def give_up(self) -> None:
        self.is_given_up = True
        self._memory.arrived(self)
        self._memory.give(self.size)

    def _again(self) -> None:
        self.has_memory = self._memory.take(self.size, 0, self)
        if not self.has_memory:
            self._memory.wait(self._again, self.payer)


def test_whoever_holds_most_gives_up_what_comes_slowest_once_another_waits() -> None:
    memory = BodyMemory(256 * MIB, 64 * MIB)
    soon = [Body(memory, "hog", 8 * MIB, whole_in_s=1.0) for _ in range(14)]
    late = [Body(memory, "hog", 8 * MIB, whole_in_s=60.0 + n) for n in range(14)]
    memory.tick(0.0)
    assert not any(body.is_given_up for body in soon + late)
    other = Body(memory, "other", 32 * MIB)
    assert memory.is_short
    memory.tick(0.0)
    assert other.has_memory
    assert [body.is_given_up for body in late] == [False] * 10 + [True] * 4
    assert not any(body.is_given_up for body in soon)
    assert not memory.is_short


def test_nobody_gives_up_anything_for_who_holds_as_much() -> None:
    memory = BodyMemory(256 * MIB, 64 * MIB)
    first = [Body(memory, "first", 64 * MIB), Body(memory, "first", 48 * MIB)]
    second = [Body(memory, "second", 64 * MIB), Body(memory, "second", 48 * MIB)]
    more = Body(memory, "second", 64 * MIB)
    memory.tick(0.0)
    # A share of both is 128 MiB; the second asks for more than that, but holds less.
    assert not any(body.is_given_up for body in first + second)
    assert not more.has_memory


def test_who_holds_little_finds_room_for_a_small_body_whatever_another_one_holds() -> None:
    memory = BodyMemory(256 * MIB, 64 * MIB)
    while Body(memory, "hog", MIB).has_memory:
        pass
    assert Body(memory, "other", 150_000).has_memory
    assert memory.used <= memory.total


def test_a_body_that_is_whole_counts_no_more_for_its_payer() -> None:
    memory = BodyMemory(256 * MIB, 64 * MIB)
    whole = [Body(memory, "hog", 56 * MIB) for _ in range(4)]
    for body in whole:
        memory.arrived(body)
    assert not Body(memory, "other", 32 * MIB).has_memory
    memory.tick(0.0)
    assert not any(body.is_given_up for body in whole)


@pytest.mark.parametrize(
    ("others_wait", "given_s"), [(True, LIMITS.body_stall_s), (False, LIMITS.body_idle_s)]
)
@pytest.mark.parametrize(("every_s", "size"), [(1.5, 1), (0.5, 500), (0.1, 100)])
def test_a_body_that_drips_is_given_up(others_wait: bool, given_s: float, every_s: float, size: int) -> None:
    door = Door()
    door.client.data_received(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 500)
    if others_wait:
        door.memory.wait(lambda: None, "others")
    begun_at = door.time
    while not door.failures:
        door.time += every_s
        door.client.data_received(b"x" * size)
        door.client.tick(door.time)
    assert door.failures[0].kind is FailureKind.BODY_TIMEOUT
    assert f"less than {LIMITS.body_bytes_per_s} bytes a second" in door.failures[0].message
    # Alone it has the time that every body has as well.
    most_s = given_s if others_wait else given_s + door.limits.body_timeout_s
    assert given_s < door.time - begun_at <= most_s + 2 * every_s
    assert door.memory.used == 0


@pytest.mark.parametrize(("every_s", "size"), [(1.5, 3000), (0.1, 150), (5.0, 200_000)])
def test_a_body_that_comes_slowly_but_comes_is_read_to_its_end(every_s: float, size: int) -> None:
    door, whole = Door(), 50_000
    door.client.data_received(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % whole)
    while whole > 0:
        door.time += every_s
        door.client.data_received(b"x" * min(size, whole))
        whole -= size
        door.client.tick(door.time)
    assert not door.failures
    assert len(door.requests) == 1
