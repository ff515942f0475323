"""The load tools' reader of replies tells one that is whole from one that was cut."""

from __future__ import annotations

import pytest

from loadtests.wire.messages import LAST_CHUNK, SSE_HEAD, chunk, whole
from loadtests.wire.reply import IncompleteReadError, Lines, MalformedError, Reply

EVENTS = [b"data: 1\n\n", b"data: 2\n\n"]
STREAM = SSE_HEAD + b"".join(map(chunk, EVENTS)) + LAST_CHUNK
UNTIL_CLOSED = b"HTTP/1.0 503 Service Unavailable\r\nConnection: close\r\n\r\nno server"


def fed(*pieces: bytes) -> Reply:
    reply = Reply()
    for piece in pieces:
        reply.feed(piece)
    return reply


@pytest.mark.parametrize("data", [whole(b"{}"), STREAM, whole(b"no", status=b"429 Too Many Requests")])
def test_a_reply_is_whole_with_its_last_byte(data: bytes) -> None:
    for cut in range(1, len(data)):
        reply = fed(data[:cut])
        assert not reply.is_whole
        assert reply.feed(data[cut:])
        assert reply.body in (b"{}", b"".join(EVENTS), b"no")
        assert reply.keeps_connection


@pytest.mark.parametrize("data", [whole(b"{}"), STREAM])
def test_a_reply_that_is_cut_says_so(data: bytes) -> None:
    for cut in range(len(data)):
        reply = fed(data[:cut])
        with pytest.raises(IncompleteReadError):
            reply.feed_end()


def test_a_reply_that_ends_with_its_connection_is_whole_then() -> None:
    reply = fed(UNTIL_CLOSED)
    assert not reply.is_whole
    reply.feed_end()
    assert (reply.is_whole, reply.status, reply.body, reply.keeps_connection) == (
        True,
        503,
        b"no server",
        False,
    )


def test_replies_of_1xx_are_passed_over() -> None:
    reply = fed(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\na: b\r\n\r\n", whole(b"{}"))
    assert (reply.is_whole, reply.status, reply.body) == (True, 200, b"{}")


@pytest.mark.parametrize(
    "pieces",
    [(b"\xff\xfe",), (whole(b"{}") + whole(b"{}"),), (whole(b"{}"), b"a"), (whole(b"{}") + b"a",)],
    ids=["noise", "two", "then more", "and more"],
)
def test_what_is_no_single_reply_is_malformed(pieces: tuple[bytes, ...]) -> None:
    with pytest.raises(MalformedError):
        fed(*pieces)


def test_a_reply_that_closes_the_connection_is_known() -> None:
    assert not fed(whole(b"{}", lines=b"Connection: close\r\n")).keeps_connection


def test_pieces_of_a_200_are_handed_on_and_those_of_a_refusal_kept() -> None:
    taken: list[bytes] = []
    reply = Reply(taken.append)
    reply.feed(STREAM)
    assert (taken, reply.body) == (EVENTS, b"")
    reply = Reply(taken.append)
    reply.feed(whole(b"no", status=b"503 Service Unavailable"))
    assert (taken, reply.body) == (EVENTS, b"no")


def test_what_a_taker_raises_is_raised_as_it_is() -> None:
    def take(_: bytes) -> None:
        raise KeyError("choices")

    with pytest.raises(KeyError):
        Reply(take).feed(whole(b"{}"))


def test_lines_are_whole_wherever_pieces_end() -> None:
    data = b"".join(EVENTS)
    for cut in range(len(data)):
        taken: list[bytes] = []
        lines = Lines(taken.append)
        lines(data[:cut])
        lines(data[cut:] + b"no end")
        assert taken == [b"data: 1", b"", b"data: 2", b""]
