"""Units that send more than one turn of the loop should parse: others have their turn in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.http.errors import FailureKind
from cellgate.proxy.http.turns import PART_BYTES, PIECE_BYTES, ReadScheduler
from tests.wire.rig import Rig
from tests.wire.unit import LAST_CHUNK, SSE_HEAD, STREAM, TOKENS, chunk

CHUNKED_HEAD = SSE_HEAD.replace(b"text/event-stream", b"application/json")
READ_BYTES = 256_000
"""The most that the loop reads of one connection at once."""
STREAMS = 40
EVENT = b'data: {"id":"t"}\n\n'
LARGE = b"data: %b\n\n" % (b"a" * 5000)
FLOODS = {
    "tokens": (EVENT, chunk(EVENT)),
    "large events": (LARGE, chunk(LARGE)),
    "a byte at a time": (EVENT, b"".join(chunk(EVENT[at : at + 1]) for at in range(len(EVENT)))),
}
"""An event, and how it is sent."""
MANY = READ_BYTES // len(chunk(EVENT))
FLOOD = chunk(EVENT) * MANY


class Street:
    """Streams of one gate, of one loop."""

    def __init__(self, streams: int = STREAMS) -> None:
        self.due: list[Callable[[], None]] = []
        self.read_scheduler = ReadScheduler(self.due.append, LIMITS.reply_bytes_per_turn)
        self.rigs = [Rig(read_scheduler=self.read_scheduler) for _ in range(streams)]
        for rig in self.rigs:
            rig.feed([SSE_HEAD + chunk(TOKENS[0])])

    def late(self) -> int:
        """How much was read of all streams together, and has yet to be parsed."""
        return sum(len(rig.conn._late) - rig.conn._late_at for rig in self.rigs)

    def turn(self) -> None:
        """The next turn of the loop."""
        due, self.due[:] = self.due[:], []
        for callback in due:
            callback()


@pytest.mark.parametrize(("event", "sent"), FLOODS.values(), ids=FLOODS)
def test_one_turn_parses_no_more_of_all_streams_together_than_the_bound(event: bytes, sent: bytes) -> None:
    street, many = Street(), READ_BYTES // len(sent)
    for rig in street.rigs:
        rig.feed([sent * many])
    late = [STREAMS * many * len(sent), street.late()]
    while street.due:
        street.turn()
        late.append(street.late())
    # Small pieces are dear, and so there are fewer of them.
    allowed = LIMITS.reply_bytes_per_turn / (1 + PIECE_BYTES * sent.count(b"\r\n") / 2 / len(sent))
    parsed = [before - after for before, after in pairwise(late)]
    assert 0 < max(parsed) <= allowed + PART_BYTES
    assert sum(parsed) == late[0]
    for rig in street.rigs:
        assert rig.wire.reading, "all is read on in the end"
        assert rig.body() == TOKENS[0] + event * many


def test_streams_have_their_turns_one_after_the_other() -> None:
    street = Street()
    for rig in street.rigs:
        rig.feed([FLOOD])
    before = [len(rig.body()) for rig in street.rigs]
    while street.due:
        seen = [len(rig.body()) - had for rig, had in zip(street.rigs, before, strict=True)]
        late = [had for rig, had in zip(street.rigs, seen, strict=True) if not rig.wire.reading]
        assert not late or max(late) - min(late) <= PART_BYTES
        street.turn()


def test_a_small_read_waits_for_nobody() -> None:
    street = Street()
    *floods, neighbour = street.rigs
    for rig in floods:
        rig.feed([FLOOD])
    assert street.due
    unusual = b"event: x\n" + TOKENS[1]
    neighbour.feed([chunk(unusual)])
    assert neighbour.body() == TOKENS[0] + unusual


def begun() -> Rig:
    """A stream of which a part of a large read has yet to be parsed."""
    rig = Rig()
    rig.feed([SSE_HEAD + chunk(TOKENS[0]), FLOOD])
    assert rig.due
    assert not rig.wire.reading
    return rig


def run_out(rig: Rig) -> None:
    """All turns that are due."""
    while rig.due:
        rig.turn()


def test_a_connection_is_read_on_once_all_that_was_read_is_parsed() -> None:
    rig = begun()
    for _ in range(2):
        while not rig.wire.reading:
            assert rig.due
            rig.turn()
        rig.feed([FLOOD])
    run_out(rig)
    rig.feed([LAST_CHUNK])
    assert rig.ends[-1] == "done"
    assert rig.kept == [rig.conn]


def test_the_reads_of_a_stream_of_tokens_are_not_held_up() -> None:
    rig = Rig()
    for piece in (SSE_HEAD + chunk(TOKENS[0]), *map(chunk, TOKENS[1:])):
        rig.feed([piece])
        assert rig.wire.reading
        assert not rig.due
    rig.feed([LAST_CHUNK])
    assert rig.body() == b"".join(TOKENS)


def test_nothing_is_parsed_for_a_client_that_does_not_read_and_all_of_it_once_it_does() -> None:
    rig = begun()
    rig.attempt.pause(paused=True)
    shown = len(rig.shown)
    run_out(rig)
    assert (len(rig.shown), rig.wire.reading) == (shown, False)
    rig.attempt.pause(paused=False)
    run_out(rig)
    assert rig.wire.reading
    assert rig.body() == TOKENS[0] + EVENT * MANY


def test_a_client_that_pauses_and_goes_on_within_a_turn_has_no_more_turns_than_others() -> None:
    rig = begun()
    for _ in range(5):
        rig.attempt.pause(paused=True)
        rig.attempt.pause(paused=False)
    before = len(rig.shown)
    rig.turn()
    assert len(rig.shown) - before <= LIMITS.reply_bytes_per_turn + 2 * PART_BYTES
    assert len(rig.due) <= 1


def test_what_was_read_before_a_connection_broke_still_counts() -> None:
    rig = begun()
    rig.feed([], close=True)
    assert rig.body() == TOKENS[0] + EVENT * MANY
    assert [failure.kind for failure in rig.failures] == [FailureKind.CLOSED_EARLY]
    run_out(rig)
    assert rig.bugs == []


def test_a_plain_body_that_the_close_ends_is_whole_whatever_has_yet_to_be_parsed() -> None:
    rig, body = Rig(), b"a" * 3 * LIMITS.reply_bytes_per_turn
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
    rig.feed([head, body], close=True)
    assert rig.ends == ["committed", "done"]
    assert len(rig.body()) == len(body)


def test_a_unit_that_goes_on_behind_the_end_of_its_reply_gets_no_other_request() -> None:
    rig = Rig()
    reply = chunk(b"a" * (PART_BYTES - len(b"3fff\r\n\r\n" + LAST_CHUNK))) + LAST_CHUNK
    assert len(reply) == PART_BYTES
    rig.feed([CHUNKED_HEAD, reply + b"HTTP/1.1 200 OK\r\n"])
    run_out(rig)
    assert rig.ends == ["committed", "done"]
    assert (rig.kept, rig.wire.closed) == ([], True)


def test_a_connection_that_is_dropped_has_no_turn() -> None:
    rig = begun()
    shown = len(rig.shown)
    rig.conn.drop()
    run_out(rig)
    assert len(rig.shown) == shown
    again = Rig()
    again.feed([STREAM])
    assert not again.due


@pytest.mark.parametrize("seed", range(20))
def test_what_is_shown_does_not_depend_on_the_sizes_of_reads(seed: int) -> None:
    chance = random.Random(seed)
    events = [
        b'data: {"id":"%d","text":"%b"}\n\n' % (number, b"x" * int(chance.paretovariate(0.7)))
        for number in range(3000)
    ]
    bytes_sent = b"".join(map(chunk, events)) + LAST_CHUNK
    rig, at = Rig(), 0
    rig.feed([SSE_HEAD])
    while at < len(bytes_sent):
        size = chance.choice((100, 4096, 5000, 60_000, READ_BYTES))
        rig.feed([bytes_sent[at : at + size]])
        at += size
        if chance.random() < 0.2:
            rig.attempt.pause(paused=True)
            rig.turn()
            rig.attempt.pause(paused=False)
    run_out(rig)
    assert (rig.ends[-1], rig.bugs, rig.failures) == ("done", [], [])
    assert rig.body() == b"".join(events)
