"""Who has the fewest clients takes those that wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.workers.worker import STUCK_MS, Page

NOW = 1000.0


def accept(page: Page, workers: int, waiting: int = 1) -> list[int]:
    """How many of those that wait each worker takes, one worker after the other, until none waits."""
    taken = [0] * workers
    while waiting:
        for worker in range(workers):
            share = min(waiting, page.share(worker, waiting, NOW))
            for _ in range(share):
                page.take(worker)
            taken[worker] += share
            waiting -= share
    return taken


@pytest.mark.parametrize(
    ("clients", "waiting", "taken"),
    [
        ([0, 0], 10, [5, 5]),
        ([0, 0, 0], 9, [3, 3, 3]),
        ([0, 0], 1, [1, 0]),
        ([3, 3], 3, [2, 1]),
        ([10, 2], 3, [0, 3]),
        ([10, 2], 12, [2, 10]),
        ([0, 100, 0], 10, [5, 0, 5]),
        ([7, 5, 6], 0, [0, 0, 0]),
        ([4], 6, [6]),
    ],
)
def test_those_that_wait_make_the_numbers_of_clients_equal(
    clients: list[int], waiting: int, taken: list[int]
) -> None:
    page = Page(len(clients))
    for worker, count in enumerate(clients):
        page.note(worker, count, NOW)
    assert accept(page, len(clients), waiting) == taken


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 200))
def test_nobody_is_left_waiting_and_nobody_is_ahead_by_more_than_one(
    clients: list[int], waiting: int
) -> None:
    page = Page(len(clients))
    for worker, count in enumerate(clients):
        page.note(worker, count, NOW)
    taken = accept(page, len(clients), waiting)
    after = [count + more for count, more in zip(clients, taken, strict=True)]
    assert sum(taken) == waiting
    assert all(count <= min(after) + 1 for count, more in zip(after, taken, strict=True) if more)


def test_all_shares_that_are_taken_at_the_same_moment_are_no_more_than_those_that_wait() -> None:
    page = Page(3)
    for worker, count in enumerate((4, 0, 7)):
        page.note(worker, count, NOW)
    assert sum(page.share(worker, 20, NOW) for worker in range(3)) <= 20


def test_any_of_equals_may_take_the_only_one_that_waits() -> None:
    page = Page(2)
    for worker in range(2):
        page.note(worker, 3, NOW)
    assert [page.share(worker, 1, NOW) for worker in range(2)] == [1, 1]


def test_who_does_not_accept_is_waited_for_by_nobody() -> None:
    page = Page(2)
    page.note(0, 5, NOW)
    assert page.share(0, 1, NOW) == 1
    page.note(1, 0, NOW)
    assert page.share(0, 1, NOW) == 0
    page.leave(1)
    assert page.share(0, 1, NOW) == 1


def test_who_is_stuck_gets_none_until_it_moves_again() -> None:
    page = Page(2)
    page.note(0, 5, NOW)
    page.note(1, 0, NOW)
    later = NOW + (STUCK_MS + 1) / 1000
    page.note(0, 5, later)
    assert page.share(0, 10, later) == 10
    page.note(1, 0, later)
    assert page.share(0, 1, later) == 0


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
    # The milliseconds begin again after 49 days.
    page.beat(0, 2**32 / 1000 - 1.0)
    assert page.still_s(0, 2**32 / 1000 + 1.0) == 2.0
    assert page.still_s(-1, NOW) == 1.0
    assert page.share(0, 1, NOW) == 1, "it is apart from who takes the next"
