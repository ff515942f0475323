"""The way of a reply through the gate, for every point at which the network may cut it in two."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from cellgate.proxy.http.errors import FailureKind
from cellgate.proxy.http.reply import ReplyReader
from cellgate.proxy.resume.replay import TAIL_BYTES
from tests.wire.rig import Rig
from tests.wire.unit import LAST_CHUNK, SSE_HEAD, STREAM, TOKENS, chunk, whole

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
PLAIN_CHUNKED = PLAIN + b"Transfer-Encoding: chunked\r\n\r\n"
EVENTS = b"".join(TOKENS)
CRLF_EVENTS = EVENTS.replace(b"\n", b"\r\n")

MIXED_EVENTS = TOKENS[0][:-1] + b"\r\n" + TOKENS[1][:-2] + b"\r\n\r" + TOKENS[2][:-2] + b"\r\r\n"
LONGER = b'data: {"token": "abcdef"}\n\n'
COMMENT = b": working\n\n"
EARLY = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nOpenAI-Version: a\r\n\r\n"
HINTS = EARLY.replace(b"Link: </a>\r\n", b"")
ERROR = b'data: {"error": {"message": "x"}}\n\n'


class Case(NamedTuple):
    """What a unit sends, and what the client must get. `close`: the unit closes at the end. Trailers and
    `hints`, heads before the reply's own, are for clients of HTTP/1.1, as far as they are on the list.
    """

    sent: bytes
    body: bytes
    close: bool = False
    status: int = 200
    trailers: tuple[tuple[str, str], ...] = ()
    hints: bytes = b""


def pieces(data: bytes, size: int) -> bytes:
    """`data` in chunks of `size`."""
    return b"".join(chunk(data[at : at + size]) for at in range(0, len(data), size))


CASES = {
    "event for event": Case(STREAM, EVENTS),
    "events that end in CRLF": Case(SSE_HEAD + pieces(CRLF_EVENTS, 22) + LAST_CHUNK, CRLF_EVENTS),
    "line ends of all kinds": Case(SSE_HEAD + pieces(MIXED_EVENTS, 20) + LAST_CHUNK, MIXED_EVENTS),
    "a byte order mark before a comment": Case(
        SSE_HEAD + pieces(b"\xef\xbb\xbf" + COMMENT + EVENTS, 9) + LAST_CHUNK, EVENTS
    ),
    "all events in a chunk": Case(SSE_HEAD + chunk(EVENTS) + LAST_CHUNK, EVENTS),
    "a byte in a chunk": Case(SSE_HEAD + pieces(EVENTS, 1) + LAST_CHUNK, EVENTS),
    "chunks across events": Case(SSE_HEAD + pieces(EVENTS, 21) + LAST_CHUNK, EVENTS),
    "comments in between": Case(
        SSE_HEAD + b"".join(chunk(event) + chunk(COMMENT) for event in TOKENS) + LAST_CHUNK,
        b"".join(event + COMMENT for event in TOKENS),
    ),
    "an empty line between events in a chunk": Case(
        SSE_HEAD + chunk(TOKENS[0]) + chunk(TOKENS[1] + b"\r\n" + TOKENS[2]) + LAST_CHUNK,
        TOKENS[0] + TOKENS[1] + b"\r\n" + TOKENS[2],
    ),
    "trailers": Case(
        STREAM[:-2] + b"X-Total-Time: b\r\nX-A: 1\r\nX-Queue-Time: 0\r\n\r\n",
        EVENTS,
        trailers=(("x-total-time", "b"), ("x-queue-time", "0")),
    ),
    "chunk extensions": Case(STREAM.replace(b"\r\n14\r\n", b"\r\n14;a=b\r\n"), EVENTS),
    "sizes spelt oddly": Case(SSE_HEAD + (b"001B\r\n" + LONGER + b"\r\n") * 3 + LAST_CHUNK, LONGER * 3),
    "an unfinished event at the end": Case(
        STREAM[:-5] + chunk(b"data: [DON") + LAST_CHUNK, EVENTS + b"data: [DON"
    ),
    "stream with a length": Case(SSE + b"Content-Length: 80\r\n\r\n" + EVENTS, EVENTS),
    "stream until close": Case(SSE + b"\r\n" + EVENTS, EVENTS, close=True),
    "stream of HTTP/1.0": Case(SSE.replace(b"1.1", b"1.0") + b"\r\n" + EVENTS, EVENTS, close=True),
    "interim heads before": Case(b"HTTP/1.1 100 Continue\r\n\r\n" + EARLY + STREAM, EVENTS, hints=HINTS),
    "plain with a length": Case(whole(b'{"a": 1}'), b'{"a": 1}'),
    "plain and empty": Case(whole(b""), b""),
    "plain in chunks": Case(PLAIN_CHUNKED + pieces(b'{"a": "b"}\r\n', 3) + LAST_CHUNK, b'{"a": "b"}\r\n'),
    "plain in chunks with trailers": Case(
        PLAIN_CHUNKED + chunk(b"{}") + b"0\r\nX-Total-Time: b\r\nX-A: 1\r\n\r\n",
        b"{}",
        trailers=(("x-total-time", "b"),),
    ),
    "plain until close and empty": Case(PLAIN + b"\r\n", b"", close=True),
    "an error with a stream's type": Case(
        SSE.replace(b"200 OK", b"400 Bad Request") + b"Content-Length: 2\r\n\r\n{}", b"{}", status=400
    ),
    "a stream that is compressed": Case(
        SSE
        + b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunk(b"\x1f\x8b")
        + LAST_CHUNK,
        b"\x1f\x8b",
    ),
    "no content": Case(b"HTTP/1.1 204 No Content\r\n\r\n", b"", status=204),
    "not modified": Case(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\n\r\n", b"", status=304),
}


def relayed(case: Case, reads: list[bytes], *, http10: bool) -> Rig:
    """The rig after these reads, if all went as it must."""
    rig = Rig(http10=http10).feed(reads, close=case.close)
    assert not rig.bugs
    assert rig.ends == ["committed", "done"], (rig.ends, rig.failures, reads)
    if case.hints and not http10:
        assert rig.shown.lower().startswith(case.hints.lower()), reads
        rig.shown = rig.shown[len(case.hints) :]
    assert rig.response.sent == len(rig.shown)
    reply = rig.reply()
    trailers = [] if http10 else list(case.trailers)
    assert (reply.status, reply.body, reply.whole) == (case.status, case.body, True), reads
    assert reply.trailers == trailers, reads
    assert rig.kept == ([] if case.close else [rig.conn])
    return rig


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_body_is_the_same_wherever_the_reply_is_cut_in_two_and_in_small_reads(case: Case) -> None:
    for at in range(len(case.sent)):
        relayed(case, [case.sent[:at], case.sent[at:]], http10=at % 3 == 0)
    for size in (1, 3, 17):
        reads = [case.sent[at : at + size] for at in range(0, len(case.sent), size)]
        relayed(case, reads, http10=False)


def test_what_looks_like_the_end_of_a_chunk_inside_of_one_is_not_taken_for_it() -> None:
    second = chunk(TOKENS[1] + b"\r\n" + TOKENS[2])
    at = second.index(b"\n\n\r\n") + 4
    case = Case(SSE_HEAD, TOKENS[0] + TOKENS[1] + b"\r\n" + TOKENS[2])
    for more in range(at + 1, len(second)):
        reads = [SSE_HEAD + chunk(TOKENS[0]), second[:at], second[at:more], second[more:], LAST_CHUNK]
        relayed(case, reads, http10=False)


def test_a_connection_serves_one_reply_after_the_other() -> None:
    rig = Rig()
    for number, case in enumerate(CASES.values()):
        if not case.close:
            if number:
                rig.again()
            for at in range(0, len(case.sent), 11):
                rig.feed([case.sent[at : at + 11]])
            assert (rig.reply().body, rig.reply().whole) == (case.body, True)


def test_events_that_are_chunks_go_on_as_they_are_and_others_are_framed_anew_by_event() -> None:
    rig = Rig().feed([SSE_HEAD, *map(chunk, TOKENS), LAST_CHUNK])
    assert rig.shown.endswith(b"\r\n\r\n" + b"".join(map(chunk, TOKENS)) + LAST_CHUNK)
    assert rig.attempt.events == len(TOKENS)
    for size in (7, 33, 40):
        rig = Rig().feed(
            [SSE_HEAD, *(chunk(EVENTS[at : at + size]) for at in range(0, 80, size)), LAST_CHUNK]
        )
        reply = rig.reply()
        assert reply.chunks is not None
        assert sum(reply.chunks) == len(EVENTS) == 80
        assert all(length % 20 == 0 for length in reply.chunks)


def test_nothing_is_shown_before_the_first_event_with_data() -> None:
    rig = Rig()
    for data in (SSE_HEAD, chunk(COMMENT), chunk(b"event: ping\n\n"), chunk(TOKENS[0][:-1])):
        rig.feed([data])
        assert (rig.shown, rig.lease.committed) == (b"", False)
    rig.feed([chunk(b"\n")])
    assert (rig.lease.committed, rig.ends) == (True, ["committed"])
    assert rig.shown.endswith(chunk(TOKENS[0]))


def test_an_event_over_16_kib_goes_on_before_it_is_complete_and_no_sooner() -> None:
    rig = Rig().feed([SSE_HEAD, chunk(TOKENS[0])])
    before = len(rig.shown)
    rig.feed([chunk(b"data: " + b"x" * (TAIL_BYTES - 6))])
    assert len(rig.shown) == before
    rig.feed([chunk(b"x")])
    assert len(rig.shown) > before + TAIL_BYTES
    rig.feed([chunk(b"y\n\n"), chunk(TOKENS[1]), LAST_CHUNK])
    large = b"data: " + b"x" * (TAIL_BYTES - 5) + b"y\n\n"
    assert (rig.reply().body, rig.reply().whole) == (TOKENS[0] + large + TOKENS[1], True)


def test_an_error_in_the_middle_is_a_failure_and_never_shown_however_it_arrives() -> None:
    in_two = [[chunk(ERROR)[:cut], chunk(ERROR)[cut:]] for cut in range(1, len(chunk(ERROR)))]
    with_a_token = [chunk(TOKENS[1]), chunk(TOKENS[2] + ERROR + TOKENS[3])]
    for reads, shown in (*((each, 1) for each in in_two), (with_a_token, 3)):
        rig = Rig().feed([SSE_HEAD, chunk(TOKENS[0]), *reads, LAST_CHUNK])
        assert rig.shown.endswith(b"\r\n\r\n" + b"".join(map(chunk, TOKENS[:shown])))
        assert (rig.ends, rig.wire.closed) == (["committed", "failed"], True)
        assert [failure.kind for failure in rig.failures] == [FailureKind.STREAM_ERROR]
    rig = Rig().feed([SSE_HEAD, chunk(COMMENT), chunk(ERROR)])
    assert (rig.shown, rig.ends, rig.wire.closed) == (b"", ["failed"], True)
    assert rig.failures[0].kind is FailureKind.FIRST_EVENT_ERROR


HEADS = {
    "with a length": b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n",
    "in chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    "of a stream": SSE_HEAD,
    "an error": b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\n",
    "interim before": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n",
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_the_reply_to_head_ends_with_its_head(head: bytes) -> None:
    for at in range(len(head)):
        rig = Rig(to_head=True).feed([head[:at], head[at:]])
        assert rig.ends == ["committed", "done"]
        assert rig.reply().whole
        # Whatever was announced does not come, so the next reply begins here.
        rig.again()
        rig.feed([head])
        assert rig.reply().whole
    # A body costs the connection.
    rig = Rig(to_head=True).feed([head + b"x" * 99])
    assert (rig.ends, rig.wire.closed, rig.kept) == (["failed"], True, [])


@pytest.mark.parametrize("extra", [b"x", STREAM, b"\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"])
def test_of_a_read_with_a_second_reply_nothing_goes_on(extra: bytes) -> None:
    rig = Rig().feed([SSE_HEAD, chunk(TOKENS[0])])
    before = rig.shown
    rig.feed([chunk(TOKENS[1]) + LAST_CHUNK + extra])
    assert (rig.shown, rig.ends, rig.wire.closed) == (before, ["committed", "failed"], True)


@pytest.mark.parametrize("extra", [b"\n", b"\r\n\r\n", b"\r"])
def test_empty_lines_behind_a_reply_stay_behind(extra: bytes) -> None:
    rig = Rig().feed([SSE_HEAD, chunk(TOKENS[0]), chunk(TOKENS[1]) + LAST_CHUNK + extra])
    assert (rig.reply().body, rig.reply().whole) == (TOKENS[0] + TOKENS[1], True)


@pytest.mark.parametrize("extra", [chunk(TOKENS[3]), b"x"])
def test_bytes_on_an_idle_connection_close_it_and_go_nowhere(extra: bytes) -> None:
    rig = Rig().feed([SSE_HEAD, *map(chunk, TOKENS[:2]), LAST_CHUNK])
    shown = rig.shown
    rig.feed([extra])
    assert (rig.shown, rig.wire.closed) == (shown, True)


def test_a_connection_that_is_to_be_closed_is_not_kept() -> None:
    for keep in (b"close", b"Close, x"):
        rig = Rig().feed([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: %b\r\n\r\n{}" % keep])
        assert (rig.ends, rig.kept, rig.wire.closed) == (["committed", "done"], [], True)
        assert rig.reply().get("connection") is None


@pytest.mark.parametrize(
    ("method", "reply"),
    [("feed", whole()), ("on_body", whole().replace(b"200 OK", b"200 Okay"))],
    ids=["usual", "unusual"],
)
def test_a_defect_while_a_reply_is_parsed_is_not_held_against_the_unit(
    method: str, reply: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReplyReader, method, lambda *_: 1 / 0)
    rig = Rig().feed([reply])
    assert len(rig.bugs) == 1
    assert [failure.kind for failure in rig.failures] == [FailureKind.INTERNAL]
    assert rig.wire.closed


@pytest.mark.parametrize("data", [chunk(TOKENS[1]), chunk(TOKENS[1]) * 2])
def test_a_defect_of_the_gate_is_reported_and_ends_the_exchange(data: bytes) -> None:
    rig = Rig().feed([SSE_HEAD, chunk(TOKENS[0])])
    rig.response._write = rig.send = None  # type: ignore[method-assign, assignment]
    rig.feed([data])
    assert [type(bug) for bug in rig.bugs] == [TypeError]
    assert [failure.kind for failure in rig.failures] == [FailureKind.INTERNAL]
    assert rig.wire.closed
