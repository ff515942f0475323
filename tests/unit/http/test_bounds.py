"""What one client can make the gate do in one turn of the loop, and in all: counted in bytecodes, so that the
same is seen on every machine. Each shape comes also twice as long, and may take no more than twice the work.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import pytest

from cellgate.proxy.config.limits import LIMITS, REACHED
from cellgate.proxy.config.settings import KIB, MIB, Limits
from cellgate.proxy.http.errors import FailureKind
from cellgate.proxy.http.server import PIPELINED_BYTES
from tests.wire.door import Door
from tests.wire.unit import LAST_CHUNK, chunk

TURN = 300_000
"""Bytecodes: some 8 ms. A read full of the shortest requests there are takes most of it."""
EMPTY_TURN = 100
"""A turn in which nothing is parsed."""
READ = 256_000
"""The most that uvloop reads at once."""
GET = b"GET /x HTTP/1.1\r\nHost: a\r\n"
CHUNKED = b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


def reads(data: bytes) -> list[bytes]:
    """As the network would bring it."""
    return [data[at : at + READ] for at in range(0, len(data), READ)]


def fed(data: bytes, limits: Limits | None = None) -> Door:
    """A connection on which this came."""
    door = Door(limits)
    door.feed(reads(data))
    return door


SHAPES: dict[str, Callable[[int], bytes]] = {
    "short lines": lambda n: GET + b"a:\r\n" * 4 * n + b"\r\n",
    "lines that are read": lambda n: GET + b"upgrade: x\r\n" * n + b"\r\n",
    "connection lines": lambda n: GET + b"connection: a\r\n" * n + b"\r\n",
    "connection tokens": lambda n: GET + b"connection: " + b"a," * n + b"\r\n\r\n",
    "tokens and upgrades": lambda n: (
        GET + b"connection: " + b"a," * n + b"\r\n" + b"upgrade:\r\n" * n + b"\r\n"
    ),
    "forwarders": lambda n: GET + b"x-forwarded-for: a\r\n" * n + b"\r\n",
    "a long name": lambda n: GET + b"a" * 8 * n + b": b\r\n\r\n",
    "absurd names": lambda n: GET + b"!#$%&'*+-.^_`|~: b\r\n" * n + b"\r\n",
    "a long target": lambda n: b"GET /" + b"%2f" * n + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "pipelined": lambda n: (GET + b"\r\n") * n,
    "pipelined bodies": lambda n: (GET + b"Content-Length: 1\r\n\r\nx") * n,
    "small chunks": lambda n: CHUNKED + chunk(b"ab") * 8 * n + LAST_CHUNK,
    "chunks of one byte": lambda n: CHUNKED + chunk(b"a") * 8 * n + LAST_CHUNK,
    "a chunk extension": lambda n: CHUNKED + b"1;" + b"e" * 8 * n + b"\r\na\r\n" + LAST_CHUNK,
    "chunk extensions": lambda n: CHUNKED + b"1;eeeee\r\na\r\n" * n + LAST_CHUNK,
    "trailers": lambda n: CHUNKED + b"0\r\n" + b"a:\r\n" * n + b"\r\n",
    "empty lines": lambda n: b"\r\n" * 8 * n + GET + b"\r\n",
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_work_is_linear_and_a_turn_is_bounded(shape: Callable[[int], bytes]) -> None:
    once, twice = fed(shape(1200)), fed(shape(2400))
    assert max(once.turns + twice.turns) <= TURN
    assert sum(twice.turns) <= 2.2 * sum(once.turns) + 1000
    assert len(once.requests) + len(once.failures) >= 1


def test_the_head_that_took_five_seconds() -> None:
    tokens = b",".join(b"t%d" % n for n in range(3000))
    before = REACHED["header_lines"]
    door = fed(GET + b"connection: " + tokens + b"\r\n" + b"upgrade: x\r\n" * 2700 + b"\r\n")
    assert door.wire.written.startswith(b"HTTP/1.1 431 ")
    assert sum(door.turns) < TURN
    assert REACHED["header_lines"] == before + 1


def test_as_many_lines_as_are_allowed_pass_and_one_more_does_not() -> None:
    for lines, status in ((LIMITS.header_lines - 1, b"200"), (LIMITS.header_lines, b"431")):
        door = fed(GET + b"a: b\r\n" * lines + b"\r\n")
        assert door.wire.written.startswith(b"HTTP/1.1 " + status)


def test_as_many_connection_tokens_as_are_allowed_pass_and_one_more_does_not() -> None:
    most = LIMITS.connection_tokens
    for tokens, status in ((most, b"200"), (most + 1, b"400")):
        for sep in (b"connection: a", b","):
            lines = b"connection: a" + (sep + b"a" if sep == b"," else b"\r\n" + sep) * (tokens - 1) + b"\r\n"
            assert fed(GET + lines + b"\r\n").wire.written.startswith(b"HTTP/1.1 " + status), lines


def test_pipelined_requests_are_begun_a_few_at_a_turn_and_answered_in_order() -> None:
    door = fed(b"".join(b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % n for n in range(2000)))
    assert [request.path for request in door.requests] == [b"/%d" % n for n in range(2000)]
    assert max(door.answered) == LIMITS.pipelined_requests_per_turn
    assert max(door.turns) <= TURN


def test_reading_pauses_while_something_is_left_for_another_turn() -> None:
    waiting = (GET + b"\r\n") * 1000
    door = Door()
    door.client.data_received(waiting)
    assert (len(door.requests), door.wire.reading) == (LIMITS.pipelined_requests_per_turn, False)
    door.rest()
    assert len(door.requests) == 1000
    assert door.wire.reading


def test_behind_a_request_in_flight_a_client_is_read_on_up_to_a_bound() -> None:
    waiting = (GET + b"\r\n") * 1000
    door = Door(holds=True)
    door.client.data_received(waiting)
    assert door.wire.reading
    for _ in range(PIPELINED_BYTES // len(waiting)):
        assert door.wire.reading
        door.client.data_received(waiting)
    door.client.data_received(waiting)
    assert (len(door.requests), door.wire.reading) == (1, False)


def test_a_body_in_large_chunks_takes_one_turn_a_read() -> None:
    door = fed(CHUNKED + chunk(b"x" * 64 * KIB) * 64 + LAST_CHUNK)
    assert len(door.requests[0].body) == 4 * MIB
    assert sum(work > EMPTY_TURN for work in door.turns) <= 4 * MIB // READ + 2


@pytest.mark.parametrize("size", [1, 2, 7, 1000, READ])
def test_a_body_is_the_same_in_chunks_of_any_size(size: int) -> None:
    body = bytes(range(256)) * 200
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    door = fed(CHUNKED + b"".join(map(chunk, pieces)) + LAST_CHUNK)
    assert [request.body for request in door.requests] == [body]


def test_more_chunks_than_any_client_has_reason_to_send_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellgate.proxy.http.request.LIMITS", replace(LIMITS, body_chunks=5000))
    assert len(fed(CHUNKED + chunk(b"ab") * 5000 + LAST_CHUNK).requests) == 1
    door = fed(CHUNKED + chunk(b"ab") * 20_000)
    assert [failure.kind for failure in door.failures] == [FailureKind.BAD_REQUEST]
    assert "send larger ones" in door.failures[0].message


def test_a_body_in_small_chunks_takes_the_memory_of_the_body() -> None:
    count = 100_000
    sent = reads(CHUNKED + chunk(b"ab") * count)
    door = Door()
    door.client.data_received(sent[0][:1000])
    tracemalloc.start()
    try:
        for data in sent[1:]:
            door.feed([data])
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # What is left is the body, what a bytearray has to spare, and nothing per chunk.
    assert held < 2 * 2 * count
    assert door.memory.used >= 2 * (count - READ)


def test_slow_heads_and_bodies_cost_a_little_a_byte_and_end_by_their_deadline() -> None:
    for begun in (GET, CHUNKED):
        door = Door()
        door.feed([begun[at : at + 1] for at in range(len(begun))])
        for _ in range(600):
            door.time += 0.25
            door.client.tick(door.time)
            if not door.wire.closed:
                door.feed([b"a"] if begun is GET else chunk(b"a").splitlines(keepends=True))
        assert max(door.turns) < 4000
        assert door.wire.written.startswith(b"HTTP/1.1 408 ")


def test_bounds_hold_for_the_admin_port_as_well() -> None:
    limits = replace(Limits(), body_bytes=MIB)
    assert fed(GET + b"a:\r\n" * 16000 + b"\r\n", limits).wire.written.startswith(b"HTTP/1.1 431 ")
