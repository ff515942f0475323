"""The live stream of events on the admin port, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
import pytest

from cellgate.proxy.admin import http, pages
from cellgate.proxy.observe.events import Action
from cellgate.router.nouns import Sign, Strength
from tests.sockets.admin_stage import admin_port


async def test_followers_get_events_as_they_happen_and_the_end_when_the_gate_goes() -> None:
    live = {"Accept": "text/event-stream"}
    async with admin_port() as port, port.client.get(port.url + "/events", headers=live) as reply:
        assert reply.headers["Content-Type"] == "text/event-stream"
        assert (await reply.content.readuntil(b"\n\n")).startswith(b": ")
        port.observe("a1", Sign.BAD, Strength.FATAL, "request", "refused")
        event = await reply.content.readuntil(b"\n\n")
        assert event.startswith(b'id: 1\nevent: flip\ndata: {"id":1,"time":"2023-11-14T22:13:20.000Z",')
        port.events.close()
        assert await reply.content.read() == b""


async def test_stopping_does_not_wait_for_followers() -> None:
    replies: list[aiohttp.ClientResponse] = []

    async with admin_port() as port:
        replies.append(await port.client.get(port.url + "/events?follow=1"))
    assert replies[0].status == 200


async def test_a_quiet_stream_carries_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "HEARTBEAT_S", 0.005)

    async with admin_port() as port, port.client.get(port.url + "/events?follow=1") as reply:
        await reply.content.readuntil(b"\n\n")
        for _ in range(3):
            assert await reply.content.readuntil(b"\n\n") == b": heartbeat\n\n"
        port.events.add(Action("reload", "SIGHUP"))
        assert b"event: reload\n" in await reply.content.readuntil(b"}\n\n")


async def test_a_follower_that_leaves_is_forgotten_at_once() -> None:
    async with admin_port() as port:
        async with port.client.get(port.url + "/events?follow=1") as reply:
            await reply.content.readuntil(b"\n\n")
            assert port.events.followers == 1
        await until(lambda: port.events.followers == 0)


async def test_a_follower_that_never_reads_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SEND_TIMEOUT_S", 0.02)

    async with admin_port() as port:
        host, number = port.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(number), limit=1024)
        writer.write(b"GET /events?follow=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b": ")
        for _ in range(40):
            port.events.add(Action("reload", "SIGHUP", detail="x" * 1_000_000))
        await until(lambda: port.events.followers == 0)
        # So that what arrived cannot be taken for all there was.
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        with pytest.raises(ConnectionResetError):
            await writer.wait_closed()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.001)
