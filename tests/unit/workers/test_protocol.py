"""Frames: what is said arrives as it was said, however the bytes are cut."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.workers.protocol import Frames, Message, ask_in, ask_out, failure_in, failure_out, framed
from cellgate.proxy.workers.remote import BoardReplica, BoardUpdates, fleet_in, fleet_out
from cellgate.router.board import Board
from cellgate.router.nouns import (
    Ask,
    Cell,
    Evidence,
    Fleet,
    KvEvents,
    Load,
    Node,
    Role,
    Rules,
    Sign,
    Strength,
    Unit,
    Verdict,
)

PLAIN: Any = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
MESSAGES: Any = st.lists(st.lists(PLAIN, min_size=1).map(tuple), min_size=1)
FLEET = Fleet(
    (Cell("c", weight=2.0, spill_s=1.0),),
    (Unit("a", "c", "http://a:1", ("m",), engine="vllm"), Unit("b", "c", "http://b:1", weight=0.5)),
)


@given(st.lists(MESSAGES), st.data())
def test_messages_arrive_whole_and_in_order_however_they_are_cut(
    frames: list[list[Message]], data: st.DataObject
) -> None:
    stream, reader = b"".join(map(framed, frames)), Frames()
    heard: list[Message] = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        heard += reader.feed(stream[:size])
        stream = stream[size:]
    assert heard == [message for frame in frames for message in frame]


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\1?"])
def test_what_is_no_frame_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"frame|marshal"):
        list(Frames().feed(data))


@given(st.lists(st.integers(0, 2**60 - 1), max_size=40).map(tuple))
def test_an_ask_arrives_as_it_was(blocks: tuple[int, ...]) -> None:
    ask = Ask("m", stream=True, prompt_bytes=7, blocks=blocks, deadline_at=inf, continuable=True)
    assert ask_in(ask_out(ask)) == ask


@pytest.mark.parametrize(
    "failure", [Failure(FailureKind.FULL, "no", retry_after_s=3), Failure(FailureKind.CUT, "x", "p")]
)
def test_a_failure_arrives_as_it_was(failure: Failure) -> None:
    assert failure_in(failure_out(failure)) == failure


def test_a_fleet_arrives_as_it_was() -> None:
    assert fleet_in(fleet_out(FLEET)) == FLEET


def test_a_fleet_is_sent_without_what_only_the_control_process_needs() -> None:
    unit = Unit("a", "c", "http://a:1", nodes=(Node("n", Role.LEADER),), kv_events=KvEvents("vllm"))
    assert framed([fleet_out(Fleet(FLEET.cells, (unit,)))])
    assert fleet_in(fleet_out(Fleet(FLEET.cells, (unit,)))).units == (Unit("a", "c", "http://a:1"),)


def test_a_replica_of_a_board_is_told_what_changed_and_nothing_else() -> None:
    board, replica = Board(Rules()), BoardReplica(Rules())
    board.configure(FLEET, 0.0)
    assert replica.take_fleet(1, fleet_out(FLEET), 0.0) == []
    updates = BoardUpdates(board)
    assert replica.take_units(updates.units(0.0)) == []
    assert updates.units(1.0) == []
    board.observe(Evidence("a", Sign.GOOD, Strength.STRONG, "canary", "one token", 2.0))
    board.report(Load("a", 2.0, running=3, waiting=1, kv_use=0.5))
    (told,) = updates.units(2.0)
    assert replica.take_units([told]) == []
    state = replica.board.units["a"]
    assert (state.case.verdict, state.case.since, state.is_usable()) == (Verdict.UP, 2.0, True)
    assert state.load == Load("a", 2.0, running=3, waiting=1, kv_use=0.5)
    assert state.has_room(2.0, 0.0)
    assert state.models == {"m"}
    board.drain("a", drained=True)
    (told,) = updates.units(2.0)
    replica.take_units([told])
    assert not state.is_usable()
    # When a unit last showed life is told apart, for that changes all the time.
    assert updates.lives() == [("a", 2.0), ("b", 0.0)]
    board.units["a"].progress_at = 3.0
    assert (updates.units(3.0), updates.lives()) == ([], [("a", 3.0)])


def test_what_is_told_of_a_unit_that_is_not_there_is_dropped() -> None:
    board, empty = Board(Rules()), BoardReplica(Rules())
    board.configure(FLEET, 0.0)
    assert empty.take_units(BoardUpdates(board).units(0.0)) == []
    assert not empty.board.units


def test_units_that_have_gone_down_are_told_apart_once() -> None:
    board, replica = Board(Rules()), BoardReplica(Rules())
    board.configure(FLEET, 0.0)
    replica.take_fleet(1, fleet_out(FLEET), 0.0)
    board.observe(Evidence("a", Sign.BAD, Strength.FATAL, "agent", "gone", 1.0))
    known = BoardUpdates(board).units(1.0)
    assert [state.unit.name for state in replica.take_units(known)] == ["a"]
    assert replica.take_units(known) == []
