"""Which units stay beside a new fleet, for which models, and until when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from cellgate.router.board import Board
from cellgate.router.kept import listed, succession
from cellgate.router.nouns import (
    Ask,
    Cell,
    Evidence,
    Fleet,
    Models,
    Rules,
    ServingRole,
    Sign,
    Strength,
    Transfer,
    Unit,
)
from cellgate.router.pick import usable_of

DRAIN_S = 300.0


def unit(name: str, *models: str, url: str = "", role: ServingRole = "both") -> Unit:
    return Unit(name, "c", url or f"http://{name}", models=models, role=role)


class Gate:
    """A board that goes from fleet to fleet."""

    def __init__(self, *units: Unit, transfer: Transfer = "none") -> None:
        self.board, self.now = Board(Rules()), 100.0
        self.cells = (Cell("c", transfer=transfer),)
        self.fleet = Fleet(self.cells, units)
        self.apply(*units)
        self.up(*(each.name for each in units))

    def up(self, *names: str) -> None:
        for name in names:
            self.board.observe(Evidence(name, Sign.GOOD, Strength.STRONG, "canary", "", self.now))

    def apply(self, *units: Unit) -> Mapping[str, tuple[str, ...]]:
        """A reload; returns who is kept, and until which one is up."""
        found = succession(self.board.units.values(), Fleet(self.cells, units), self.fleet, self.now, DRAIN_S)
        self.fleet = found.fleet
        self.board.configure(found.fleet, self.now, found.kept, found.heirs)
        return {name: kept.until for name, kept in found.kept.items()}

    def takes(self, model: str) -> list[str]:
        """Who gets a request for a model."""
        return sorted(usable_of(self.board, self.board.units, model).states)


def test_each_model_waits_for_itself_and_goes_to_what_is_kept_only_as_long_as_that_is_so() -> None:
    gate = Gate(unit("old", "m", "n"))
    new = unit("one", "m"), unit("two", "n")
    assert gate.apply(*new) == {"old": ("one", "two")}
    gate.up("one")
    assert gate.apply(*new) == {"old": ("two",)}
    assert (gate.takes("m"), gate.takes("n")) == (["one"], ["old"])
    gate.up("two")
    assert gate.apply(*new) == {}


def test_an_adapter_is_waited_for_where_its_base_is_but_not_for_longer_than_a_drain() -> None:
    gate = Gate(unit("old"))
    gate.board.set_models(Models("old", ("m", "lora"), 1.0, {"lora": "m"}))
    new = unit("new")
    assert gate.apply(new) == {"old": ("new",)}
    gate.up("new")
    gate.board.set_models(Models("new", ("m",), 1.0))
    assert gate.apply(new) == {"old": ("new",)}
    assert (gate.takes("m"), gate.takes("lora")) == (["new"], ["old"])
    gate.now += DRAIN_S
    assert gate.apply(new) == {}


def test_a_pair_is_replaced_by_a_pair_and_not_by_half_of_one() -> None:
    old = unit("p", "m", role="prefill"), unit("d", "m", role="decode")
    new = unit("q", "m", role="prefill"), unit("e", "m", role="decode")
    gate = Gate(*old, transfer="nixl")
    assert set(gate.apply(*new)) == {"p", "d"}
    gate.up("e")
    assert gate.apply(*new) == {"p": ("q",), "d": ("q",)}
    gate.up("q")
    assert gate.apply(*new) == {}


@pytest.mark.parametrize("transfer", ["none", "sglang"])
def test_a_whole_unit_gives_way_to_a_decoder_of_sglang_only_with_its_prefiller(transfer: Transfer) -> None:
    gate = Gate(unit("old", "m"), transfer=transfer)
    new = unit("q", "m", role="prefill"), unit("e", "m", role="decode")
    gate.apply(*new)
    gate.up("e")
    assert bool(gate.apply(*new)) is (transfer == "sglang")
    gate.up("q")
    assert gate.apply(*new) == {}


def test_what_stays_in_rotation_or_never_was_keeps_nobody() -> None:
    gate = Gate(unit("a", "m"), unit("b", "m"))
    assert gate.apply(unit("b", "m"), unit("new", "m")) == {}
    gate.board.drain("b", drained=True)
    assert gate.apply(unit("new", "m")) == {}
    assert gate.apply(unit("other", "m")) == {}, "new never was in rotation"


def test_a_way_back_to_the_old_address_asks_its_canary_first() -> None:
    gate = Gate(unit("a", "m"))
    assert gate.apply(unit("a", "m", url="http://b")) == {"a.old": ("a",)}
    kept = gate.board.units["a.old"]
    assert kept.is_usable()
    assert not kept.is_restart_suspected()
    assert gate.apply(unit("a", "m")) == {}
    state = gate.board.units["a"]
    assert state.is_usable()
    assert state.is_restart_suspected()
    assert state.kept is None


def test_leases_from_before_a_new_name_end_where_they_began() -> None:
    gate = Gate(unit("a", "m"))
    lease = gate.board.open("a", Ask("m"), gate.now, retry=False)
    gate.apply(unit("a", "m", url="http://b"))
    gate.board.close(lease, gate.now + 1.0)
    assert (gate.board.in_flight, gate.board.leaving) == (0, [])
    assert [state.in_flight for state in gate.board] == [0, 0]


def test_a_name_with_old_may_be_taken() -> None:
    gate = Gate(unit("a", "m"), unit("a.old", "m"))
    gate.board.drain("a.old", drained=True)
    new = [replace(each, url=f"{each.url}/new") for each in (unit("a", "m"), unit("a.old", "m"))]
    assert list(gate.apply(*new)) == ["a.old2"]


def test_a_long_list_is_cut() -> None:
    assert [listed("ab"[:n]) for n in range(3)] == ["", "a", "a and b"]
    assert listed("abcd", "or") == "a, b, c or d"
    assert listed("abcdef") == "a, b, c, d and 2 more"
