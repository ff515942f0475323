"""Several tokens of a stream that come in one read: they are passed on, counted and kept as one by one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.http.errors import FailureKind
from cellgate.proxy.http.turns import PART_BYTES, ReadScheduler
from cellgate.proxy.http.unit import TokenSink, UnitConnection
from cellgate.proxy.request.response import ANY_ENDS
from cellgate.proxy.resume.eligible import COUNTS, OPEN, TOKENS
from cellgate.proxy.resume.transcript import Transcript
from tests.unit.request.test_whole_streams import Reading
from tests.wire.rig import Rig
from tests.wire.unit import LAST_CHUNK, SSE_HEAD, chunk

USUAL_END = (b'"finish_reason":null}]}\n\n\r\n',)


def token(text: str, number: int, ways: int = OPEN, finish: str | None = None) -> bytes:
    """An event of a token, as engines write it that were asked for what these ways need."""
    choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    event: dict[str, Any] = {"id": "c", "object": "chat.completion.chunk", "choices": [choice]}
    if ways & TOKENS:
        choice["token_ids"] = [number]
    if ways & COUNTS:
        event["usage"] = {"prompt_tokens": 9, "completion_tokens": number, "total_tokens": number + 9}
    return b"data: " + orjson.dumps(event) + b"\n\n"


class Passed(NamedTuple):
    """What has become of a stream: what its client got, and what is counted and kept of it."""

    body: bytes
    text: str
    pieces: list[int]
    ids: list[int]
    shown: int
    is_whole: bool


def passed(rig: Rig) -> Passed:
    """The same, of a stream that went well."""
    response = rig.response
    assert (rig.bugs, rig.failures, rig.ends) == ([], [], ["committed", "done"])
    assert response.sent == len(rig.shown)
    assert response.replay is not None
    transcript, log = response.replay.read(), response.tokens
    assert isinstance(transcript, Transcript)
    shown = transcript.shown
    ids = list(getattr(log, "ids", ()))
    counted = getattr(log, "shown", 0)
    return Passed(
        rig.body(), str(shown.text), [size for size in shown.pieces if size], ids, counted, transcript.is_done
    )


def fed(reads: Iterable[bytes], ways: int) -> Rig:
    """A stream that comes in these reads behind its head and its first token."""
    rig = Reading()
    rig.ways = ways
    rig.feed([SSE_HEAD + chunk(token("", 0, ways)), *reads])
    while rig.due:
        rig.turn()
    return rig


def joined(chunks: list[bytes], cuts: Iterable[int]) -> list[bytes]:
    """Reads of whole chunks, cut before some of them."""
    places = sorted({0, *(cut % len(chunks) for cut in cuts), len(chunks)})
    return [b"".join(chunks[start:end]) for start, end in pairwise(places)]


def cut(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    """Reads that are cut anywhere."""
    places = sorted({0, *(cut % len(data) for cut in cuts), len(data)})
    return [data[start:end] for start, end in pairwise(places)]


TEXTS = st.lists(st.sampled_from([" a", "", " yes", "\n\n", "\r", '"abort"', "é", " long" * 99]), max_size=40)
WAYS = st.sampled_from([OPEN, OPEN | TOKENS, OPEN | COUNTS])
CUTS = st.lists(st.integers(0, 1 << 20), max_size=9)


@given(TEXTS, WAYS, CUTS, st.sets(st.integers(0, 40), max_size=2), st.booleans())
def test_a_stream_is_passed_on_and_kept_alike_however_its_chunks_come(
    texts: list[str], ways: int, cuts: list[int], odd: set[int], has_last: bool
) -> None:
    events = [token(text, number, ways) for number, text in enumerate(texts, 1)]
    chunks = [b"00" + chunk(event) if number in odd else chunk(event) for number, event in enumerate(events)]
    chunks.append(chunk(token("", len(texts) + 1, ways, "stop")))
    if has_last:
        # Engines may leave it out.
        chunks.append(chunk(b"data: [DONE]\n\n"))
    alone = fed([*chunks, LAST_CHUNK], ways)
    expected = passed(alone)
    assert expected.text == "".join(texts)
    several = fed([*(reads := joined(chunks, cuts)), LAST_CHUNK], ways)
    assert passed(several) == expected
    assert several.response.events == alone.response.events == len(chunks) + 1
    # Between two reads is one gap.
    assert sum(several.lease.unit_state.gaps_ms) == len(reads)
    assert passed(fed(cut(b"".join(chunks) + LAST_CHUNK, cuts), ways)) == expected


@given(st.integers(2, 20), CUTS, WAYS)
def test_whole_chunks_come_out_in_one_piece_and_do_not_wait(many: int, cuts: list[int], ways: int) -> None:
    chunks = [chunk(token(f" {number}", number, ways)) for number in range(many)]
    rig = fed(chunks[:1], ways)
    for read in joined(chunks[1:], cuts):
        before, written = len(rig.shown), list[bytes]()
        rig.response._write = written.append
        rig.feed([read])
        assert not rig.due
        assert (len(written), rig.response.sent - before) == (1, sum(map(len, written)))
        rig.shown += written[0]


def test_a_stream_that_repeats_itself_is_seen_however_its_chunks_come() -> None:
    chunks = [chunk(token(text, 0)) for text in (" to", " and", " fro") * 12]
    for size in (1, 2, 5, 36):
        assert fed(joined(chunks, range(0, 36, size)), OPEN).response.repeats


DAMAGES = {
    "a size too large": lambda size: b"%x" % (size + 1),
    "a size too small": lambda size: b"%x" % (size - 1),
    "no size": lambda _: b"zz",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@given(many=st.integers(3, 9), at=st.integers(0, 1 << 20), ways=WAYS)
def test_of_a_read_with_a_malformed_chunk_nothing_is_passed_on(
    damage: Any, many: int, at: int, ways: int
) -> None:
    events = [token(f" {number}", number, ways) for number in range(many)]
    chunks = [*map(chunk, events)]
    at %= many - 1
    chunks[at] = damage(len(events[at])) + chunks[at][chunks[at].index(b"\r\n") :]
    rig = fed([], ways)
    before = rig.shown
    rig.feed([b"".join(chunks)])
    assert (rig.shown, rig.wire.closed) == (before, True)
    assert [failure.kind for failure in rig.failures] == [FailureKind.GARBAGE]


class Recogniser(UnitConnection):
    """Only recognises tokens: what else comes is read by nobody."""

    def __init__(self, ends: tuple[bytes, ...]) -> None:
        scheduler = ReadScheduler(lambda _turn: None, LIMITS.reply_bytes_per_turn)
        super().__init__(cast(Any, SimpleNamespace(read_scheduler=scheduler)))
        self.raw = cast(TokenSink, self)
        self.usual_ends = ends
        self.tokens: list[bytes] = []

    def on_token(self, chunk: bytes) -> None:
        self.tokens.append(chunk)

    def on_tokens(self, data: bytes, chunks: list[bytes]) -> None:
        assert b"".join(chunks) == data
        self.tokens += chunks

    def _parse(self, data: bytes) -> list[bytes]:
        return []

    def _put_aside(self, data: bytes) -> None:
        """It waits for ever."""


def recognised(data: bytes, ends: tuple[bytes, ...] = USUAL_END) -> list[bytes]:
    """The chunks that are passed on unread of a read, or none."""
    conn = Recogniser(ends)
    conn.data_received(data)
    return conn.tokens


USUAL = token(" a", 1)
ODD = {
    "cut": chunk(USUAL)[:-1],
    "cut within its size": chunk(USUAL)[1:],
    "its begin": chunk(USUAL)[:9],
    "a size spelt oddly": b"0" + chunk(USUAL),
    "the last": LAST_CHUNK,
    "an empty line": b"\r\n",
    "half an event": chunk(USUAL[:-1]),
    "two events": chunk(USUAL * 2),
    "two events, one of them as a chunk": chunk(USUAL + b"\r\n" + USUAL),
    "a finished choice": chunk(token(" a", 1, finish="stop")),
    "a comment": chunk(b": working\n\n"),
    "another field": chunk(b"id: 1\n" + USUAL),
    "an aborted answer": chunk(USUAL.replace(b'" a"', b'"abort"')),
    "two lines": chunk(USUAL.replace(b"},", b"}\ndata: ,")),
    "an error": chunk(b'data: {"error":{}}\n\n'),
    "more than a part": chunk(token(" x" * PART_BYTES, 1)),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_one_that_is_read_by_itself_is_read_between_others(odd: bytes) -> None:
    usual = chunk(USUAL)
    assert recognised(odd) == []
    for read in (odd + usual, usual + odd, usual + odd + usual, usual * 2 + odd):
        assert recognised(read) == []
    assert recognised(usual * 3) == [usual] * 3


@given(st.integers(1, 5), st.integers(0, 1 << 20), st.integers(0, 255))
def test_whatever_byte_is_another_several_are_recognised_only_if_each_is(
    many: int, at: int, byte: int
) -> None:
    data = bytearray(chunk(USUAL) * many)
    data[at % len(data)] = byte
    for ends in (USUAL_END, ANY_ENDS):
        found = recognised(bytes(data), ends)
        assert b"".join(found) in (b"", data)
        assert all(recognised(each, ends) == [each] for each in found)


@given(st.lists(st.sampled_from(["", " a", " bc", "\r", '"abort"']), min_size=2, max_size=20))
def test_several_are_recognised_if_each_is_unless_they_are_too_many(texts: list[str]) -> None:
    chunks = [chunk(token(text, 1)) for text in texts]
    assert all(recognised(each) == [each] for each in chunks)
    assert recognised(b"".join(chunks)) == chunks
    assert recognised(b"".join(chunks) * PART_BYTES) == []


def test_of_a_stream_that_flows_as_fast_as_it_can_a_turn_takes_so_much_and_others_come_between() -> None:
    conn, flood = Recogniser(USUAL_END), chunk(token("a" * 100, 1)) * 20
    for _ in range(LIMITS.reply_bytes_per_turn // 1000):
        conn.data_received(flood)
    taken = sum(map(len, conn.tokens))
    assert 0 <= taken - LIMITS.reply_bytes_per_turn <= len(flood)
    conn.data_received(small := chunk(token(" a", 1)) * 2)
    assert sum(map(len, conn.tokens)) == taken + len(small)
