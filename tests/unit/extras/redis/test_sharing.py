"""What a gate makes of what others tell it: views, prefix caches, refused prompts, shared counters."""

from __future__ import annotations

import math
from base64 import b64encode
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, cast
from unittest.mock import Mock

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.extras.redis.reports import Seen, UnitReport
from cellgate.extras.redis.roster import Roster
from cellgate.extras.redis.shared_bans import SharedBans, is_ban, read_ban
from cellgate.extras.redis.sharing import (
    BEATS,
    DOCUMENT_MAX,
    HASHES_A_BEAT,
    PACE_BEATS,
    SHARED_HASHES_MAX,
    PrefixSharing,
    Sharing,
)
from cellgate.proxy.control.containment import Containment
from cellgate.proxy.observe.events import EventLog
from cellgate.router.board import Board, Consequence
from cellgate.router.cost_model import BLOCK_BYTES, RemoteLoad
from cellgate.router.nouns import Ask, Evidence, Fleet, Rules, Sign, Strength, Unit, Verdict
from cellgate.router.poison import Ban, Bans
from cellgate.router.prefix import REPORT_AGAIN_S
from cellgate.router.unit_state import Lease
from tests.unit.extras.redis.told import answered
from tests.unit.router.fleets import board_up, router_over

VIEW = UnitReport("u1", "a", "g2", Verdict.UP, "http://10.0.0.1:8000", 3)


def seen_by(gate: str, age: float = 0.0, **changes: Any) -> dict[tuple[str, str], Seen]:
    return {("u1", gate): Seen(replace(VIEW, gate=gate, **changes), age)}


def test_a_gate_that_died_stops_counting_after_one_expiry_whatever_redis_does() -> None:
    roster = Roster("g1")
    assert roster.expires_at(0.0) == math.inf
    # One's own views are no news.
    answered(
        roster, seen_by("g1") | seen_by("g2", in_flight=100) | seen_by("g3", age=0.25, in_flight=5), 10.0
    )
    assert [roster.remote_load("u1", now).in_flight for now in (10.0, 10.51, 10.75, 10.76)] == [
        105,
        100,
        100,
        0,
    ]
    assert [roster.expires_at(now) for now in (10.0, 10.6, 10.8)] == [10.5, 10.75, math.inf]


def test_a_redis_that_came_back_empty_does_not_empty_the_fleet() -> None:
    roster = Roster("g1")
    answered(roster, seen_by("g2") | seen_by("g3"), 0.0)
    roster.silent()
    assert roster.missed(1000.0) == set()
    assert roster.said("u1", "g2") is not None, "while it is gone the last view holds"
    for beat in range(3):
        answered(roster, {}, 60.0 + beat * 0.25)
        assert roster.missed(60.0 + beat * 0.25) == set()
    # One gate has published again, of the other there is still nothing: it is asked, and it is well.
    answered(roster, seen_by("g2"), 60.75)
    assert roster.missed(60.75) == {"g3"}
    assert roster.units() == {"u1"}
    roster.not_ready({"g3"}, 60.8)
    assert roster.missed(60.8) == set()
    assert roster.said("u1", "g2") is not None


def test_a_gate_that_is_missed_and_not_ready_takes_its_views_along_and_others_are_forgotten() -> None:
    roster = Roster("g1")
    answered(roster, seen_by("g2"), 0.0)
    roster.not_ready({"g2"}, 0.1)
    assert roster.units() == {"u1"}
    answered(roster, {}, 1.0)
    roster.not_ready({"g2"}, 1.0)
    assert roster.units() == set()
    roster = Roster("g1")
    answered(roster, seen_by("g2"), 0.0)
    assert roster.update(("u1", "g3"), Seen(replace(VIEW, gate="g3", in_flight=2), 0.0), 60.0)
    roster.forget(30.0)
    assert [gate for (_, gate), _, _ in roster.everything()] == ["g3"]
    assert not roster.update(("u1", "g3"), Seen(replace(VIEW, gate="g3", in_flight=1), 0.5), 60.1)
    assert roster.remote_load("u1", 60.1).in_flight == 2
    roster.forget(90.0)
    assert roster.units() == set()


class Gate:
    """A gate with two units that are UP since 1; now is 10."""

    def __init__(self) -> None:
        self.board = board_up(*(Unit(name, "a", f"http://{name}") for name in ("u1", "u2")), at=1.0)
        self.roster = Roster("g1")
        self.consequences: list[Consequence] = []
        self.sharing = Sharing(self.board, "g1", self.roster, lambda: 10.0, self._observe, {"u1": 0.25}.get)

    def _observe(self, evidence: Evidence) -> None:
        self.consequences.append(self.board.observe(evidence))

    def hears(self, age_s: float = 0.0, **changes: Any) -> None:
        seen = Seen(replace(VIEW, **changes), age_s)
        self.roster.update((seen.report.unit, seen.report.gate), seen, 10.0)
        self.sharing.received(seen)


def test_another_gates_down_asks_for_a_canary_and_orders_nothing() -> None:
    """Any other verdict, and other people's units, are nothing to judge by."""
    gate = Gate()
    for verdict in (Verdict.UP, Verdict.SUSPECT, Verdict.STARTING, Verdict.PROBATION):
        gate.hears(verdict=verdict)
    gate.hears(unit="u9", verdict=Verdict.DOWN)
    assert gate.consequences == []
    gate.board.open("u1", Ask(), 9.0, retry=False)
    gate.hears(verdict=Verdict.DOWN, fatal=True, reason="refused")
    (consequence,) = gate.consequences
    assert (consequence.wants_canary, consequence.evicted) == (True, ())
    case = gate.board.units["u1"].case
    assert case.verdict is Verdict.SUSPECT
    assert case.because is not None
    assert case.because.reason == "gate g2 reports it as down: refused"


def test_the_gate_that_saw_a_unit_live_last_sends_the_next_canary() -> None:
    """Its proof of life counts as of when it was."""
    gate = Gate()
    state = gate.board.units["u1"]
    assert state.peer_canary_at < state.progress_at
    gate.hears(age_s=0.25, life_age_s=0.5)
    gate.hears(age_s=0.25, life_age_s=3.0, gate="g3")
    gate.sharing.tick(10.0)
    assert state.peer_canary_at == state.progress_at == 9.25
    assert gate.board.units["u2"].progress_at == 1.0
    # It was too late, and has a later one of its own now.
    state.progress_at = 11.5
    gate.sharing.tick(12.0)
    assert state.peer_canary_at < state.progress_at == 11.5


@pytest.mark.parametrize(("other", "is_others"), [("g0", True), ("g2", False)])
def test_of_gates_that_saw_it_at_once_the_first_by_name_does(other: str, is_others: bool) -> None:
    gate = Gate()
    state = gate.board.units["u1"]
    for progress_at in (9.0, 9.9):
        state.progress_at = progress_at
        gate.hears(gate=other, age_s=0.0, life_age_s=0.9)
        gate.sharing.tick(10.0)
        assert (state.peer_canary_at >= state.progress_at) is is_others


def test_what_was_heard_is_not_told_again_and_small_differences_are_no_news() -> None:
    gate = Gate()
    state = gate.board.units["u1"]
    # The second is the same sign of life, by way of a slower writing.
    for other, life_age_s in (("g2", 3.0), ("g3", 2.9)):
        gate.hears(age_s=0.0, life_age_s=life_age_s, gate=other)
        gate.sharing.tick(10.0)
        assert state.progress_at == 7.0
        # Its own last sign of life was at 1.
        assert [report.life_age_s for report in gate.sharing.changes().reports] == [9.0, 9.0]
    state.progress_at = 8.5
    assert next(iter(gate.sharing.changes().reports)).life_age_s == 1.5


def test_others_requests_add_up_and_what_the_worst_gate_has_seen_of_a_unit_is_known() -> None:
    gate = Gate()
    gate.hears(in_flight=3, prefilling=1, uncached_tokens=200)
    gate.hears(in_flight=4, prefilling=9, uncached_tokens=50, gate="g3")
    gate.hears(in_flight=9, unit="u9")
    assert gate.sharing.tick(10.0) == {"u1": RemoteLoad(7, 5, 250)}, "never more prompts than requests"
    assert gate.sharing.tick(11.0) == {}
    gate = Gate()
    gate.hears(in_flight=0, errors=0.75, itl_s=0.75)
    gate.hears(in_flight=0, degraded=0.4, gate="g3", drained=True)
    assert gate.roster.remote_load("u1", 10.1) == RemoteLoad(
        errors=0.75, degraded=0.4, itl_s=0.75, drained=True
    )


def test_each_field_of_what_others_have_at_a_unit_comes_from_their_reports() -> None:
    gate = Gate()
    gate.hears(
        in_flight=3, prefilling=1, uncached_tokens=9, errors=0.7, degraded=0.4, itl_s=0.7, drained=True
    )
    known = gate.roster.remote_load("u1", 10.1)
    assert [name for name in RemoteLoad._fields if getattr(known, name) == getattr(RemoteLoad(), name)] == []


def test_a_gate_tells_of_all_its_units_and_finds_out_the_pace_of_busy_ones_in_turns() -> None:
    gate, asked = Gate(), Counter[str]()
    for name, state in gate.board.units.items():
        gap_s = partial(asked.update, [name])
        state.step_times = Mock(
            gap_s=lambda _, gap_s=gap_s: gap_s() or 0.02, prefill_s=lambda tokens: tokens / 2e3
        )
        state.batch = 1.0
    for _ in range(PACE_BEATS):
        reports = list(gate.sharing.changes().reports)
    gate.board.units["u2"].batch = 0.0
    for _ in range(PACE_BEATS):
        reports = list(gate.sharing.changes().reports)
    told = [(report.unit, report.gate, report.itl_s, report.ttft_s) for report in reports]
    assert told == [("u1", "g1", 0.02, 0.25), ("u2", "g1", 0.02, None)]
    assert asked == {"u1": 2, "u2": 1}


def test_what_a_gate_has_no_more_is_told_whenever_others_come_for_it() -> None:
    gate = Gate()
    assert not gate.sharing.changes().gone
    [first, second] = [state.unit for state in gate.board]
    gate.board.configure(Fleet(units=(second, replace(second, name="u3"))), 1.0)
    assert set(gate.sharing.changes().gone) == {first.name}
    gate.board.configure(Fleet(units=(first,)), 2.0)
    gate.board.configure(Fleet(units=(first, second)), 3.0)
    assert set(gate.sharing.changes().gone) == {"u3"}


# What gates tell each other of prefix caches: what counts, what changes nothing, and what it is good for.

NOW = 1000.0
UNITS = ("a", "b", "c", "d")


class PrefixGate:
    """One gate before UNITS, all of them up; `others` have told it of each unit."""

    def __init__(self, name: str, *others: str, seed: int = 1, units: tuple[str, ...] = UNITS) -> None:
        self.name, self.now = name, NOW
        self.board = Board(Rules())
        self.board.configure(Fleet(units=tuple(Unit(u, "c", f"http://{u}") for u in units)), NOW)
        self.roster = Roster(name)
        self.hear_of_units(*others)
        self.sharing = PrefixSharing(self.board, name, self.roster, lambda: self.now)
        self.router = router_over(self.board, seed=seed)
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
            for unit in self.board.units:
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

    def tell(self, other: PrefixGate) -> int | None:
        document, _ = self.sharing.document()
        return other.sharing.received(self.name, document) if document is not None else 0


def asked(*blocks: int) -> Ask:
    size = len(blocks) * BLOCK_BYTES
    return Ask("m", stream=True, prompt_tokens=size // 4, prompt_bytes=size, blocks=blocks)


def prompt(number: int, blocks: int = 40) -> tuple[int, ...]:
    return tuple(range(1000 * number, 1000 * number + blocks))


@pytest.mark.parametrize(("units", "is_told"), [(4, True), (4, False), (100, True)])
def test_who_goes_on_at_another_gate_goes_to_the_unit_that_holds_what_was_said(
    units: int, is_told: bool
) -> None:
    """Also among many units; without a word of the other gate chance decides."""
    names = tuple(f"u{n}" for n in range(units))
    one, other = PrefixGate("g1", units=names), PrefixGate("g2", "g1", seed=2, units=names)
    sent = [one.send(*prompt(n)) for n in range(20)]
    if is_told:
        one.tell(other)
    assert ([other.send(*prompt(n), *prompt(500 + n, 2)) for n in range(20)] == sent) is is_told
    assert len(set(sent)) > 1


def test_a_beginning_that_one_gate_has_seen_is_known_at_the_other_and_of_one_that_came_twice_its_end() -> (
    None
):
    one, other = PrefixGate("g1"), PrefixGate("g2", "g1", seed=2)
    unit = one.send(*prompt(1), *prompt(2))
    one.tell(other)
    # The common beginning ends between two steps; what is known of it is two thirds or more.
    held = other.board.held(other.board.units[unit], (*prompt(1), *prompt(3)))
    assert 27 <= held <= 40
    unit = one.send(*prompt(1), *prompt(3))
    one.tell(other)
    assert other.board.held(other.board.units[unit], (*prompt(1), *prompt(4))) == 40


def test_each_hash_is_told_in_so_many_beats_and_then_no_more() -> None:
    one = PrefixGate("g1")
    one.send(*prompt(1), shown=False)
    assert one.sharing.document() == (None, 0), "what has shown nothing is not told"
    one.send(*prompt(1))
    documents = [one.sharing.document() for _ in range(BEATS + 2)]
    assert [document is not None for document, _ in documents] == [True] * BEATS + [False] * 2
    assert [new > 0 for _, new in documents] == [True] + [False] * (BEATS + 1)
    for beat in range(2):
        for number in range(200):
            one.send(*prompt(300 * beat + number))
        document, new = one.sharing.document()
        assert document is not None
        assert len(document) < 6000
        assert new == HASHES_A_BEAT


class Prefixes:
    """Gates that tell each other of prefix caches, a heartbeat after the other."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.beats: dict[str, int] = {}
        self.gates: dict[str, PrefixGate] = {}
        self.bytes: list[int] = []
        for name in names[:-1]:
            self.come(name)

    def come(self, name: str) -> PrefixGate:
        """A new process of a gate."""
        gate = PrefixGate(name, *(other for other in self.names if other != name), seed=len(self.beats))
        self.gates[name], self.beats[name] = gate, 0
        return gate

    def beat(self, times: int = 1) -> None:
        for _ in range(times):
            documents = {}
            for name, gate in self.gates.items():
                self.beats[name] += 1
                documents[name], _ = gate.sharing.document()
                self.bytes.append(len(documents[name] or b""))
                gate.now += 0.25
            for name, gate in self.gates.items():
                gate.sharing.received_beats({other: at for other, at in self.beats.items() if other != name})
                for other, document in documents.items():
                    if other != name and document is not None:
                        assert gate.sharing.received(other, document) is not None


def held(gate: PrefixGate, unit: str, number: int) -> int:
    return gate.board.held(gate.board.units[unit], prompt(number))


@pytest.mark.parametrize("is_known", [False, True], ids=["new name", "known name"])
def test_a_new_gate_is_told_what_those_before_it_know_also_of_one_that_is_gone(is_known: bool) -> None:
    fleet = Prefixes("g1", "g2", "g3")
    sent = {}
    for number in range(30):
        sent[number] = fleet.gates["g2" if number % 2 else "g1"].send(*prompt(number))
        fleet.beat()
    fleet.beat(BEATS)
    # g2 is gone, and its successor has its name or another one.
    del fleet.gates["g2"], fleet.beats["g2"]
    new = fleet.come("g2" if is_known else "g3")
    assert {held(new, unit, number) for number, unit in sent.items()} == {0}
    fleet.beat(4)
    assert {held(new, unit, number) for number, unit in sent.items()} == {40}
    fleet.bytes.clear()
    fleet.beat(4)
    assert set(fleet.bytes) == {0}, "it is told once"


def test_what_a_new_gate_is_told_fits_into_its_heartbeats_the_newest_first_and_ends() -> None:
    fleet = Prefixes("g1", "g2")
    old = fleet.gates["g1"]
    fleet.beat()
    sent = []
    for number in range(600):
        sent.append(old.send(*prompt(number)))
        if number % 10 == 9:
            fleet.beat()
    new = fleet.come("g2")
    fleet.bytes.clear()
    fleet.beat(2)
    assert held(new, sent[-1], 599) == 40 > held(new, sent[0], 0)
    fleet.beat(40)
    assert held(new, sent[0], 0) == 40
    assert 0 < max(fleet.bytes) < 12_000
    assert fleet.bytes[-2:] == [0, 0]


def test_however_often_gates_seem_new_a_heartbeat_has_no_more_and_nothing_lives_on() -> None:
    """Whoever may write there can say that a gate has come, four times a second."""
    gate = PrefixGate("g1", "g2")
    gate.sharing.received_beats({})
    unit = gate.send(*prompt(1))
    gate.sharing.document()
    other = PrefixGate("g2", "g1")
    taken_s = []
    for beat in range(4 * 700):
        gate.sharing.received_beats({"g2": -beat})
        document, _ = gate.sharing.document()
        assert len(document or b"") < 12_000
        if document is not None and other.sharing.received("g1", document) is not None:
            taken_s.append(beat / 4)
        gate.now += 0.25
        other.now += 0.25
        other.sharing.remote.expire(other.now)
    assert taken_s[-1] < 2 * REPORT_AGAIN_S + 1.0
    assert held(other, unit, 1) == 0


def test_a_unit_that_restarts_while_a_new_gate_is_told_is_told_of_no_more() -> None:
    fleet = Prefixes("g1", "g2")
    unit = fleet.gates["g1"].send(*prompt(1))
    fleet.beat(BEATS + 1)
    new = fleet.come("g2")
    fleet.gates["g1"].sharing.received_beats({"g2": 0})
    fleet.gates["g1"].start(unit, "2")
    fleet.beat(4)
    assert held(new, unit, 1) == 0


@pytest.mark.parametrize("is_configured", [True, False])
def test_a_unit_that_starts_anew_or_comes_back_holds_nothing_of_what_was_told(is_configured: bool) -> None:
    one, other = PrefixGate("g1"), PrefixGate("g2", "g1")
    unit = one.send(*prompt(1))
    one.tell(other)
    assert other.board.held(other.board.units[unit], prompt(1)) == 40
    if is_configured:
        other.start(unit, "2")
    else:
        fleet = [state.unit for state in other.board]
        for units in ([each for each in fleet if each.name != unit], fleet):
            other.board.configure(Fleet(units=tuple(units)), NOW)
    assert other.board.held(other.board.units[unit], prompt(1)) == 0
    one.start(unit, "2")
    assert one.sharing.document() == (None, 0), "nor is anything of it told"


def test_what_is_told_of_another_incarnation_does_not_count() -> None:
    one, other = PrefixGate("g1"), PrefixGate("g2")
    other.hear_of_units("g1", epoch="2")
    unit = one.send(*prompt(1))
    assert one.tell(other) == 0
    assert other.board.held(other.board.units[unit], prompt(1)) == 0
    other.hear_of_units("g1", epoch="1,other")
    assert one.tell(other) == 0, "it has been read"
    one.send(*prompt(2))
    assert (one.tell(other) or 0) > 0


def told(**changed: Any) -> bytes:
    return orjson.dumps({"v": 1, "gate": "g1", "units": {"a": packed(1, 2)}} | changed)


def packed(*numbers: int) -> str:
    return b64encode(b"".join(number.to_bytes(8, "little") for number in numbers)).decode()


WRONG: dict[str, list[Any]] = {
    "v": [2],
    "gate": ["g3", "g2", None],
    "units": [[], None, *({"a": bad} for bad in (7, "no base64", "é", packed(1)[:-4], packed(1 << 63)))],
    "more": ["x" * DOCUMENT_MAX],
}


@pytest.mark.parametrize(
    "document",
    [
        *(told(**{field: value}) for field, values in WRONG.items() for value in values),
        *(b"[" * 1000, b"", b"null", "a text", 7),
    ],
)
def test_what_makes_no_sense_changes_nothing(document: Any) -> None:
    gate = PrefixGate("g2", "g1")
    assert gate.sharing.received("g1", document) is None
    assert len(gate.sharing.remote) == 0


def test_of_one_document_so_much_is_taken_over_and_a_lie_is_believed_less_and_less() -> None:
    assert PrefixGate("g2").sharing.received("g1", told()) == 0, "that gate has told of no such unit"
    assert PrefixGate("g2", "g1").sharing.received("g1", told(units={"nobody": packed(1)})) == 0
    gate = PrefixGate("g2", "g1")
    units = {name: packed(*range(1, 2000)) for name in UNITS[:2]}
    assert gate.sharing.received("g1", told(units=units)) == SHARED_HASHES_MAX
    costs = gate.board.units["a"].costs
    for _ in range(100):
        costs.prefixes.correct(1000.0, 0.0)
    assert costs.prefixes.trust < 0.01


@settings(max_examples=25)
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
    gate = PrefixGate("g2", "g1")
    gate.sharing.received("g1", document)
    assert gate.send(*prompt(1)) in UNITS


# Refused prompts as gates tell each other of them: what counts, and what changes nothing.

BAN_S = 600.0
MARK = 0x5F2C8A0D91E4B37A
GATES = {"g1", "g2"}


def shared(gate: str = "g2", ban_s: float = BAN_S) -> tuple[Containment, SharedBans]:
    none = cast("Any", None)
    events = EventLog(float, 2, log=lambda _level, _line: None)
    containment = Containment(Board(Rules()), none, events, lambda: NOW, none, answered=len, ban_s=ban_s)
    return containment, SharedBans(containment, gate, lambda: NOW)


def told_bans(**changed: Any) -> bytes:
    ban = {"poison": f"{MARK:016x}", "v": 1, "gate": "g1", "model": "m", "units": ["a", "b"], "left_ms": 5000}
    return orjson.dumps(ban | changed)


def test_a_ban_is_read_as_it_was_written() -> None:
    here, own = shared("g1")
    here.bans.add(Ban(MARK, "m", NOW, NOW + 300.0, ("a", "b")))
    (row,) = own.own()
    assert is_ban(row.document)
    there, other = shared("g2")
    assert other.received(row.document, GATES)
    assert there.bans.all() == [Ban(MARK, "m", NOW, NOW + 300.0, ("a", "b"), "g1")]
    assert other.knows(row.mark)
    assert other.own() == []


FORGED: dict[str, list[Any]] = {
    "gate": ["a stranger", "unknown", "g2", None],
    "v": [2],
    "poison": ["5f2c", 7, "5F2C8A0D91E4B37A"],
    "left_ms": [-1, "5000", 1e300, None],
    "units": [["x" * 5000]],
}


@pytest.mark.parametrize(
    "document",
    [
        *(told_bans(**{field: value}) for field, values in FORGED.items() for value in values),
        *(b"{", b"[]", "text", None),
    ],
    ids=repr,
)
def test_what_is_forged_or_broken_changes_nothing(document: Any) -> None:
    here, bans = shared()
    assert not bans.received(document, GATES)
    assert not here.bans.all()
    assert not here.watchful


values = st.integers(-(2**63), 2**63) | st.text() | st.none()


@given(st.binary(max_size=200) | st.dictionaries(st.text(max_size=8), values).map(orjson.dumps))
def test_whatever_stands_there_raises_nothing(document: bytes) -> None:
    assert read_ban(document) is None


@pytest.mark.parametrize(
    ("ban_s", "left_ms", "of_key_ms", "until"),
    [(60.0, 10**9, None, [NOW + 60.0]), (0.0, 5000, None, []), (BAN_S, 5000, 1500, [NOW + 1.5])],
)
def test_no_other_gate_can_have_a_prompt_refused_for_longer_than_this_one_would(
    ban_s: float, left_ms: int, of_key_ms: int | None, until: list[float]
) -> None:
    """Nor than the key in Redis lasts."""
    here, bans = shared(ban_s=ban_s)
    assert bans.received(told_bans(left_ms=left_ms), GATES, of_key_ms)
    assert [ban.until for ban in here.bans.all()] == until


def test_bans_are_bounded_and_the_one_that_ends_first_goes() -> None:
    full = Mock()
    bans = Bans(3, full)
    for number in range(5):
        assert bans.add(Ban(number, "", NOW, NOW + 100.0 + number))
    assert [ban.fingerprint for ban in bans.all()] == [2, 3, 4]
    assert full.call_count == 2
    bans.tick(NOW + 200.0)
    assert len(bans) == 0
