"""WebSockets through the gate: how they begin, what passes, and how they end."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from cellgate.extras import realtime
from cellgate.extras.realtime import FrameEnds, close_frame
from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.config.settings import KeySettings
from cellgate.router.nouns import Evidence, Fleet, Sign, Strength
from tests.wire.client import Client, chat, get
from tests.wire.stage import stage
from tests.wire.unit import STREAM, Received, whole

HELLO = (
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
)
ASK = get("/v1/realtime?model=tiny", HELLO)
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"


async def echo(request: Received) -> None:
    """A unit that switches, and sends back what it gets."""
    request.write(SWITCHED)
    reader, writer = request.connection.reader, request.connection.writer
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def begun(client: Client, ask: bytes = ASK) -> bytes:
    """The head of the 101."""
    client.send(ask)
    async with asyncio.timeout(5.0):
        return await client.reader.readuntil(b"\r\n\r\n")


async def echoed(client: Client, data: bytes) -> bytes:
    client.send(data)
    async with asyncio.timeout(5.0):
        return await client.reader.readexactly(len(data))


async def test_bytes_pass_both_ways_and_a_place_on_the_unit_is_taken() -> None:
    offers = HELLO.replace("Upgrade: websocket", "Upgrade: h2c, WebSocket")
    async with stage(echo, realtime=True) as here, here.client() as client:
        head = await begun(client, get("/v1/realtime?model=tiny", offers))
        assert head.startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
        assert b"x-cellgate-unit: u0" in head
        assert await echoed(client, b"\x81\x02hi") == b"\x81\x02hi"
        assert await echoed(client, b"x" * 300_000) == b"x" * 300_000
        assert here.plane.board.in_flight == 1
        (received,) = here.unit.requests
        assert (received.get("upgrade"), received.get("sec-websocket-key")) == ("websocket", "eA==")
        client.abort()
        await here.until(lambda: here.outcomes == ["ok"])
        assert [record.status for record in here.records.kept] == [101]

        async def one(request: Received) -> None:
            request.write(SWITCHED + b"\x88\x00")
            request.connection.writer.close()

        here.unit.script = one
        async with here.client() as other:
            await begun(other)
            assert await other.rest() == b"\x88\x00", "the unit ends it"
        await here.until(lambda: here.outcomes == ["ok"] * 2)


async def test_off_it_is_not_supported_and_other_upgrades_are_ignored() -> None:
    async with stage(echo) as here, here.client() as client:
        reply = await client.ask(ASK)
        assert (reply.status, reply.error["code"]) == (501, "method_not_supported")
        assert here.received == 0
    async with stage(echo, realtime=True) as here, here.client() as client:
        assert (await client.ask(get("/v1/models", HELLO))).status == 200
        assert (await client.ask(get("/v1/realtime", HELLO.replace("websocket", "h2c")))).status == 404
        # What comes before the answer is refused.
        reply = await client.ask(ASK + b"\x81\x02hi")
        assert (reply.status, reply.error["code"]) == (400, "bad_request")
        assert here.received == 0


async def test_a_model_that_nobody_serves_and_one_with_another_name() -> None:
    """Two are one too many: a key might be for the first, and the engine take the last."""
    models = {"gpt": (("tiny", 1.0),)}
    async with stage(echo, realtime=True, models=models) as here:
        for other in ("large", "", "x" * 2000):
            async with here.client() as client:
                reply = await client.ask(get(f"/v1/realtime?model=tiny&mod%65l={other}", HELLO))
                assert (reply.status, here.received) == (400, 0)
        async with here.client() as client:
            reply = await client.ask(get("/v1/realtime?model=none", HELLO))
            assert (reply.status, reply.error["code"]) == (404, "unknown_model")
        async with here.client() as client:
            assert b"x-cellgate-model: tiny" in await begun(client, get("/v1/realtime?model=gpt&x=1", HELLO))
            assert here.unit.requests[0].target == "/v1/realtime?model=tiny&x=1"
            client.abort()


async def test_a_session_that_was_queued_has_the_whole_time_to_be_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What counts is when it got a unit, not when it came."""
    monkeypatch.setattr(realtime, "SWITCH_S", 0.3)
    async with stage(echo, realtime=True) as here, here.client() as first:
        state = next(iter(here.plane.board))
        state.unit = replace(state.unit, max_in_flight=1)
        await begun(first)
        async with here.client() as client:
            client.send(ASK)
            await asyncio.sleep(0.5)
            pool = here.gateway.services.pool(state)
            open_now = pool.open

            async def open_late(*given: Any) -> Any:
                await asyncio.sleep(0.1)
                for session in list(here.gateway._sessions):
                    session.tick(here.gateway.now())
                return await open_now(*given)

            monkeypatch.setattr(pool, "open", open_late)
            first.abort()
            async with asyncio.timeout(5.0):
                assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
            client.abort()


async def test_with_keys_its_unit_gets_its_own(tmp_path: Path) -> None:
    file = tmp_path / "keys.jsonl"
    file.write_text(orjson.dumps({"key": "a", "sha256": sha256(b"sk-a").hexdigest()}).decode())
    async with stage(echo, realtime=True, keys=KeySettings(str(file))) as here, here.client() as client:
        state = next(iter(here.plane.board))
        here.plane.configure(Fleet(units=(replace(state.unit, api_key="unit-key"),)))
        await begun(client, get("/v1/realtime?model=tiny", f"{HELLO}Authorization: Bearer sk-a\r\n"))
        assert here.unit.requests[0].get("authorization") == "Bearer unit-key"
        client.abort()


async def test_a_unit_that_does_not_switch_is_left_for_another() -> None:
    async with stage(whole(status="500 No"), echo, realtime=True) as here, here.client() as client:
        head = await begun(client)
        assert b"x-cellgate-unit: u1" in head
        client.abort()
    async with stage(whole(status="404 Not Found"), realtime=True) as here, here.client() as client:
        assert (await client.ask(ASK)).status == 404


async def test_a_unit_that_goes_down_or_a_gate_that_stops_ends_it_with_a_close() -> None:
    async with stage(echo, realtime=True) as here, here.client() as client:
        await begun(client)
        down = Evidence("u0", Sign.BAD, Strength.FATAL, "test", "it is gone", here.plane.now())
        here.plane.prober.observe(down)
        assert await client.rest() == close_frame(1013, b"the unit went down")
    async with stage(echo, realtime=True) as here, here.client() as client:
        await begun(client)
        timeouts = replace(here.gateway.services.settings.timeouts, drain_s=1.0)
        stopping = asyncio.ensure_future(here.gateway.stop(delay_s=0.0, drain_s=5.0))
        here.gateway.services.settings = replace(here.gateway.services.settings, timeouts=timeouts)
        assert await client.rest() == close_frame(1001, b"the gate stops")
        await stopping


async def test_there_is_room_for_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellgate.extras.realtime.LIMITS", replace(LIMITS, realtime_sessions=1))
    async with stage(echo, STREAM, realtime=True) as here, here.client() as client, here.client() as other:
        await begun(client)
        assert (await other.ask(ASK)).status == 503
        client.abort()
    async with stage(STREAM, realtime=True) as here, here.client() as client:
        assert (await client.ask(chat())).whole


async def test_a_real_client_talks_to_a_real_server() -> None:
    async def server(request: Received) -> None:
        key = (request.get("sec-websocket-key") or "").encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key).digest())
        request.write(SWITCHED[:-2] + b"Sec-WebSocket-Accept: %b\r\n\r\n" % accept)
        reader = request.connection.reader
        while (await reader.readexactly(1)) == b"\x81":
            size = (await reader.readexactly(1))[0] & 0x7F
            mask, data = await reader.readexactly(4), await reader.readexactly(size)
            text = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))
            request.write(b"\x81%c%b" % (len(text), text))
        request.write(b"\x88\x00")

    async with stage(server, realtime=True) as here, aiohttp.ClientSession() as session:
        url = f"ws://127.0.0.1:{here.gateway.port}/v1/realtime?model=tiny"
        async with session.ws_connect(url) as socket:
            for text in ("one", "two"):
                await socket.send_str(text)
                assert await socket.receive_str(timeout=5.0) == text


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_the_ends_of_frames_are_known(step: int) -> None:
    short, long = b"\x81\x05hello", b"\x82\x7e\x01\x00" + b"x" * 256
    huge, masked = b"\x82\x7f" + (70_000).to_bytes(8, "big") + b"y" * 70_000, b"\x81\x82abcdhi"
    data = short + long + huge + masked + b"\x89\x00"
    ends = {len(short), len(short + long), len(short + long + huge), len(data) - 2, len(data)}
    frames, seen = FrameEnds(), set[int]()
    for at in range(0, len(data), step):
        frames.feed(data[at : at + step])
        if frames.is_between:
            seen.add(min(at + step, len(data)))
    assert seen == ends if step == 1 else seen <= ends
    assert frames.is_between
