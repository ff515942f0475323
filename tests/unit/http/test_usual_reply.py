"""Which replies are taken for the one that came before, and need no parser."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import pytest

from cellgate.proxy.http.reply import BYTES_MAX, ReplyReader, UsualReply, usual_reply
from tests.unit.http.test_fetch import TIMEOUT_S, fetch_of
from tests.wire.stage import simulated, stage
from tests.wire.unit import Received, whole

EARLIER, LATER = b"Mon, 23 Nov 2026 18:43:47 GMT", b"Mon, 23 Nov 2026 18:43:48 GMT"


def dated(time: bytes, body: bytes = b"ok", status: int = 200) -> bytes:
    """As uvicorn writes it."""
    head = b"HTTP/1.1 %d OK\r\ndate: %b\r\nserver: uvicorn\r\ncontent-length: %d\r\n\r\n"
    return head % (status, time, len(body)) + body


def usual(data: bytes) -> UsualReply | None:
    """What is learnt of a reply that was read at once."""
    reader = ReplyReader()
    reader.expect(to_head=False)
    pieces = reader.feed(data)
    assert reader.ended, reader.misbehaved
    assert reader.head is not None
    return usual_reply(data, reader.head, b"".join(pieces), keep_alive=reader.keep_alive)


UNLIKE = {
    "another status": dated(LATER, status=503),
    "another body": dated(LATER, b"no"),
    "a longer body": dated(LATER, b"okay"),
    "a part of it": dated(LATER)[:-1],
    "more than it": dated(LATER) + b"H",
    "a field instead of the time": dated(b"a\r\nconnection: close\r\nx: aaaa"),
    "a control character in the time": dated(LATER[:-1] + b"\0"),
    "nothing": b"",
}


@pytest.mark.parametrize("data", UNLIKE.values(), ids=UNLIKE)
def test_only_the_time_of_the_usual_reply_may_differ(data: bytes) -> None:
    known = usual(dated(EARLIER))
    assert known is not None
    assert known.is_like(dated(EARLIER))
    assert known.is_like(dated(LATER))
    assert not known.is_like(data)


def test_without_a_date_nothing_may_differ() -> None:
    known = usual(whole(b"ok"))
    assert known is not None
    assert known.is_like(whole(b"ok"))
    assert not known.is_like(whole(b"no"))


def test_a_date_in_a_body_is_no_time() -> None:
    known = usual(whole(b"\r\ndate: " + EARLIER + b"\r\n"))
    assert known is not None
    assert not known.is_like(whole(b"\r\ndate: " + LATER + b"\r\n"))


@pytest.mark.parametrize(
    "data",
    [
        whole(b"x" * BYTES_MAX),
        whole(b"ok", head="Connection: close\r\n"),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
    ],
    ids=["large", "the last of its connection", "in chunks", "without a body"],
)
def test_other_replies_are_always_parsed(data: bytes) -> None:
    assert usual(data) is None


@simulated
async def test_replies_change_as_the_server_does() -> None:
    """The same twice, another one, one in two reads, and the first one again, on one connection."""
    first, other = dated(EARLIER), dated(LATER, b"no", 503)
    answers: Iterator[tuple[bytes, ...]] = iter(
        [
            (first,),
            (dated(LATER),),
            (other,),
            (other[:40], other[40:]),
            (other,),
            (first[:9], first[9:]),
            (first,),
        ]
    )

    async def script(request: Received) -> None:
        for part in next(answers):
            request.write(part)
            await asyncio.sleep(0.1)

    async with stage(script) as here:
        fetch = fetch_of(here)
        replies = [await fetch("GET", "/health", timeout_s=TIMEOUT_S) for _ in range(7)]
        ok, bad = (200, b"ok", "2"), (503, b"no", "2")
        said = [(reply.status, reply.body, reply.headers["content-length"]) for reply in replies]
        assert said == [ok, ok, bad, bad, bad, ok, ok]
        assert [connection.requests for connection in here.unit.connections] == [7]


@pytest.mark.parametrize("length", [b"", b" ", b"+2", b"2\r\ncontent-length: 3"])
def test_a_head_that_was_seen_with_a_length_says_nothing_of_one_without(length: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nx-seen: 1%b\r\ncontent-length: %%b\r\n\r\nok" % length.hex().encode()
    for said, fails in ((b"2", False), (length, True)):
        reader = ReplyReader()
        reader.expect(to_head=False)
        with suppress(ValueError):
            reader.feed(head % said)
        assert bool(reader.misbehaved) is fails, reader.misbehaved
