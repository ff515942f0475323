"""Who makes way when descriptors run short: never anybody who is served."""

from __future__ import annotations

from cellgate.proxy.http.server import QUIET_S, SLOW_HEAD_S, first_to_close
from tests.wire.door import Door

GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"


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
    fresh, between = come(10.0 - QUIET_S / 2), come(10.0 - QUIET_S / 2, GET)
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
