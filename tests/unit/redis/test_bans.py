"""Refused prompts as gates tell each other of them: what counts, and what changes nothing."""

from __future__ import annotations

from typing import Any, cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.control.containment import Containment
from cellgate.proxy.observe.events import EventLog
from cellgate.proxy.redis.commands import SharedBans, is_ban, read_ban
from cellgate.router.board import Board
from cellgate.router.nouns import Rules
from cellgate.router.poison import Ban, Bans

NOW, BAN_S = 1000.0, 600.0
MARK = 0x5F2C8A0D91E4B37A
GATES = {"g1", "g2"}


def shared(gate: str = "g2", ban_s: float = BAN_S) -> tuple[Containment, SharedBans]:
    none = cast("Any", None)
    events = EventLog(float, 2, log=lambda _level, _line: None)
    containment = Containment(Board(Rules()), none, events, lambda: NOW, none, answered=len, ban_s=ban_s)
    return containment, SharedBans(containment, gate, lambda: NOW)


def told(**changed: Any) -> bytes:
    fields = {
        "poison": f"{MARK:016x}",
        "v": 1,
        "gate": "g1",
        "model": "m",
        "units": ["a", "b"],
        "left_ms": 5000,
    }
    return orjson.dumps(fields | changed)


def test_a_ban_is_read_as_it_was_written() -> None:
    here, own = shared("g1")
    here.bans.add(Ban(MARK, "m", NOW, NOW + 300.0, ("a", "b")))
    (row,) = own.own()
    assert is_ban(row.document)
    there, other = shared("g2")
    assert other.heard(row.document, GATES)
    assert there.bans.all() == [Ban(MARK, "m", NOW, NOW + 300.0, ("a", "b"), "g1")]
    assert other.knows(row.mark)
    assert other.own() == []


@pytest.mark.parametrize(
    "document",
    [
        told(gate="a stranger"),
        told(gate="unknown"),
        told(gate="g2"),
        told(gate=None),
        told(v=2),
        told(poison="5f2c"),
        told(poison=7),
        told(poison="5F2C8A0D91E4B37A"),
        told(left_ms=-1),
        told(left_ms="5000"),
        told(left_ms=1e300),
        told(left_ms=None),
        told(units=["x" * 5000]),
        b"{",
        b"[]",
        "text",
        None,
    ],
    ids=repr,
)
def test_what_is_forged_or_broken_changes_nothing(document: Any) -> None:
    here, bans = shared()
    assert not bans.heard(document, GATES)
    assert not here.bans.all()
    assert not here.watchful


values = st.integers(-(2**63), 2**63) | st.text() | st.none()


@given(st.binary(max_size=200) | st.dictionaries(st.text(max_size=8), values).map(orjson.dumps))
def test_whatever_stands_there_raises_nothing(document: bytes) -> None:
    assert read_ban(document) is None


def test_no_other_gate_can_have_a_prompt_refused_for_longer_than_this_one_would() -> None:
    here, bans = shared(ban_s=60.0)
    assert bans.heard(told(left_ms=10**9), GATES)
    assert here.bans.all()[0].until == NOW + 60.0


def test_a_gate_that_refuses_nothing_refuses_nothing_for_others() -> None:
    here, bans = shared(ban_s=0.0)
    assert bans.heard(told(), GATES)
    assert not here.bans.all()


def test_what_is_left_of_a_key_is_what_is_left_of_a_ban() -> None:
    here, bans = shared()
    assert bans.heard(told(), GATES, 1500)
    assert here.bans.all()[0].until == NOW + 1.5


def test_bans_are_bounded_and_the_one_that_ends_first_goes() -> None:
    full: list[int] = []
    bans = Bans(3, lambda: full.append(1))
    for number in range(5):
        assert bans.add(Ban(number, "", NOW, NOW + 100.0 + number))
    assert [ban.fingerprint for ban in bans.all()] == [2, 3, 4]
    assert len(full) == 2
    bans.tick(NOW + 200.0)
    assert len(bans) == 0
