"""The memory that all request bodies share."""

from __future__ import annotations

from cellgate.proxy.http.turns import BodyMemory


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
