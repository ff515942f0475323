"""What one client or unit can make the gate do, in bytecodes, and the memory that all bodies share."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest

from cellgate.proxy.config.limits import LIMITS, REACHED
from cellgate.proxy.config.settings import KIB, MIB, Limits
from cellgate.proxy.http.body_memory import ArrivingBody, BodyMemory
from cellgate.proxy.http.errors import FailureKind
from cellgate.proxy.http.reply import HEAD_BYTES
from cellgate.proxy.http.request import Request
from cellgate.proxy.http.server import PIPELINED_BYTES
from tests.wire.door import Door
from tests.wire.rig import Rig
from tests.wire.unit import LAST_CHUNK, SSE_HEAD, chunk

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
    # More are generated: tests/machines/test_wire_work.py.
    "a long name": lambda n: GET + b"a" * 8 * n + b": b\r\n\r\n",
    "a long target": lambda n: b"GET /" + b"%2f" * n + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "pipelined bodies": lambda n: (GET + b"Content-Length: 1\r\n\r\nx") * n,
    "a chunk extension": lambda n: CHUNKED + b"1;" + b"e" * 8 * n + b"\r\na\r\n" + LAST_CHUNK,
    "empty lines": lambda n: b"\r\n" * 8 * n + GET + b"\r\n",
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_work_is_linear_and_a_turn_is_bounded(shape: Callable[[int], bytes]) -> None:
    once, twice = fed(shape(400)), fed(shape(800))
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
    door = fed(b"".join(b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % n for n in range(500)))
    assert [request.path for request in door.requests] == [b"/%d" % n for n in range(500)]
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
    body = bytes(range(256)) * 50
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


# What one unit's reply can make the gate do: linear in its bytes, bounded, and told for what it is.

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED_REPLY = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def fed_reply(data: bytes) -> Rig:
    """A relay that got this reply."""
    rig = Rig()
    rig.feed(reads(data))
    assert not rig.bugs
    return rig


def why(rig: Rig) -> str:
    """Why the reply was not taken, or not to its end."""
    (failure,) = rig.failures
    assert failure.kind is FailureKind.GARBAGE
    assert rig.wire.closed
    return failure.message


FLOODS: dict[str, tuple[Callable[[int], bytes], str]] = {
    "lines": (lambda n: HEAD + b"a:\r\n" * n + b"\r\n", "more than 128 lines"),
    "upgrades": (lambda n: HEAD + b"upgrade: x\r\n" * n + b"\r\n", "more than 128 lines"),
    "codings": (lambda n: HEAD + b"transfer-encoding: x\r\n" * (n // 4) + b"\r\n", "more than 128 lines"),
    "tokens": (lambda n: HEAD + b"connection: " + b"a," * n + b"\r\n\r\n", "names more than 16 headers"),
    "interim": (lambda n: b"HTTP/1.1 103 Early Hints\r\n\r\n" * n, "larger than 65536 bytes"),
    "interim lines": (lambda n: b"HTTP/1.1 103 A\r\n" + b"a:\r\n" * 2 * n + b"\r\n", "more than 128 lines"),
    "a line": (lambda n: HEAD + b"a: " + b"b" * 20 * n, "larger than 65536 bytes"),
    "trailers": (lambda n: CHUNKED_REPLY + chunk(b"{}") + b"0\r\n" + b"a: bcdefg\r\n" * 4 * n, "of trailers"),
    "an extension": (lambda n: CHUNKED_REPLY + chunk(b"{}") + b"1;" + b"e" * 60 * n, "chunk extensions"),
}


@pytest.mark.parametrize(("flood", "told"), FLOODS.values(), ids=FLOODS)
def test_a_flood_is_told_for_what_it_is(flood: Callable[[int], bytes], told: str) -> None:
    """That the work is linear: tests/machines/test_wire_work.py."""
    assert told in why(fed_reply(flood(4_000)))


def test_a_head_of_60_kb_in_as_many_lines_as_are_allowed_passes() -> None:
    lines = b"".join(b"openai-%d: %b\r\n" % (n, b"y" * 480) for n in range(LIMITS.header_lines - 3))
    rig = fed_reply(HEAD + lines + b"content-length: 2\r\n\r\n{}")
    assert len(lines) > 60_000
    assert rig.ends == ["committed", "done"]
    assert rig.reply().get("openai-7") == "y" * 480


def test_one_line_more_than_allowed_is_counted_by_its_name() -> None:
    before = REACHED["header_lines"]
    for lines, ends in (
        (LIMITS.header_lines - 2, ["committed", "done"]),
        (LIMITS.header_lines - 1, ["failed"]),
    ):
        rig = fed_reply(HEAD + b"a: b\r\n" * lines + b"content-length: 2\r\n\r\n{}")
        assert rig.ends == ends
    assert REACHED["header_lines"] == before + 1


def test_a_long_stream_whose_size_lines_come_by_themselves_is_no_flood() -> None:
    rig = Rig()
    rig.feed([SSE_HEAD, b"9\r\n", b"data: a\n\n\r\n"])
    rig.send = lambda data: None  # type: ignore[method-assign]
    tokens = HEAD_BYTES // len(b"9\r\n") + 100
    for _ in range(tokens):
        rig.feed([b"9\r\n", b"data: a\n\n\r\n"])
    rig.feed([LAST_CHUNK])
    assert rig.ends == ["committed", "done"]


# The memory that all request bodies share.


def test_it_gives_what_it_has_and_calls_who_waits_once_and_in_order() -> None:
    memory = BodyMemory(100, 100)
    called: list[str] = []
    first, second, gone = (lambda: called.append("first")), (lambda: called.append("second")), lambda: None
    assert memory.take(60)
    assert not memory.take(41)
    assert memory.used == 60
    assert memory.take(40)
    for waiter in (first, gone, second, first):
        memory.wait(waiter)
    memory.forget(gone)
    memory.forget(gone)
    assert called == []
    memory.give(1)
    memory.give(1)
    assert called == ["first", "second"]
    memory.give(98)
    assert memory.used == 0


def test_who_still_lacks_memory_waits_again_in_the_same_order() -> None:
    memory = BodyMemory(100, 100)
    served: list[int] = []

    def wait_for(size: int) -> None:
        def ask() -> None:
            if memory.take(size):
                served.append(size)
            else:
                memory.wait(ask)

        ask()

    assert memory.take(100)
    for size in (50, 60, 30):
        wait_for(size)
    memory.give(50)
    assert served == [50]
    memory.give(50)
    # 60 still finds too little, so 30 goes first.
    assert served == [50, 30]
    memory.give(80)
    assert served == [50, 30, 60]


class Body(ArrivingBody):
    """It gives back what it holds when it is given up."""

    def __init__(self, memory: BodyMemory, payer: str, size: int, whole_in_s: float = inf) -> None:
        super().__init__(Request(0.0, [], [], []), payer, 0.0, self._give_up)
        self.size, self.is_given_up = size, False
        self._memory, self._whole_in_s = memory, whole_in_s
        self.has_memory = memory.take(size, 0, self)
        if not self.has_memory:
            memory.wait(self._again, payer)

    def whole_in_s(self, now: float) -> float:
        return self._whole_in_s

    def _give_up(self) -> None:
        self.is_given_up = True
        self._memory.arrived(self)
        self._memory.give(self.size)

    def _again(self) -> None:
        self.has_memory = self._memory.take(self.size, 0, self)
        if not self.has_memory:
            self._memory.wait(self._again, self.payer)


def test_whoever_holds_most_gives_up_what_comes_slowest_once_another_waits() -> None:
    memory = BodyMemory(256 * MIB, 64 * MIB)
    soon = [Body(memory, "hog", 8 * MIB, whole_in_s=1.0) for _ in range(14)]
    late = [Body(memory, "hog", 8 * MIB, whole_in_s=60.0 + n) for n in range(14)]
    memory.tick(0.0)
    assert not any(body.is_given_up for body in soon + late)
    other = Body(memory, "other", 32 * MIB)
    assert memory.is_short
    memory.tick(0.0)
    assert other.has_memory
    assert [body.is_given_up for body in late] == [False] * 10 + [True] * 4
    assert not any(body.is_given_up for body in soon)
    assert not memory.is_short


def test_nobody_gives_up_anything_for_who_holds_as_much() -> None:
    memory = BodyMemory(256 * MIB, 64 * MIB)
    first = [Body(memory, "first", 64 * MIB), Body(memory, "first", 48 * MIB)]
    second = [Body(memory, "second", 64 * MIB), Body(memory, "second", 48 * MIB)]
    more = Body(memory, "second", 64 * MIB)
    memory.tick(0.0)
    # A share of both is 128 MiB; the second asks for more than that, but holds less.
    assert not any(body.is_given_up for body in first + second)
    assert not more.has_memory


def test_who_holds_little_finds_room_for_a_small_body_whatever_another_one_holds() -> None:
    memory = BodyMemory(256 * MIB, 64 * MIB)
    while Body(memory, "hog", MIB).has_memory:
        pass
    assert Body(memory, "other", 150_000).has_memory
    assert memory.used <= memory.total


def test_a_body_that_is_whole_counts_no_more_for_its_payer() -> None:
    memory = BodyMemory(256 * MIB, 64 * MIB)
    whole = [Body(memory, "hog", 56 * MIB) for _ in range(4)]
    for body in whole:
        memory.arrived(body)
    assert not Body(memory, "other", 32 * MIB).has_memory
    memory.tick(0.0)
    assert not any(body.is_given_up for body in whole)


@pytest.mark.parametrize(
    ("others_wait", "given_s"), [(True, LIMITS.body_stall_s), (False, LIMITS.body_idle_s)]
)
@pytest.mark.parametrize(("every_s", "size"), [(1.5, 1), (0.5, 500), (0.1, 100)])
def test_a_body_that_drips_is_given_up(others_wait: bool, given_s: float, every_s: float, size: int) -> None:
    door = Door()
    door.client.data_received(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 500)
    if others_wait:
        door.memory.wait(lambda: None, "others")
    begun_at = door.time
    while not door.failures:
        door.time += every_s
        door.client.data_received(b"x" * size)
        door.client.tick(door.time)
    assert door.failures[0].kind is FailureKind.BODY_TIMEOUT
    assert f"less than {LIMITS.body_bytes_per_s} bytes a second" in door.failures[0].message
    # Alone it has the time that every body has as well.
    most_s = given_s if others_wait else given_s + door.limits.body_timeout_s
    assert given_s < door.time - begun_at <= most_s + 2 * every_s
    assert door.memory.used == 0


@pytest.mark.parametrize(("every_s", "size"), [(1.5, 3000), (0.1, 150), (5.0, 200_000)])
def test_a_body_that_comes_slowly_but_comes_is_read_to_its_end(every_s: float, size: int) -> None:
    door, whole = Door(), 50_000
    door.client.data_received(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % whole)
    while whole > 0:
        door.time += every_s
        door.client.data_received(b"x" * min(size, whole))
        whole -= size
        door.client.tick(door.time)
    assert not door.failures
    assert len(door.requests) == 1
