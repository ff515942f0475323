"""What the streams of a process take, while their clients are away and after their end."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.extras import reconnect
from cellgate.proxy.extras.reconnect import STREAM_BYTES, Connected, Reconnects, ResumableStream
from cellgate.proxy.http.reply import CHUNKED, LAST_CHUNK
from cellgate.proxy.http.turns import ClientExchange

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BODY_BYTES = 1000
RESUME_S = 30.0


class Inner:
    """An exchange that answers when the test says so."""

    def __init__(self) -> None:
        self.ticks = 0
        self.has_left = False

    def start(self) -> None:
        """It waits."""

    def client_left(self) -> None:
        self.has_left = True

    def client_paused(self, paused: bool) -> None:
        """It has nothing to pause."""

    def tick(self, _now: float) -> None:
        self.ticks += 1


class Host:
    """A gateway, with a clock that the test sets."""

    def __init__(self) -> None:
        self.at = 0.0
        self.is_leaving = False
        self.kept = Reconnects(cast(Any, self), RESUME_S)

    def now(self) -> float:
        return self.at

    def exchange(self, _client: object, request: object) -> ClientExchange:
        return cast(ClientExchange, Inner())

    def ask(self) -> Connected | Inner:
        """A request whose client may come back."""
        fields = {"may_come_back": True, "http10": False, "lines": [], "path": b"/", "body_size": BODY_BYTES}
        client = SimpleNamespace(peer="", secure=False, shows_internals=False)
        client.send = client.finish = lambda *_, **__: None
        found = self.kept.exchange(cast(Any, client), cast(Any, SimpleNamespace(**fields)))
        found.start()
        return cast(Connected | Inner, found)

    def begin(self) -> tuple[ResumableStream, Connected]:
        """The same, once its stream has begun."""
        connected = self.ask()
        assert isinstance(connected, Connected)
        connected.stream.send(HEAD + CHUNKED.frame(b"data: first\n\n"))
        return connected.stream, connected


def end(stream: ResumableStream) -> None:
    stream.send(LAST_CHUNK)
    stream.finish(cast(Any, None), keep_alive=True)


def test_what_comes_for_a_client_that_is_away_is_not_copied_with_all_that_came_before() -> None:
    stream, connected = Host().begin()
    connected.client_left()
    event = CHUNKED.frame(b"data: %b\n\n" % (b"x" * 1000))
    for _ in range(500):
        stream.send(event)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        stream.send(event)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 50_000
    assert len(stream.kept.after(1) or b"") > 500_000


def test_a_stream_that_has_ended_keeps_its_events_and_nothing_that_made_them() -> None:
    host = Host()
    stream, _ = host.begin()
    assert host.kept.bytes == STREAM_BYTES + BODY_BYTES + stream.kept.size
    end(stream)
    assert stream.inner is None
    assert host.kept.bytes == STREAM_BYTES + stream.kept.size
    host.at = RESUME_S + 1.0
    host.kept.tick(host.at)
    assert (len(host.kept), host.kept.bytes) == (0, 0)


def test_a_client_that_leaves_or_fails_after_the_end_harms_nothing() -> None:
    host = Host()
    stream, connected = host.begin()
    end(stream)
    connected.tick(1.0)
    connected.client_paused(True)
    connected.client_left()
    assert len(host.kept) == 1
    stream.stop()
    assert (len(host.kept), host.kept.bytes) == (0, 0)


def test_who_is_away_has_a_clock_until_its_time_is_over() -> None:
    host = Host()
    stream, connected = host.begin()
    inner = cast(Inner, stream.inner)
    host.kept.tick(0.0)
    assert inner.ticks == 0
    connected.client_left()
    host.kept.tick(1.0)
    assert (inner.ticks, inner.has_left) == (1, False)
    host.kept.tick(RESUME_S + 1.0)
    assert (inner.ticks, inner.has_left, len(host.kept)) == (1, True, 0)


def test_their_number_is_bounded_and_those_left_first_end_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnect, "LIMITS", replace(LIMITS, kept_streams=3))
    host = Host()
    streams = [host.begin() for _ in range(3)]
    assert isinstance(host.ask(), Inner)
    for number in (1, 0):
        streams[number][1].client_left()
    inner = cast(Inner, streams[1][0].inner)
    host.begin()
    host.kept.tick(0.0)
    assert (len(host.kept), inner.has_left) == (3, True)
    host.begin()
    assert len(host.kept) == 3
    assert isinstance(host.ask(), Inner)


def test_who_is_back_is_no_longer_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnect, "LIMITS", replace(LIMITS, kept_streams=1))
    host = Host()
    stream, connected = host.begin()
    connected.client_left()
    stream.go_on(connected, 0, b"")
    assert isinstance(host.ask(), Inner)
    end(stream)
    assert isinstance(host.ask(), Connected)
