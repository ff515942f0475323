"""What is concluded from what ranks say."""

from __future__ import annotations

from typing import Any

from cellgate.router.comparisons import FRESH_S, NAMED_MAX, conclusions
from cellgate.router.nouns import Behind, Communicator, NodeFacts, RankPlace, UnitFacts

FIVE = RankPlace(5, "10.0.0.2", 4711)
LATE = Communicator("c", 8, 8000, 1, (Behind(FIVE, "AllReduce", 1000, 1001),))


def facts(at: float, *communicators: Communicator, node: str = "b", **more: Any) -> NodeFacts:
    hosts = frozenset({"10.0.0.2"})
    return NodeFacts(
        "u", node, at, addresses=hosts, communicators=communicators, is_of_ranks=bool(communicators), **more
    )


def unit(*reports: NodeFacts) -> UnitFacts:
    found = UnitFacts()
    for report in reports:
        found.take(report)
    return found


def test_a_rank_that_two_reports_find_behind_never_entered_the_collective() -> None:
    found = unit(facts(0.0, LATE), facts(2.0, LATE))
    assert conclusions(found, 2.0) == (
        "rank 5 on node b (process 4711) never entered AllReduce 1001, which 7 of 8 ranks wait in",
    )


def test_one_report_says_nothing_of_who_is_behind_and_neither_do_ranks_that_go_on() -> None:
    assert conclusions(unit(facts(0.0, LATE)), 0.0) == ()
    later = Communicator("c", 8, 8100, 1, (Behind(FIVE, "AllReduce", 1012, 1013),))
    assert conclusions(unit(facts(0.0, LATE), facts(2.0, later)), 2.0) == ()


def test_when_most_are_behind_no_rank_is_blamed() -> None:
    most = Communicator("c", 8, 8000, 7, tuple(Behind(FIVE, "AllGather", 1, 2) for _ in range(7)))
    assert conclusions(unit(facts(0.0, most), facts(2.0, most)), 2.0) == (
        "7 of 8 ranks have not entered AllGather 2",
    )


def test_a_rank_is_named_once_by_its_number_in_the_largest_communicator() -> None:
    small = Communicator("d", 2, 20, 1, (Behind(FIVE._replace(rank=1), "AllReduce", 9, 10),))
    found = conclusions(unit(facts(0.0, LATE, small), facts(2.0, LATE, small)), 2.0)
    assert [line.split(" (")[0] for line in found] == ["rank 5 on node b"]


def test_ranks_that_do_not_answer_or_report_errors_are_named_at_once() -> None:
    comm = Communicator("c", 8, missing=((FIVE, True),), failed=((RankPlace(6, "10.9.9.9", 1), 6),))
    assert conclusions(unit(facts(0.0, comm)), 0.0) == (
        "rank 5 on node b (process 4711) does not answer the other ranks, for a minute or more",
        "rank 6 on node 10.9.9.9 (process 1) reports an NCCL error: remote process error",
    )


def test_all_agents_that_say_the_same_are_one_sentence() -> None:
    reports = [facts(at, LATE, node=node) for at in (0.0, 2.0) for node in ("b", "a")]
    assert len(conclusions(unit(*reports), 2.0)) == 1


def test_error_counters_that_grow_are_told_and_those_that_stand_or_fall_are_not() -> None:
    before = facts(0.0, counters={"mlx5_0/1 link_downed": 2, "neuron0 x": 9, "mlx5_0/1 symbol_error": 4})
    after = facts(30.0, counters={"mlx5_0/1 link_downed": 3, "neuron0 x": 0, "mlx5_0/1 symbol_error": 4})
    assert conclusions(unit(before, after), 30.0) == ("node b counts mlx5_0/1 link_downed +1 within 30 s",)
    assert conclusions(unit(after), 30.0) == ()


def test_old_reports_say_nothing_and_a_sentence_has_an_end() -> None:
    assert conclusions(unit(facts(0.0, LATE), facts(2.0, LATE)), 3.0 + FRESH_S) == ()
    many = {f"ib{n}/1 symbol_error": 1 for n in range(99)}
    found = unit(facts(0.0, counters=dict.fromkeys(many, 0)), facts(1.0, counters=many))
    assert len(conclusions(found, 1.0)) == NAMED_MAX
