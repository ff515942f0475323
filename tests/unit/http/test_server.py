"""Clients of the gate: requests out of bytes, turns of the loop, clients that do not read, who makes way."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httptools
import pytest

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.config.settings import Limits
from cellgate.proxy.http.errors import FailureKind
from cellgate.proxy.http.request import Request, RequestReader
from cellgate.proxy.http.server import CLIENT_QUIET_S, SLOW_HEAD_S, ClientConnection, first_to_close
from cellgate.proxy.http.turns import ReadScheduler
from tests.sim.tcp import WINDOW
from tests.sim.transport import HIGH_WATER
from tests.wire.client import chat
from tests.wire.door import Door
from tests.wire.stage import Stage, simulated, stage
from tests.wire.unit import LAST_CHUNK, Received, chunk, whole

TIGHT = Limits(head_bytes=500, body_bytes=100)
LONG_GET = b"GET /v1/models?a=b HTTP/1.1\r\nHost: a\r\nX-Request-Id: 1\r\nX-A:  b\r\n\r\n"
POST = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\nabc"
WHOLE_CHUNKED = (
    b"POST /v1/y HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    + chunk(b"ab")
    + chunk(b"c")
    + b"0\r\nX-T: u\r\n\r\n"
)
OLD = b"GET / HTTP/1.0\r\n\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n\r\n"
UPGRADES = [data.replace(b"\r\n\r\n", b"\r\n" + H2C, 1) for data in (LONG_GET, POST, WHOLE_CHUNKED)]
CLOSES = POST.replace(b"\r\n\r\n", b"\r\n" + H2C.replace(b"Upgrade,", b"Upgrade, close,"), 1)


class Told(RequestReader):
    """Writes down what it reads."""

    def __init__(self, limits: Limits = TIGHT) -> None:
        super().__init__(limits, lambda: 7.0)
        self.log: list[str] = []
        self.requests: list[Request] = []

    def begun(self, request: Request) -> None:
        self.log.append("begun")

    def head_read(self, request: Request) -> None:
        self.log.append("head")

    def body_read(self, request: Request) -> None:
        if self.log[-1] != "body":
            self.log.append("body")

    def whole(self, request: Request) -> None:
        self.log.append("whole")
        self.requests.append(request)

    def at_once(self, request: Request) -> None:
        self.begun(request)
        self.head_read(request)
        self.whole(request)


def read(*reads: bytes) -> Told:
    """What was read of these reads, up to a failure."""
    reader = Told()
    for data in reads:
        if data and reader.failure is None:
            assert reader.feed(data) is reader.failure
    return reader


def summary(request: Request) -> tuple[object, ...]:
    """All that was read of a request."""
    kept = (request.method, request.target, request.path, request.body, request.length, request.given_id)
    flags = (request.http10, request.keep_alive, request.expects_continue, request.body_size)
    return (*kept, *flags, request.lines, request.fields)


def test_a_request_is_read() -> None:
    reader = read(LONG_GET)
    (request,) = reader.requests
    assert reader.log == ["begun", "head", "whole"]
    assert (request.method, request.path, request.target) == (b"GET", b"/v1/models", b"/v1/models?a=b")
    assert (request.given_id, request.received_at, request.lines) == (b"1", 7.0, [b"x-a: b\r\n"])
    assert (reader.request, reader.in_head, reader.failure) == (None, False, None)


@pytest.mark.parametrize(
    "data",
    [
        *(LONG_GET, POST, WHOLE_CHUNKED, OLD, LONG_GET + POST + WHOLE_CHUNKED + LONG_GET, *UPGRADES, CLOSES),
        b"".join(UPGRADES) + LONG_GET + UPGRADES[0],
    ],
)
def test_requests_are_the_same_wherever_they_are_cut_in_two(data: bytes) -> None:
    whole = [summary(request) for request in read(data).requests]
    assert len(whole) == data.count(b"HTTP/1.")
    for at in range(len(data)):
        reader = read(data[:at], data[at:])
        assert [summary(request) for request in reader.requests] == whole
        assert reader.failure is None
    reader = read(*(data[at : at + 1] for at in range(len(data))))
    assert [summary(request) for request in reader.requests] == whole
    assert reader.failure is None


@pytest.mark.parametrize(
    ("data", "asked"), [(UPGRADES[0], LONG_GET), (UPGRADES[1], POST), (UPGRADES[2], WHOLE_CHUNKED)]
)
def test_a_request_is_the_same_without_an_upgrade_that_is_ignored(data: bytes, asked: bytes) -> None:
    (upgrading,), (plain,) = read(data).requests, read(asked).requests
    assert upgrading.lines == plain.lines
    assert [field for field in upgrading.fields if field not in plain.fields] == [
        (b"connection", b"Upgrade, HTTP2-Settings"),
        (b"upgrade", b"h2c"),
    ]
    assert summary(upgrading)[:-2] == summary(plain)[:-2]


def test_no_parser_reads_a_large_body_behind_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    fed, body = list[int](), b" RTSP/ \r\n\r\n" * 4000

    class Counting(httptools.HttpRequestParser):
        def feed_data(self, data: Any) -> None:
            fed.append(len(data))
            super().feed_data(data)

    monkeypatch.setattr(httptools, "HttpRequestParser", Counting)
    reader = Told(Limits())
    head = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    reader.feed(head + body + LONG_GET)
    while reader.unread:
        reader.resume_parsing()
    assert [request.body for request in reader.requests] == [body, b""]
    assert fed == [len(head), len(LONG_GET)]


def test_the_phases_of_a_body_are_told() -> None:
    assert read(POST).log == ["begun", "head", "whole"]
    assert read(POST[:-1], POST[-1:]).log == ["begun", "head", "body", "whole"]
    assert read(WHOLE_CHUNKED[:-5], WHOLE_CHUNKED[-5:]).log == ["begun", "head", "body", "whole"]
    reader = read(POST[:-1])
    assert (reader.log, reader.in_head) == (["begun", "head", "body"], False)
    assert reader.request is not None
    assert reader.request.body_size == 2


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\x16\x03\x01", FailureKind.BAD_REQUEST),
        (LONG_GET[:-2] + b"X-B: " + b"b" * 500 + b"\r\n\r\n", FailureKind.HEAD_TOO_LARGE),
        (POST.replace(b": 3", b": 101"), FailureKind.BODY_TOO_LARGE),
        (WHOLE_CHUNKED.replace(b"\r\n1\r\n", b"\r\nx\r\n"), FailureKind.BAD_REQUEST),
    ],
)
def test_a_failure_ends_the_reading_and_spares_what_came_before(data: bytes, kind: FailureKind) -> None:
    """More failures: test_heads.py."""
    reader = read(POST + data + POST)
    assert reader.failure is not None
    assert reader.failure.kind is kind
    assert len(reader.requests) == 1
    forgotten = reader.forget()
    assert (reader.request, reader.in_head) == (None, False)
    assert forgotten is None or forgotten is not reader.requests[0]


def test_an_unknown_method_is_told_from_garbage_where_its_beginning_is_known() -> None:
    brew = b"BREW / HTTP/1.1\r\n"
    for reads, kind in (
        ([brew], FailureKind.METHOD_NOT_SUPPORTED),
        ([POST, brew], FailureKind.METHOD_NOT_SUPPORTED),
        ([POST + brew], FailureKind.BAD_REQUEST),
        ([b"brew\r\n"], FailureKind.BAD_REQUEST),
    ):
        failure = read(*reads).failure
        assert failure is not None
        assert failure.kind is kind


def test_a_defect_of_our_own_is_not_told_as_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Told, "whole", None)
    with pytest.raises(TypeError):
        read(LONG_GET)


@pytest.mark.parametrize("first", [b"GET /v1/models RTSP/1.0", b"OPTIONS * RTSP/1.1", b"SOURCE / ICE/1.0"])
def test_another_protocol_is_none_wherever_its_name_is_cut(first: bytes) -> None:
    data = LONG_GET + first + b"\r\nHost: a\r\n\r\n"
    for at in range(len(LONG_GET), len(data)):
        reader = read(data[:at], data[at:])
        assert reader.failure is not None
        assert (reader.failure.kind, len(reader.requests)) == (FailureKind.BAD_REQUEST, 1)
    reader = read(*(data[at : at + 1] for at in range(len(data))))
    assert reader.failure is not None
    assert len(reader.requests) == 1


def test_the_name_of_another_protocol_may_stand_anywhere_else() -> None:
    head = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nX-A: GET / RTSP/1.0\r\nContent-Length: 21\r\n\r\n"
    data = head + b'{"a":\n "x RTSP/1.0" }'
    for at in range(len(data)):
        reader = read(data[:at], data[at:])
        assert (len(reader.requests), reader.failure) == (1, None), data[:at]


# Clients that send more than one turn of the loop should parse: others have their turn in between.

READ_BYTES = 256_000
"""The most that the loop reads of one connection at once."""
CLIENTS = 40
LENGTH = 4 * READ_BYTES
HEAD = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % LENGTH
CHUNKED = b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"


class Street:
    """Clients of one gate, of one loop."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []
        reads, starts = (ReadScheduler(self.due.append, LIMITS.request_bytes_per_turn) for _ in range(2))
        self.doors = [Door(read_scheduler=reads, start_scheduler=starts) for _ in range(CLIENTS)]

    def all_send(self, data: bytes) -> None:
        """One read of each of them, in the same turn."""
        for door in self.doors:
            assert door.wire.reading
            door.client.data_received(data)

    def turn(self) -> None:
        """The next turn of the loop."""
        due, self.due[:] = self.due[:], []
        for callback in due:
            callback()

    def rest(self) -> None:
        """Turns until nothing is left to do."""
        while self.due:
            self.turn()

    def unread(self) -> int:
        """How much was read of all clients together, and has yet to be parsed."""
        return sum(len(door.client._intake.unread) for door in self.doors)

    def parsed_by_turn(self, data: bytes) -> list[int]:
        """All send this, and turns pass until it is parsed: how many bytes were in each."""
        self.all_send(data)
        left = [len(data) * CLIENTS, self.unread()]
        while self.due:
            self.turn()
            left.append(self.unread())
        return [before - after for before, after in pairwise(left)]


def test_one_turn_parses_no_more_of_all_bodies_together_than_the_bound() -> None:
    street = Street()
    street.all_send(HEAD)
    for _ in range(LENGTH // READ_BYTES):
        parsed = street.parsed_by_turn(b"x" * READ_BYTES)
        assert 0 < max(parsed) <= LIMITS.request_bytes_per_turn + READ_BYTES
        assert sum(parsed) == CLIENTS * READ_BYTES
    assert [len(door.requests[0].body) for door in street.doors] == [LENGTH] * CLIENTS
    assert all(door.wire.reading for door in street.doors)


@pytest.mark.parametrize("piece", [chunk(b"ab"), chunk(b"a" * 100)], ids=["tiny", "small"])
def test_one_turn_parses_fewer_bytes_where_they_are_no_body(piece: bytes) -> None:
    street, many = Street(), 2 * LIMITS.parsed_bytes // len(piece)
    street.all_send(CHUNKED)
    parsed = street.parsed_by_turn(piece * many)
    around = len(piece) - len(piece.split(b"\r\n")[1])
    assert max(parsed) * around / len(piece) <= 3 * LIMITS.parsed_bytes
    street.all_send(LAST_CHUNK)
    street.rest()
    assert all(len(door.requests) == 1 for door in street.doors)


def test_pipelines_of_many_clients_share_the_requests_of_a_turn() -> None:
    street = Street()
    for door in street.doors:
        door.client.data_received(GET * 200)
    before = sum(len(door.requests) for door in street.doors)
    assert before == LIMITS.requests_per_turn
    while street.due:
        street.turn()
        now = sum(len(door.requests) for door in street.doors)
        assert now - before <= LIMITS.requests_per_turn
        before = now
    assert before == 200 * CLIENTS


def test_requests_of_many_clients_begin_in_turns_and_in_order_and_late_ones_behind_them() -> None:
    street, begun = Street(), list[int]()
    *early, late = street.doors
    for door in early:
        door.client.data_received(GET)
    while street.due:
        begun.append(sum(len(door.requests) for door in street.doors))
        assert [len(door.requests) for door in street.doors] == [1] * begun[-1] + [0] * (CLIENTS - begun[-1])
        if len(begun) == 2:
            late.client.data_received(GET)
            assert not late.requests
        street.turn()
    assert begun == [LIMITS.requests_per_turn, 2 * LIMITS.requests_per_turn]
    assert all(door.requests for door in street.doors)


def test_addresses_begin_in_turns_however_many_connections_one_of_them_has() -> None:
    street = Street()
    *many, late = street.doors
    for door in many:
        door.client.data_received(GET * 4)
    late.client.data_received(GET.replace(b"Host", b"X-Forwarded-For: 192.0.2.9\r\nHost") * 4)
    assert not late.requests
    street.turn()
    assert len(late.requests) == 4
    street.rest()
    assert {len(door.requests) for door in street.doors} == {4}


def test_of_a_client_that_waits_to_begin_no_more_than_one_read_is_held_and_nothing_once_it_left() -> None:
    street = Street()
    street.all_send(GET)
    leaving, waiting = street.doors[-2:]
    many = READ_BYTES // len(GET)
    leaving.client.connection_lost(None)
    waiting.client.data_received(GET * many)
    assert not waiting.wire.reading
    street.rest()
    assert [len(door.requests) for door in street.doors] == [1] * (CLIENTS - 2) + [0, 1 + many]
    assert waiting.wire.reading


def test_a_request_in_a_small_read_waits_for_no_body() -> None:
    street = Street()
    *senders, neighbour = street.doors
    for door in senders:
        door.client.data_received(HEAD + b"x" * READ_BYTES)
    assert street.due
    neighbour.client.data_received(GET)
    assert len(neighbour.requests) == 1


@pytest.mark.parametrize("sent", [GET, HEAD + b"x" * READ_BYTES, CHUNKED + chunk(b"ab") * 9000, b"?"])
def test_a_closed_connection_is_freed_without_the_collector(sent: bytes) -> None:
    gc.collect()
    before = alive()
    gc.disable()
    try:
        street = Street()
        street.all_send(sent)
        for door in street.doors:
            door.client.connection_lost(None)
            del door.client
        street.rest()
        assert alive() == before
    finally:
        gc.enable()


def alive() -> int:
    """How many connections there are in memory."""
    return sum(isinstance(each, ClientConnection) for each in gc.get_objects())


# Who makes way when descriptors run short: never anybody who is served.


def come(at: float, *reads: bytes, holds: bool = False) -> Door:
    """A connection that was made then, and sent this."""
    door = Door(holds=holds, at=at)
    door.feed(reads)
    return door


def test_those_that_never_asked_go_first_then_the_idle_then_slow_heads_and_of_each_the_oldest() -> None:
    young_silent, old_silent = come(9.0), come(2.0)
    young_idle, old_idle = come(8.0, GET), come(1.0, GET)
    slow_head = come(3.0, GET[:-2])
    doors = [slow_head, young_idle, old_idle, young_silent, old_silent]
    going = first_to_close([door.client for door in doors], 10, 10.0)
    assert going == [door.client for door in (old_silent, young_silent, old_idle, young_idle, slow_head)]
    assert first_to_close([door.client for door in doors], 2, 10.0) == going[:2]


def test_nobody_who_is_served_or_sends_goes() -> None:
    served = come(1.0, GET, holds=True)
    behind = come(1.0, GET + GET[:-2], holds=True)
    body = come(1.0, b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc")
    head = come(10.0 - SLOW_HEAD_S, GET[:-2])
    fresh, between = come(10.0 - CLIENT_QUIET_S / 2), come(10.0 - CLIENT_QUIET_S / 2, GET)
    assert (
        first_to_close([door.client for door in (served, behind, body, head, fresh, between)], 10, 10.0) == []
    )


def test_who_makes_way_is_closed_and_one_in_the_middle_of_a_head_is_told() -> None:
    idle, slow = come(1.0, GET), come(1.0, GET[:-2])
    shown = idle.wire.written
    for door in (idle, slow):
        door.client.close_idle()
        assert door.wire.closed
    assert idle.wire.written == shown
    assert slow.wire.written.startswith(b"HTTP/1.1 408 ")


# Clients that do not read, and clients that send too much at once: in virtual time, with small windows, so
# that every place where a pause may fall is met.

MOST = HIGH_WATER + 2 * WINDOW
"""What the gate may hold of one reply: a full buffer, and one read on top of it."""

SIZES = [*range(2 * WINDOW - 256, 2 * WINDOW + 64, 32), 3 * WINDOW, 4 * WINDOW + 16384]
"""The first of them end in the very read that fills the buffer of a client that does not read."""


def fill(here: Stage) -> None:
    """There is no more memory for what slow clients have yet to read: their units wait at once."""
    here.gateway.backlogs.held = LIMITS.unsent_total_bytes


def of_size(size: int) -> bytes:
    """A plain reply with a body of so many bytes."""
    return whole(b"x" * size)


@pytest.mark.parametrize("size", SIZES)
@simulated
async def test_a_unit_paused_for_a_slow_client_is_read_again_for_the_next(size: int) -> None:
    async with stage(of_size(size)) as here, here.client() as slow:
        fill(here)
        slow.stop_reading()
        slow.send(chat(stream=False))
        await asyncio.sleep(2.0)
        assert here.buffered() <= MOST
        # Whether the slow client still needs the unit's connection or not: another client is served.
        async with here.client() as other:
            assert len((await other.ask(chat(stream=False))).body) == size
        slow.read_on()
        assert len((await slow.reply()).body) == size


@pytest.mark.parametrize("size", SIZES)
@simulated
async def test_the_next_answer_waits_for_a_client_that_has_not_read_the_one_before(size: int) -> None:
    async def play(request: Received) -> None:
        request.write(of_size(size if len(here.unit.requests) == 1 else 100 * WINDOW))

    async with stage(play) as here, here.client() as slow:
        fill(here)
        slow.stop_reading()
        slow.send(chat(stream=False) * 2)
        # Not as long as a client may read nothing.
        await asyncio.sleep(10.0)
        assert here.buffered() <= MOST
        slow.read_on()
        assert [len((await slow.reply()).body) for _ in range(2)] == [size, 100 * WINDOW]
