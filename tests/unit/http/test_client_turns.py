"""Clients that send more than one turn of the loop should parse: others have their turn in between."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise

import pytest

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.http.server import ClientConnection
from cellgate.proxy.http.turns import ReadScheduler
from tests.wire.door import Door
from tests.wire.unit import LAST_CHUNK, chunk

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
        return sum(len(door.client._intake.reader.unread) for door in self.doors)

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


def test_requests_of_many_clients_begin_in_turns_and_in_order() -> None:
    street, begun = Street(), list[int]()
    street.all_send(GET)
    assert street.due
    while street.due:
        begun.append(sum(len(door.requests) for door in street.doors))
        assert [len(door.requests) for door in street.doors] == [1] * begun[-1] + [0] * (CLIENTS - begun[-1])
        street.turn()
    assert begun == [LIMITS.requests_per_turn, 2 * LIMITS.requests_per_turn]
    assert all(door.requests for door in street.doors)


def test_who_comes_while_others_wait_begins_behind_them() -> None:
    street = Street()
    *early, late = street.doors
    for door in early:
        door.client.data_received(GET)
    street.turn()
    assert not early[-1].requests
    late.client.data_received(GET)
    assert not late.requests
    street.turn()
    assert late.requests


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


def test_of_a_client_that_waits_to_begin_no_more_than_one_read_is_held() -> None:
    street = Street()
    street.all_send(GET)
    waiting, many = street.doors[-1], READ_BYTES // len(GET)
    waiting.client.data_received(GET * many)
    assert not waiting.wire.reading
    street.rest()
    assert len(waiting.requests) == 1 + many
    assert [door.wire.reading for door in street.doors] == [True] * CLIENTS


def test_a_client_that_leaves_while_it_waits_begins_nothing() -> None:
    street = Street()
    street.all_send(GET)
    street.doors[-1].client.connection_lost(None)
    street.rest()
    assert [len(door.requests) for door in street.doors] == [1] * (CLIENTS - 1) + [0]


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
