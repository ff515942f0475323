"""Which software differs, and how it is said."""

from __future__ import annotations

from cellgate.router.board import Board
from cellgate.router.comparisons import SHOWN_MAX, Stack, Stacks, software_of
from cellgate.router.comparisons import differences as software_differences
from cellgate.router.nouns import Cell, Fleet, Node, NodeFacts, Role, Rules, Unit
from cellgate.router.unit_state import UnitState

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
    flags = (
        "--host",
        "--port",
        "--node-rank",
        "--headless",
        "--head",
        "--master-addr",
        "--data-parallel-address",
    )
    assert differences(USUAL, USUAL | {f"flag {flag}": "7" for flag in flags}, "a-0") == []
    assert differences(USUAL, USUAL | {"flag --served-model-name": "#7"}, "a-0") != []


def test_a_headless_node_needs_no_flags_of_the_api() -> None:
    leader = USUAL | {"flag --tool-call-parser": "#3"}
    headless = USUAL | {"flag --headless": ""}
    assert differences(leader, headless, "a-0") == []
    assert differences(leader, headless | {"flag --tp": "4"}, "a-0") == ["--tp 4 (a-0: 8)"]
    assert differences(leader, USUAL, "a-0") == ["no --tool-call-parser (a-0 has it)"]


def test_other_programs_have_other_flags_and_what_is_unknown_is_not_compared() -> None:
    assert differences(USUAL, {"program": "worker", "package vllm": "0.11.0", "flag --x": "1"}, "a-0") == []
    assert differences(USUAL, {}, "a-0") == differences({}, USUAL, "a-0") == []


def test_the_nodes_of_a_unit_are_compared_with_its_first() -> None:
    found = board(a=(USUAL, USUAL, USUAL | {"driver nvidia": "550"}), b=(USUAL, {}, USUAL))
    assert mixed(found.units["a"]) == "a-2 has driver nvidia 550 (a-0: 570)"
    assert mixed(found.units["b"]) == ""


def test_units_are_compared_with_the_most_common_stack_of_their_cell() -> None:
    old = USUAL | {"package vllm": "0.10.0"}
    assert odd_units(board(a=(old,), b=(USUAL,), c=(USUAL,), d=(USUAL, old))) == {
        "a": "vllm 0.10.0 (b: 0.11.0)"
    }
    assert odd_units(board(a=(old,), b=(USUAL,))) == {"b": "vllm 0.11.0 (a: 0.10.0)"}
    assert odd_units(board(a=(USUAL,), b=(USUAL,), c=())) == {}


def test_drained_units_and_those_of_other_models_are_left_out() -> None:
    found = board(a=(USUAL | {"driver nvidia": "550"},), b=(USUAL,), c=(USUAL,))
    found.units["a"].models = frozenset({"other"})
    assert odd_units(found) == {}
    found.units["a"].models = found.units["b"].models
    assert list(odd_units(found)) == ["a"]
    found.drain("a", drained=True)
    assert odd_units(found) == {}


def test_many_differences_are_a_short_sentence() -> None:
    many = {f"flag --{n}": "1" for n in range(50)}
    assert mixed(board(a=(USUAL, USUAL | many)).units["a"]).endswith(f"and {50 - SHOWN_MAX} more")


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
