"""Turns: who has the fewest clients takes the next one."""

from __future__ import annotations

from cellgate.proxy.workers.accept_balance import STUCK_MS, Page

NOW = 1000.0


def accept(page: Page, workers: int) -> int:
    """The worker whose turn it is, the first of them, takes one."""
    worker = next(each for each in range(workers) if page.is_next(each, NOW))
    page.take(worker)
    return worker


def test_as_many_go_to_each() -> None:
    page = Page(3)
    for worker in range(3):
        page.enter(worker, 0, NOW)
    assert sorted(accept(page, 3) for _ in range(9)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_who_has_lost_some_gets_the_next_ones() -> None:
    page = Page(2)
    page.enter(0, 0, NOW)
    page.enter(1, 0, NOW)
    for _ in range(10):
        accept(page, 2)
    page.note(1, 2, NOW)
    assert [accept(page, 2) for _ in range(3)] == [1, 1, 1]


def test_among_equals_it_is_the_turn_of_who_took_fewer() -> None:
    page = Page(2)
    page.enter(0, 0, NOW)
    page.enter(1, 0, NOW)
    taken = []
    for _ in range(6):
        taken.append(worker := accept(page, 2))
        page.note(worker, 0, NOW)
    assert taken.count(0) == taken.count(1) == 3


def test_who_does_not_accept_is_waited_for_by_nobody() -> None:
    page = Page(2)
    page.enter(0, 5, NOW)
    assert page.is_next(0, NOW)
    page.enter(1, 0, NOW)
    assert not page.is_next(0, NOW)
    page.leave(1)
    assert page.is_next(0, NOW)


def test_one_that_comes_later_has_not_everything_to_make_up_for() -> None:
    page = Page(2)
    page.enter(0, 0, NOW)
    for _ in range(100):
        page.take(0)
        page.note(0, 0, NOW)
    page.enter(1, 0, NOW)
    taken = []
    for _ in range(10):
        taken.append(worker := accept(page, 2))
        page.note(worker, 0, NOW)
    assert taken.count(0) == taken.count(1) == 5


def test_who_is_stuck_has_no_turn_until_it_moves_again() -> None:
    page = Page(2)
    page.enter(0, 5, NOW)
    page.enter(1, 0, NOW)
    later = NOW + (STUCK_MS + 1) / 1000
    page.note(0, 5, later)
    assert page.is_next(0, later)
    page.note(1, 0, later)
    assert not page.is_next(0, later)


def test_for_how_long_a_process_has_stood_still() -> None:
    page = Page(2)
    for process in (-1, 0, 1):
        assert page.still_s(process, NOW) is None
        page.beat(process, NOW + process)
    assert [page.still_s(process, NOW + 5.0) for process in (-1, 0, 1)] == [6.0, 5.0, 4.0]
    # Its clock may have been read a moment later.
    assert page.still_s(1, NOW) == 0.0
    page.await_beat(0)
    assert page.still_s(0, NOW) is None
    # The milliseconds begin anew after 49 days.
    page.beat(0, 2**32 / 1000 - 1.0)
    assert page.still_s(0, 2**32 / 1000 + 1.0) == 2.0
    assert page.still_s(-1, NOW) == 1.0
    assert page.is_next(0, NOW), "it is apart from whose turn it is"
