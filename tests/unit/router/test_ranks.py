"""Data parallel ranks of a unit: which one a request goes to, and when one of them stalls."""

from __future__ import annotations

import pytest

from cellgate.router.board import Board
from cellgate.router.cost import Expected
from cellgate.router.health import find_rank_stall, find_stall
from cellgate.router.nouns import Ask, Evidence, Fleet, Load, RankLoad, Rules, Sign, Strength, Unit
from cellgate.router.unit_state import RANKS_MAX, Lease, UnitState

NOW = 100.0
RULES = Rules()
SYSTEM = tuple(range(1, 9))


def board_of(*ranks: RankLoad) -> Board:
    """A unit that is UP and has shown these ranks."""
    board = Board(RULES)
    board.configure(Fleet(units=(Unit("u", "c", "http://u:1", ("m",)),)), NOW - 10.0)
    board.observe(Evidence("u", Sign.GOOD, Strength.STRONG, "canary", "", NOW - 5.0))
    report(board, NOW, *ranks)
    return board


def report(board: Board, at: float, *ranks: RankLoad) -> None:
    running, steps = sum(rank.running for rank in ranks), sum(rank.progress for rank in ranks)
    board.report(Load("u", at, running, own_in_flight=running, progress=steps, sighted=True, ranks=ranks))


def ask(*blocks: int) -> Ask:
    return Ask("m", True, 128 * len(blocks), prompt_bytes=512 * len(blocks), blocks=blocks)


def send(board: Board, *blocks: int, shown: bool = True) -> Lease:
    """A stream with a prompt of these blocks."""
    lease = board.open("u", ask(*blocks), NOW, retry=False)
    if shown:
        lease.commit(NOW)
    return lease


def state_of(board: Board) -> UnitState:
    return board.units["u"]


def test_who_goes_on_with_a_prompt_goes_to_the_rank_that_holds_it() -> None:
    board = board_of(RankLoad(0), RankLoad(1))
    first = send(board, *range(100, 120))
    other = send(board, *range(200, 220))
    assert (first.rank, other.rank) == (0, 1)
    assert [send(board, *range(begin, begin + 21)).rank for begin in (200, 100, 200)] == [1, 0, 1]


def test_a_prompt_with_a_doubtful_answer_leaves_nothing_behind() -> None:
    board = board_of(RankLoad(0), RankLoad(1))
    for _ in range(3):
        refused = send(board, *SYSTEM, shown=False)
        refused.commit_in_doubt(NOW)
        board.close(refused, NOW)
    assert board.held(state_of(board), SYSTEM) == 0
    assert [rank.queued_tokens for rank in state_of(board).ranks.ranks] == [0, 0]


def test_a_beginning_that_all_share_is_computed_on_every_rank() -> None:
    board = board_of(RankLoad(0), RankLoad(1))
    shared = Expected(128.0, len(SYSTEM), charged=0.05)
    leases = []
    for number in range(12):
        leases.append(board.open("u", ask(*SYSTEM, 100 + number), NOW, retry=False, expected=shared))
        leases[-1].commit(NOW)
    assert sum(lease.rank for lease in leases) == 6


def test_without_a_cached_beginning_ranks_get_equal_numbers() -> None:
    board = board_of(RankLoad(0), RankLoad(1), RankLoad(2))
    leases = [board.open("u", Ask("m", True, 100, prompt_bytes=400), NOW, retry=False) for _ in range(9)]
    assert sorted(lease.rank for lease in leases) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for lease in leases:
        board.close(lease, NOW + 1)
    assert [(r.in_flight, r.queued_tokens) for r in state_of(board).ranks.ranks] == [(0, 0)] * 3


def test_requests_of_others_at_a_rank_count() -> None:
    board = board_of(RankLoad(0, running=5), RankLoad(1))
    assert [send(board, n).rank for n in range(100, 103)] == [1, 1, 1]


def test_an_engine_with_one_scheduler_chooses_itself() -> None:
    board = board_of()
    assert send(board, 100).rank == -1


def test_leases_of_before_a_restart_close_and_the_engine_chooses_until_ranks_are_shown_again() -> None:
    board = board_of(RankLoad(0), RankLoad(1))
    lease = send(board, 100)
    state_of(board).ranks.forget()
    assert send(board, 100).rank == -1
    board.close(lease, NOW + 1)
    assert [rank.in_flight for rank in state_of(board).ranks.ranks] == [0, 0]
    report(board, NOW + 2, RankLoad(0), RankLoad(1))
    assert send(board, 100).rank == 0


def test_ranks_without_end_are_not_taken() -> None:
    board = board_of(*(RankLoad(n) for n in range(RANKS_MAX + 10)))
    assert state_of(board).ranks.count == len(state_of(board).ranks.ranks) == RANKS_MAX


def test_a_rank_that_stands_still_is_seen_though_the_other_works() -> None:
    board = board_of(RankLoad(0), RankLoad(1))
    leases = send(board, 100), send(board, *range(200, 300))
    assert [lease.rank for lease in leases] == [0, 1]
    for second in range(1, 4):
        at = NOW + second
        report(board, at, RankLoad(0, 1, progress=50.0 * second), RankLoad(1, 1, progress=7.0))
        assert find_stall(state_of(board), at, RULES) is None
    found = find_rank_stall(state_of(board), NOW + 3.1, RULES)
    assert found is not None
    rank, stall = found
    assert (rank, stall.waiting) == (1, 1)
    assert stall.stalled_s == pytest.approx(2.0)


def test_a_rank_that_just_got_its_first_request_does_not_stall() -> None:
    """The reports of an idle unit are seconds apart."""
    board = board_of(RankLoad(0), RankLoad(1))
    send(board, 100, shown=False)
    report(board, NOW + 3.0, RankLoad(0, 1), RankLoad(1))
    assert find_rank_stall(state_of(board), NOW + 3.1, RULES) is None


def test_requests_of_others_at_a_rank_are_no_reason_to_suspect_it() -> None:
    """Their prompts are not known: the rank may compute a long one."""
    board = board_of(RankLoad(0), RankLoad(1))
    send(board, 100)
    for second in range(1, 5):
        report(board, NOW + second, RankLoad(0, 1, progress=50.0 * second), RankLoad(1, 3))
    assert find_rank_stall(state_of(board), NOW + 4.1, RULES) is None
