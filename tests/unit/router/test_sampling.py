"""Which units are looked at where there are many, and what that costs."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

from cellgate.policies import POLICIES
from cellgate.router.board import Board
from cellgate.router.nouns import Ask, Evidence, Fleet, Rules, Sign, Strength, Unit
from cellgate.router.pick import Router
from cellgate.router.queue import FairRules, Queue
from cellgate.router.sampling import LOOK_AT_ALL, RENEWED_S, SAMPLE, Sampler
from cellgate.router.unit_state import Lease

NOW = 100.0


def board_of(count: int) -> Board:
    """Units that are UP and serve m; every fifth serves rare as well."""
    board = Board(Rules(slow_start_s=0.001))
    units = tuple(
        Unit(f"u{n}", "c", f"http://u{n}:1", ("m", "rare") if n % 5 == 0 else ("m",)) for n in range(count)
    )
    board.configure(Fleet(units=units), 0.0)
    for unit in units:
        board.observe(Evidence(unit.name, Sign.GOOD, Strength.STRONG, "canary", "well", 0.0))
    return board


def shortlist_of(board: Board) -> Sampler:
    return Sampler(board, random.Random(1))


@pytest.fixture(scope="module")
def many() -> Board:
    """Five hundred units, of a board on which nothing happens any more."""
    return board_of(500)


def test_few_units_are_all_looked_at() -> None:
    assert shortlist_of(board_of(LOOK_AT_ALL)).of(Ask("m"), NOW) is None


def test_of_many_a_few_are_drawn_and_never_the_same(many: Board) -> None:
    sampler = shortlist_of(many)
    drawn = Counter(name for _ in range(500) for name in sampler.of(Ask("m"), NOW) or ())
    assert sum(drawn.values()) == 500 * SAMPLE
    assert len(drawn) == 500
    assert max(drawn.values()) < 5 * SAMPLE


def test_only_who_serves_the_model_is_drawn(many: Board) -> None:
    sampler = shortlist_of(many)
    for _ in range(50):
        assert all(int(name[1:]) % 5 == 0 for name in sampler.of(Ask("rare"), NOW) or ())


def test_an_ask_that_one_unit_alone_can_answer_looks_there(many: Board) -> None:
    assert shortlist_of(many).of(Ask("m", unit="u7"), NOW) == ("u7",)


def test_who_got_the_beginning_of_a_prompt_is_among_them(many: Board) -> None:
    sampler = shortlist_of(many)
    sampler.record(Ask("m", blocks=(1, 2, 3)), "u77")
    sampler.record(Ask("m", blocks=(1, 9)), "u78")
    for _ in range(20):
        assert "u77" in (sampler.of(Ask("m", blocks=(1, 2, 3, 4, 5)), NOW) or ())


def test_units_that_come_up_are_drawn_soon() -> None:
    board = board_of(500)
    sampler = shortlist_of(board)
    for name in [f"u{n}" for n in range(30, 500)]:
        board.drain(name, drained=True)
    assert len(sampler.of(Ask("m"), NOW) or ()) <= 30
    for name in [f"u{n}" for n in range(30, 500)]:
        board.drain(name, drained=False)
    drawn = {name for _ in range(99) for name in sampler.of(Ask("m"), NOW + RENEWED_S) or ()}
    assert len(drawn) > 400


@pytest.mark.alone
def test_load_spreads_over_five_hundred_units_and_a_pick_is_cheap() -> None:
    board = board_of(500)
    router = Router(board, POLICIES["prefix_affinity"](), random.Random(1), Queue(FairRules()))
    asks = [Ask("m", stream=True, prompt_bytes=2000, blocks=(n, n + 1)) for n in range(1000)]
    began_s = time.process_time()
    leases = [router.pick(ask, NOW) for ask in asks]
    pick_us = 1e6 * (time.process_time() - began_s) / len(asks)
    print(f"a pick among 500 units: {pick_us:.0f} us of CPU")
    assert all(isinstance(lease, Lease) for lease in leases)
    # By chance alone the fullest of 500 units would have 8 or 9 of 1000 requests.
    assert max(state.in_flight for state in board) <= 4
    # The budget is 150 us on a machine of its own.
    assert pick_us < 1000.0
