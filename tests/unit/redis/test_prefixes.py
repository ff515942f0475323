"""What gates tell each other of prefix caches: what counts, what changes nothing, and what it is good for."""

from __future__ import annotations

import random
from base64 import b64encode
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.policies import POLICIES
from cellgate.proxy.redis.reports import Roster, Seen, UnitReport
from cellgate.proxy.redis.sharing import (
    BEATS,
    DOCUMENT_MAX,
    HASHES_A_BEAT,
    HASHES_MAX,
    PrefixSharing,
    read,
    written,
)
from cellgate.router.board import Board
from cellgate.router.cost_model import BLOCK_BYTES
from cellgate.router.nouns import Ask, Evidence, Fleet, Rules, Sign, Strength, Unit, Verdict
from cellgate.router.pick import Router
from cellgate.router.queue import FairRules, Queue
from cellgate.router.unit_state import Lease

NOW = 1000.0
UNITS = ("a", "b", "c", "d")


class Gate:
    """One gate before UNITS, all of them up; `others` have told it of each unit."""

    def __init__(self, name: str, *others: str, seed: int = 1, units: tuple[str, ...] = UNITS) -> None:
        self.name, self.now = name, NOW
        self.board = Board(Rules())
        self.board.configure(Fleet(units=tuple(Unit(u, "c", f"http://{u}") for u in units)), NOW)
        self.roster = Roster(name)
        self.hear_of_units(*others)
        self.sharing = PrefixSharing(self.board, name, self.roster, lambda: self.now)
        queue = Queue(FairRules())
        self.router = Router(self.board, POLICIES["prefix_affinity"](), random.Random(seed), queue)
        for unit in units:
            self.start(unit, "1")
            self.board.units[unit].up_since = NOW - 1e6
        self.board.tick(NOW)

    def start(self, unit: str, epoch: str) -> None:
        for _ in range(3):
            self.board.observe(
                Evidence(unit, Sign.GOOD, Strength.STRONG, "canary", "it answers", self.now, epoch=epoch)
            )

    def hear_of_units(self, *others: str, epoch: str = "") -> None:
        for other in others:
            for unit in UNITS:
                report = UnitReport(unit, "c", other, Verdict.UP, epoch=epoch)
                self.roster.update((unit, other), Seen(report, 0.0), self.now)

    def send(self, *blocks: int, shown: bool = True) -> str:
        """A prompt comes, and is answered: where it went."""
        lease = self.router.pick(asked(*blocks), self.now)
        assert isinstance(lease, Lease)
        if shown:
            lease.commit(self.now + 0.1)
            self.board.prove(lease)
        self.board.close(lease, self.now + 0.2)
        return lease.unit

    def tell(self, other: Gate) -> int | None:
        document, _ = self.sharing.document()
        return other.sharing.heard(self.name, document) if document is not None else 0


def asked(*blocks: int) -> Ask:
    size = len(blocks) * BLOCK_BYTES
    return Ask("m", stream=True, prompt_tokens=size // 4, prompt_bytes=size, blocks=blocks)


def prompt(number: int, blocks: int = 40) -> tuple[int, ...]:
    return tuple(range(1000 * number, 1000 * number + blocks))


def test_a_document_is_read_as_it_was_written() -> None:
    told = {"a": [1, (1 << 60) - 1], "b": [7]}
    assert read(written("g1", told)) == ("g1", told)


def test_who_goes_on_at_another_gate_goes_to_the_unit_that_holds_what_was_said() -> None:
    one, other = Gate("g1"), Gate("g2", "g1", seed=2)
    sent = [one.send(*prompt(n)) for n in range(20)]
    one.tell(other)
    assert [other.send(*prompt(n), *prompt(500 + n, 2)) for n in range(20)] == sent
    assert len(set(sent)) > 1


def test_without_a_word_of_the_other_gate_chance_decides() -> None:
    """What the test above would find if nothing was shared."""
    one, other = Gate("g1"), Gate("g2", "g1", seed=2)
    sent = [one.send(*prompt(n)) for n in range(20)]
    assert [other.send(*prompt(n), *prompt(500 + n, 2)) for n in range(20)] != sent


def test_a_beginning_that_one_gate_has_seen_is_known_at_the_other_before_it_has_come_twice() -> None:
    one, other = Gate("g1"), Gate("g2", "g1", seed=2)
    unit = one.send(*prompt(1), *prompt(2))
    one.tell(other)
    # The common beginning ends between two steps; what is known of it is two thirds or more.
    held = other.board.held(other.board.units[unit], (*prompt(1, 40), *prompt(3)))
    assert 27 <= held <= 40


def test_of_a_beginning_that_came_twice_it_is_known_where_it_ends() -> None:
    one, other = Gate("g1"), Gate("g2", "g1", seed=2)
    one.send(*prompt(1), *prompt(2))
    unit = one.send(*prompt(1), *prompt(3))
    one.tell(other)
    assert other.board.held(other.board.units[unit], (*prompt(1), *prompt(4))) == 40


def test_what_has_shown_nothing_is_not_told() -> None:
    one = Gate("g1")
    one.send(*prompt(1), shown=False)
    assert one.sharing.document() == (None, 0)


def test_each_hash_is_told_in_so_many_beats_and_then_no_more() -> None:
    one = Gate("g1")
    one.send(*prompt(1))
    documents = [one.sharing.document() for _ in range(BEATS + 2)]
    assert [document is not None for document, _ in documents] == [True] * BEATS + [False] * 2
    assert [new > 0 for _, new in documents] == [True] + [False] * (BEATS + 1)


def test_what_one_heartbeat_tells_is_bounded() -> None:
    one = Gate("g1")
    for beat in range(3):
        for number in range(300):
            one.send(*prompt(300 * beat + number))
        document, new = one.sharing.document()
        assert document is not None
        assert len(document) < 6000
        assert new == HASHES_A_BEAT


def test_a_unit_that_starts_anew_holds_nothing_of_what_was_told_and_nothing_of_it_is_told() -> None:
    one, other = Gate("g1"), Gate("g2", "g1")
    unit = one.send(*prompt(1))
    one.tell(other)
    state = other.board.units[unit]
    assert other.board.held(state, prompt(1)) == 40
    other.start(unit, "2")
    assert other.board.held(state, prompt(1)) == 0
    one.start(unit, "2")
    assert one.sharing.document() == (None, 0)


def test_what_is_told_of_another_incarnation_does_not_count() -> None:
    one, other = Gate("g1"), Gate("g2")
    other.hear_of_units("g1", epoch="2")
    unit = one.send(*prompt(1))
    assert one.tell(other) == 0
    assert other.board.held(other.board.units[unit], prompt(1)) == 0
    other.hear_of_units("g1", epoch="1,other")
    assert one.tell(other) == 0, "it has been read"
    one.send(*prompt(2))
    assert (one.tell(other) or 0) > 0


def test_a_unit_that_is_not_configured_any_more_and_comes_back_is_another_one() -> None:
    one, other = Gate("g1"), Gate("g2", "g1")
    unit = one.send(*prompt(1))
    one.tell(other)
    fleet = Fleet(units=tuple(Unit(u, "c", f"http://{u}") for u in UNITS))
    other.board.configure(Fleet(units=tuple(u for u in fleet.units if u.name != unit)), NOW)
    other.board.configure(fleet, NOW)
    assert other.board.held(other.board.units[unit], prompt(1)) == 0


@pytest.mark.parametrize("units", [30, 100])
def test_of_many_units_the_one_that_another_gate_tells_of_is_looked_at(units: int) -> None:
    names = tuple(f"u{n}" for n in range(units))
    one, other = Gate("g1", units=names), Gate("g2", seed=2, units=names)
    for name in names:
        other.roster.update((name, "g1"), Seen(UnitReport(name, "c", "g1", Verdict.UP), 0.0), NOW)
    sent = [one.send(*prompt(n)) for n in range(20)]
    one.tell(other)
    assert [other.send(*prompt(n), *prompt(500 + n, 2)) for n in range(20)] == sent


def told(**changed: Any) -> bytes:
    return orjson.dumps({"v": 1, "gate": "g1", "units": {"a": packed(1, 2)}} | changed)


def packed(*numbers: int) -> str:
    return b64encode(b"".join(number.to_bytes(8, "little") for number in numbers)).decode()


@pytest.mark.parametrize(
    "document",
    [
        told(v=2),
        told(gate="g3"),
        told(gate="g2"),
        told(gate=None),
        told(units=[]),
        told(units=None),
        told(units={"a": 7}),
        told(units={"a": "no base64"}),
        told(units={"a": "é"}),
        told(units={"a": packed(1)[:-4]}),
        told(units={"a": packed(1 << 63)}),
        told(more="x" * DOCUMENT_MAX),
        b"[" * 1000,
        b"",
        b"null",
        "a text",
        7,
    ],
)
def test_what_makes_no_sense_changes_nothing(document: Any) -> None:
    gate = Gate("g2", "g1")
    assert gate.sharing.heard("g1", document) is None
    assert len(gate.sharing.remote) == 0


def test_of_a_gate_that_tells_of_no_such_unit_nothing_is_taken_over() -> None:
    gate = Gate("g2")
    assert gate.sharing.heard("g1", told()) == 0
    assert Gate("g2", "g1").sharing.heard("g1", told(units={"nobody": packed(1)})) == 0


def test_of_one_document_so_much_is_taken_over() -> None:
    gate = Gate("g2", "g1")
    units = {name: packed(*range(1, 2000)) for name in UNITS[:2]}
    assert gate.sharing.heard("g1", told(units=units)) == HASHES_MAX


@given(
    st.one_of(
        st.binary(max_size=60),
        st.builds(told, units=st.dictionaries(st.sampled_from(UNITS), st.text(max_size=30), max_size=3)),
        st.recursive(
            st.none() | st.integers(-9, 9) | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            ),
        ).map(lambda found: told(units=found)),
    )
)
def test_whatever_stands_there_reading_it_raises_nothing(document: bytes) -> None:
    gate = Gate("g2", "g1")
    gate.sharing.heard("g1", document)
    assert gate.send(*prompt(1)) in UNITS


def test_a_lie_makes_a_unit_cheaper_by_no_more_than_the_prompt() -> None:
    """And a unit that finds nothing of it is believed less and less."""
    gate = Gate("g2", "g1")
    gate.sharing.heard("g1", told(units={"a": packed(*prompt(1))}))
    costs = gate.board.units["a"].costs
    for _ in range(100):
        costs.prefixes.correct(1000.0, 0.0)
    assert costs.prefixes.trust < 0.01
