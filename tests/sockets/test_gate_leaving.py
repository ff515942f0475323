"""Clients that leave, over real sockets: their unit must stop working for them at once."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import cast

import pytest

from cellgate.proxy.config.settings import Timeouts
from cellgate.proxy.http.errors import Failure
from cellgate.router.nouns import Ask
from tests.sim.loop import SimLoop
from tests.wire.client import Client, chat, post
from tests.wire.stage import live, simulated, stage
from tests.wire.unit import PAUSE_S, SSE_HEAD, STREAM, TOKENS, Received, Script, chunk, whole

SOON_S = 0.1
PLAIN_HELD = whole(b"x" * 99)[:-90]
PLAIN_BEGUN = whole(b"x" * 99_999)[:-99_990]


def then_silent(data: bytes) -> Script:
    """Write, and nothing more for as long as anyone would wait."""

    async def play(request: Received) -> None:
        request.write(data)
        await asyncio.sleep(60.0)

    return play


MOMENTS: dict[str, tuple[bytes, bytes]] = {
    "before the head": (b"", b""),
    "after the head of a stream": (SSE_HEAD, b""),
    "in the first event": (SSE_HEAD + chunk(TOKENS[0][:9]), b""),
    "in the middle of a stream": (SSE_HEAD + chunk(TOKENS[0]), TOKENS[0]),
    "in a plain body that is held": (PLAIN_HELD, b""),
    "in the middle of a plain body": (PLAIN_BEGUN, b"x" * 9),
}
WAYS: dict[str, Callable[[Client], None]] = {
    "aborts": lambda client: client.abort(),
    "closes": lambda client: client.writer.close(),
    "shuts down": lambda client: client.writer.write_eof(),
}


@pytest.mark.parametrize(("sent", "seen"), MOMENTS.values(), ids=MOMENTS)
@pytest.mark.parametrize("leave", WAYS.values(), ids=WAYS)
@live
async def test_a_client_that_leaves_closes_its_units_connection(
    sent: bytes, seen: bytes, leave: Callable[[Client], None]
) -> None:
    async with stage(then_silent(sent), STREAM) as here, here.client() as client:
        client.send(chat())
        request = await here.units[0].received()
        if seen:
            await client.reader.readuntil(seen)
        else:
            await asyncio.sleep(PAUSE_S)
        left_at = asyncio.get_running_loop().time()
        leave(client)
        await request.connection.until_gone()
        assert asyncio.get_running_loop().time() - left_at < SOON_S
        await here.until(lambda: here.outcomes)
        assert (here.outcomes, here.plane.board.in_flight) == (["client_left"], 0)
        assert here.records.kept[0].status == (200 if seen else 499)
        # It was nobody's fault: the unit is as good as before, and nobody else was asked.
        assert [state.case.verdict.value for state in here.plane.board] == ["up", "up"]
        assert len(here.units[1].requests) == 0


@live
async def test_a_client_that_leaves_behind_pipelined_requests_leaves_them_undone() -> None:
    async with stage(then_silent(SSE_HEAD)) as here, here.client() as client:
        client.send(chat() * 5)
        await here.unit.received()
        client.abort()
        await here.until_quiet()
        assert here.received == 1
        assert here.outcomes == ["client_left"]


@live
async def test_a_client_may_leave_while_its_body_is_parsed_elsewhere() -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def read_large(body: bytes, *_: object) -> Ask | Failure:
        asked.set()
        try:
            await go_on.wait()
        except asyncio.CancelledError:
            # It is being read, and its memory in use.
            await go_on.wait()
            raise
        return Ask()

    async with stage(STREAM) as here, here.client() as client:
        here.gateway.large_reads._read = read_large
        client.send(post(b'{"prompt": "' + b"x" * (1 << 20) + b'"}'))
        await asked.wait()
        client.abort()
        await here.until(lambda: not here.gateway.clients)
        await asyncio.sleep(0.01)
        assert here.gateway.memory.used > 1 << 20
        go_on.set()
        await here.until(lambda: not here.gateway.large_reads)
        assert here.gateway.memory.used == 0
        assert (here.received, here.outcomes) == (0, ["client_left"])


@live
async def test_a_client_may_leave_while_its_body_waits_to_be_parsed() -> None:
    asked = asyncio.Event()

    async def read_large(body: bytes, *_: object) -> Ask | Failure:
        asked.set()
        await asyncio.Event().wait()
        return Ask()

    async with stage(STREAM) as here, here.client() as client:
        here.gateway.large_reads._read = read_large
        client.send(post(b'{"prompt": "' + b"x" * (1 << 20) + b'"}'))
        await asked.wait()
        client.abort()
        await here.until(lambda: not here.gateway.large_reads and not here.gateway.clients)
        assert here.gateway.memory.used == 0


@live
async def test_a_body_whose_client_left_is_freed_at_once_and_not_when_garbage_is_collected() -> None:
    class Body(bytearray):
        """Can be waited for, unlike bytes."""

    asked, bodies = asyncio.Event(), list[weakref.ref[Body]]()

    async def read_large(body: bytes, *_: object) -> Ask | Failure:
        held = Body(body)
        bodies.append(weakref.ref(held))
        asked.set()
        await asyncio.Event().wait()
        return Ask(str(len(held)))

    gc.disable()
    try:
        async with stage(STREAM) as here, here.client() as client:
            here.gateway.large_reads._read = read_large
            client.send(post(b'{"prompt": "' + b"x" * (1 << 20) + b'"}'))
            await asked.wait()
            client.abort()
            await here.until(lambda: not here.gateway.large_reads and not here.gateway.clients)
            assert [each() for each in bodies] == [None]
    finally:
        gc.enable()


@simulated
async def test_a_client_may_leave_before_there_is_a_connection() -> None:
    network = cast(SimLoop, asyncio.get_running_loop()).network
    async with stage(STREAM) as here, here.client() as client:
        network.blackhole(f"127.0.0.1:{here.unit.port}")
        client.send(chat())
        await asyncio.sleep(1.0)
        assert here.plane.board.in_flight == 1
        client.abort()
        await here.until_quiet()
        assert here.outcomes == ["client_left"]
        network.heal()
        async with here.client() as other:
            assert (await other.ask(chat())).status == 200


@live
async def test_many_come_and_go_and_nothing_is_left() -> None:
    async def play(request: Received) -> None:
        number = len(here.unit.requests)
        request.write(SSE_HEAD + chunk(TOKENS[0]))
        await asyncio.sleep(0.001 * (number % 5))
        request.write(STREAM.removeprefix(SSE_HEAD))

    async def visit(number: int) -> None:
        async with here.client() as client:
            client.send(chat())
            if number % 2:
                await client.event()
            else:
                assert (await client.reply()).whole

    async with stage(play) as here:
        connections = here.gateway.pool(here.plane.board.units["u0"]).connections
        for _ in range(3):
            await asyncio.gather(*map(visit, range(60)))
            await here.until_quiet()
            assert len(here.gateway.clients) == 0
            assert len(connections) <= 60
            assert not here.gateway.large_reads
        assert set(here.outcomes) == {"ok", "client_left"}


@live
async def test_a_client_that_was_kept_warm_has_been_answered_when_it_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cellgate.proxy.process.signals.TICK_S", 0.01)

    async def play(request: Received) -> None:
        request.write(SSE_HEAD)
        await asyncio.sleep(3 * PAUSE_S)
        request.connection.close()

    warm = Timeouts(head_hold_s=PAUSE_S)
    async with stage(play, then_silent(b""), timeouts=warm) as here, here.client() as client:
        client.send(chat())
        shown = await client.event()
        await here.units[1].received()
        client.abort()
        await here.until(lambda: here.outcomes)
        (record,) = here.records.kept
        assert (record.status, record.outcome.value, record.attempts) == (200, "client_left", 2)
        assert record.bytes_out >= len(shown)
