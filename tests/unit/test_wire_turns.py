"""A unit that sends more than one turn of the loop should read: others have their turn in between."""

from __future__ import annotations

import pytest

from proxy.limits import LIMITS
from tests.wire.rig import Rig
from tests.wire.unit import LAST_CHUNK, SSE_HEAD, STREAM, TOKENS, chunk

PLAIN_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
LARGE = b"a" * LIMITS.reply_bytes_per_turn


def begun() -> Rig:
    """A plain reply in whose middle a large read has come."""
    rig = Rig()
    rig.feed([PLAIN_HEAD % (3 * len(LARGE)), LARGE])
    return rig


def is_read(rig: Rig) -> bool:
    return rig.wire.reading


def test_after_a_large_read_nothing_more_is_read_in_the_same_turn() -> None:
    rig = begun()
    assert not is_read(rig)
    rig.turn()
    assert is_read(rig)
    rig.feed([LARGE])
    assert not is_read(rig)
    rig.turn()
    rig.feed([LARGE])
    assert rig.ends[-1] == "done"
    assert rig.kept == [rig.conn]
    assert is_read(rig)
    assert len(rig.body()) == 3 * len(LARGE)


def test_the_reads_of_a_stream_of_tokens_are_not_held_up() -> None:
    rig = Rig()
    for piece in (SSE_HEAD + chunk(TOKENS[0]), *map(chunk, TOKENS[1:])):
        rig.feed([piece])
        assert is_read(rig)
        assert not rig.due
    rig.feed([LAST_CHUNK])
    assert rig.body() == b"".join(TOKENS)


@pytest.mark.parametrize("is_held_first", [True, False])
def test_a_unit_is_not_read_for_a_client_that_does_not_read_whatever_turn_it_is(is_held_first: bool) -> None:
    rig = begun()
    if is_held_first:
        rig.relay.pause(paused=True)
        rig.turn()
        assert not is_read(rig)
        rig.relay.pause(paused=False)
    else:
        rig.relay.pause(paused=True)
        rig.relay.pause(paused=False)
        assert not is_read(rig)
        rig.turn()
    assert is_read(rig)


def test_a_connection_that_ended_meanwhile_has_no_turn() -> None:
    rig = begun()
    rig.conn.drop()
    rig.turn()
    assert not is_read(rig)
    again = Rig()
    again.feed([STREAM])
    assert not again.due
