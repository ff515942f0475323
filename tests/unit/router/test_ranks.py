"""Data parallel ranks: which one a request goes to, and what is concluded when one stalls."""

from __future__ import annotations

from typing import Any

import pytest

from cellgate.router.board import Board
from cellgate.router.comparisons import (
    COMPARED_NAMED_MAX,
    FRESH_S,
    SHOWN_MAX,
    Stack,
    Stacks,
    conclusions,
    software_of,
)
from cellgate.router.comparisons import differences as software_differences
from cellgate.router.cost import Expected
from cellgate.router.health import find_rank_stall, find_stall
from cellgate.router.nouns import (
    Ask,
    Behind,
    Cell,
    Communicator,
    Fleet,
    Load,
    Node,
    NodeFacts,
    RankLoad,
    RankPlace,
    Role,
    Rules,
    Unit,
    UnitFacts,
)
from cellgate.router.unit_state import UNIT_RANKS_MAX, Lease, UnitState
from tests.unit.router.fleets import board_up

NOW = 100.0
RULES = Rules()
SYSTEM = tuple(range(1, 9))


def board_of(*ranks: RankLoad) -> Board:
    """A unit that is UP and has shown these ranks."""
    board = board_up(Unit("u", "c", "http://u:1", ("m",)), at=NOW - 5.0)
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
    # A prompt with a doubtful answer leaves nothing behind.
    board = board_of(RankLoad(0), RankLoad(1))
    for _ in range(3):
        refused = send(board, *SYSTEM, shown=False)
        refused.commit_in_doubt(NOW)
        board.close(refused, NOW)
    assert board.held(state_of(board), SYSTEM) == 0
    assert [rank.queued_tokens for rank in state_of(board).ranks.ranks] == [0, 0]


def test_ranks_get_equal_numbers_of_prompts_without_a_cached_beginning_or_with_one_that_all_share() -> None:
    board = board_of(RankLoad(0), RankLoad(1))
    shared = Expected(128.0, len(SYSTEM), charged=0.05)
    leases = []
    for number in range(12):
        leases.append(board.open("u", ask(*SYSTEM, 100 + number), NOW, retry=False, expected=shared))
        leases[-1].commit(NOW)
    assert sum(lease.rank for lease in leases) == 6
    board = board_of(RankLoad(0), RankLoad(1), RankLoad(2))
    leases = [board.open("u", Ask("m", True, 100, prompt_bytes=400), NOW, retry=False) for _ in range(9)]
    assert sorted(lease.rank for lease in leases) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for lease in leases:
        board.close(lease, NOW + 1)
    assert [(r.in_flight, r.queued_tokens) for r in state_of(board).ranks.ranks] == [(0, 0)] * 3


def test_requests_of_others_at_a_rank_count_and_ranks_without_end_are_not_taken() -> None:
    board = board_of(RankLoad(0, running=5), RankLoad(1))
    assert [send(board, n).rank for n in range(100, 103)] == [1, 1, 1]
    assert send(board_of(), 100).rank == -1, "an engine with one scheduler chooses itself"
    board = board_of(*(RankLoad(n) for n in range(UNIT_RANKS_MAX + 10)))
    assert state_of(board).ranks.count == len(state_of(board).ranks.ranks) == UNIT_RANKS_MAX


def test_leases_of_before_a_restart_close_and_the_engine_chooses_until_ranks_are_shown_again() -> None:
    board = board_of(RankLoad(0), RankLoad(1))
    lease = send(board, 100)
    state_of(board).ranks.forget()
    assert send(board, 100).rank == -1
    board.close(lease, NOW + 1)
    assert [rank.in_flight for rank in state_of(board).ranks.ranks] == [0, 0]
    report(board, NOW + 2, RankLoad(0), RankLoad(1))
    assert send(board, 100).rank == 0


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


def test_neither_a_first_request_nor_those_of_others_at_a_rank_are_a_reason_to_suspect_it() -> None:
    """The reports of an idle unit are seconds apart; of others the rank may compute a long prompt."""
    board = board_of(RankLoad(0), RankLoad(1))
    send(board, 100, shown=False)
    report(board, NOW + 3.0, RankLoad(0, 1), RankLoad(1))
    assert find_rank_stall(state_of(board), NOW + 3.1, RULES) is None
    board = board_of(RankLoad(0), RankLoad(1))
    send(board, 100)
    for second in range(1, 5):
        report(board, NOW + second, RankLoad(0, 1, progress=50.0 * second), RankLoad(1, 3))
    assert find_rank_stall(state_of(board), NOW + 4.1, RULES) is None


# What is concluded from what ranks say.

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
    """It is named once, by its number in the largest communicator, however many agents say so."""
    never = "rank 5 on node b (process 4711) never entered AllReduce 1001, which 7 of 8 ranks wait in"
    small = Communicator("d", 2, 20, 1, (Behind(FIVE._replace(rank=1), "AllReduce", 9, 10),))
    assert conclusions(unit(facts(0.0, LATE, small), facts(2.0, LATE, small)), 2.0) == (never,)
    reports = [facts(at, LATE, node=node) for at in (0.0, 2.0) for node in ("b", "a")]
    assert len(conclusions(unit(*reports), 2.0)) == 1
    assert conclusions(unit(facts(0.0, LATE)), 0.0) == (), "one report says nothing"
    later = Communicator("c", 8, 8100, 1, (Behind(FIVE, "AllReduce", 1012, 1013),))
    assert conclusions(unit(facts(0.0, LATE), facts(2.0, later)), 2.0) == (), "nor do ranks that go on"
    most = Communicator("c", 8, 8000, 7, tuple(Behind(FIVE, "AllGather", 1, 2) for _ in range(7)))
    assert conclusions(unit(facts(0.0, most), facts(2.0, most)), 2.0) == (
        "7 of 8 ranks have not entered AllGather 2",
    )


def test_ranks_that_do_not_answer_and_counters_that_grow_are_told_while_that_is_fresh() -> None:
    comm = Communicator("c", 8, missing=((FIVE, True),), failed=((RankPlace(6, "10.9.9.9", 1), 6),))
    assert conclusions(unit(facts(0.0, comm)), 0.0) == (
        "rank 5 on node b (process 4711) does not answer the other ranks, for a minute or more",
        "rank 6 on node 10.9.9.9 (process 1) reports an NCCL error: remote process error",
    )
    before = facts(0.0, counters={"mlx5_0/1 link_downed": 2, "neuron0 x": 9, "mlx5_0/1 symbol_error": 4})
    after = facts(30.0, counters={"mlx5_0/1 link_downed": 3, "neuron0 x": 0, "mlx5_0/1 symbol_error": 4})
    assert conclusions(unit(before, after), 30.0) == ("node b counts mlx5_0/1 link_downed +1 within 30 s",)
    assert conclusions(unit(after), 30.0) == ()
    assert conclusions(unit(facts(0.0, LATE), facts(2.0, LATE)), 3.0 + FRESH_S) == ()
    many = {f"ib{n}/1 symbol_error": 1 for n in range(99)}
    found = unit(facts(0.0, counters=dict.fromkeys(many, 0)), facts(1.0, counters=many))
    assert len(conclusions(found, 1.0)) == COMPARED_NAMED_MAX, "a sentence has an end"


# Which software differs, and how it is said.

USUAL = {
    "program": "vllm",
    "package vllm": "0.11.0",
    "driver nvidia": "570",
    "flag --tp": "8",
    "flag --dtype": "#1",
}


def differences(usual: Stack, stack: Stack, whose: str) -> list[str]:
    return software_differences(software_of(usual), software_of(stack), whose)


def mixed(state: UnitState) -> str:
    stacks = Stacks()
    list(stacks.read(state))
    return stacks.mixed(state)


def odd_units(found: Board) -> dict[str, str]:
    stacks = Stacks()
    for state in found:
        list(stacks.read(state))
    return {state.unit.name: words for state, words in stacks.odd(found) if words}


def board(**stacks: tuple[Stack, ...]) -> Board:
    """A unit for each name, with a node for each of its stacks."""
    found = Board(Rules())
    units = []
    for name, each in stacks.items():
        nodes = tuple(Node(f"{name}-{n}", Role.FOLLOWER if n else Role.LEADER) for n in range(len(each)))
        units.append(Unit(name, "c", f"http://{name}", models=("m",), nodes=nodes))
    found.configure(Fleet((Cell("c"),), tuple(units)), 0.0)
    for name, each in stacks.items():
        for n, stack in enumerate(each):
            found.units[name].facts.nodes[f"{name}-{n}"] = NodeFacts(name, f"{name}-{n}", 0.0, stack)
    return found


def test_what_differs_is_said_with_both_values() -> None:
    other = {**USUAL, "driver nvidia": "550", "flag --tp": "4", "flag --dtype": "#2", "flag --eager": ""}
    assert differences(USUAL, other, "a-0") == [
        "driver nvidia 550 (a-0: 570)",
        "another --dtype than a-0",
        "--eager (a-0 has none)",
        "--tp 4 (a-0: 8)",
    ]
    assert "no --tp (a-0 has it)" in differences(USUAL, {"program": "vllm"}, "a-0")


def test_flags_that_are_meant_to_differ_do_not_count() -> None:
    """A headless node needs no flags of the API; other programs have other flags."""
    names = "--host --port --node-rank --headless --head --master-addr --data-parallel-address"
    assert differences(USUAL, USUAL | {f"flag {name}": "7" for name in names.split()}, "a-0") == []
    assert differences(USUAL, USUAL | {"flag --served-model-name": "#7"}, "a-0") != []
    leader = USUAL | {"flag --tool-call-parser": "#3"}
    headless = USUAL | {"flag --headless": ""}
    assert differences(leader, headless, "a-0") == []
    assert differences(leader, headless | {"flag --tp": "4"}, "a-0") == ["--tp 4 (a-0: 8)"]
    assert differences(leader, USUAL, "a-0") == ["no --tool-call-parser (a-0 has it)"]
    assert differences(USUAL, {"program": "worker", "package vllm": "0.11.0", "flag --x": "1"}, "a-0") == []
    assert differences(USUAL, {}, "a-0") == differences({}, USUAL, "a-0") == []


def test_the_nodes_of_a_unit_are_compared_with_its_first_in_a_short_sentence() -> None:
    many = {f"flag --{n}": "1" for n in range(50)}
    other = USUAL | {"driver nvidia": "550"}
    found = board(a=(USUAL, USUAL, other), b=(USUAL, {}, USUAL), c=(USUAL, USUAL | many))
    assert mixed(found.units["a"]) == "a-2 has driver nvidia 550 (a-0: 570)"
    assert mixed(found.units["b"]) == ""
    assert mixed(found.units["c"]).endswith(f"and {50 - SHOWN_MAX} more")


def test_units_are_compared_with_the_most_common_stack_of_their_cell() -> None:
    """But for drained ones and those of other models."""
    old = USUAL | {"package vllm": "0.10.0"}
    found = board(a=(old,), b=(USUAL,), c=(USUAL,), d=(USUAL, old))
    assert odd_units(found) == {"a": "vllm 0.10.0 (b: 0.11.0)"}
    found.units["a"].models = frozenset({"other"})
    assert odd_units(found) == {}
    found.units["a"].models = found.units["b"].models
    assert list(odd_units(found)) == ["a"]
    found.drain("a", drained=True)
    assert odd_units(found) == {}
    assert odd_units(board(a=(old,), b=(USUAL,))) == {"b": "vllm 0.11.0 (a: 0.10.0)"}
    assert odd_units(board(a=(USUAL,), b=(USUAL,), c=())) == {}


def test_what_changes_is_compared_anew() -> None:
    found = board(a=(USUAL, USUAL | {"driver nvidia": "550"}, USUAL))
    stacks, state = Stacks(), found.units["a"]

    def mixed_now() -> str:
        list(stacks.read(state))
        return stacks.mixed(state)

    assert mixed_now() == "a-1 has driver nvidia 550 (a-0: 570)"
    state.facts.take(NodeFacts("a", "a-1", 1.0, USUAL))
    assert mixed_now() == ""
    state.facts.take(NodeFacts("a", "a-0", 1.0, USUAL | {"driver nvidia": "550"}))
    assert mixed_now().startswith("a-1 has driver nvidia 570 (a-0: 550), a-2 has")
    del state.facts.nodes["a-0"]
    assert mixed_now() == ""
    state.facts.forget()
    assert mixed_now() == ""
