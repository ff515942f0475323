"""Clients that do not read, and clients that send too much at once: in virtual time, with small windows, so
that every place where a pause may fall is met.
"""

from __future__ import annotations

import asyncio

import pytest

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.config.settings import Limits
from tests.sim.tcp import WINDOW
from tests.sim.transport import HIGH_WATER
from tests.wire.client import chat
from tests.wire.replies import read_reply
from tests.wire.stage import Stage, simulated, stage
from tests.wire.unit import Received, whole

MOST = HIGH_WATER + 2 * WINDOW
"""What the gate may hold of one reply: a full buffer, and one read on top of it."""

SIZES = [*range(2 * WINDOW - 256, 2 * WINDOW + 64, 16), *range(3 * WINDOW, 5 * WINDOW, 16384)]
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


@simulated
async def test_a_client_that_never_reads_bounds_what_is_held_and_its_leaving_frees_all() -> None:
    async with stage(of_size(100 * WINDOW)) as here:
        connections = here.gateway.pool(here.plane.board.units["u0"]).connections
        for _ in range(20):
            async with here.client() as unreading:
                unreading.stop_reading()
                unreading.send(chat(stream=False) * 3)
                # Not as long as a client may read nothing.
                await asyncio.sleep(10.0)
                # And what came between two looks at it.
                assert here.buffered() <= MOST + LIMITS.unsent_bytes + 4 * WINDOW
                assert len(connections) == 1
            await here.until_quiet()
            assert not connections


@simulated
async def test_the_clock_of_a_second_request_stands_while_the_first_is_in_flight() -> None:
    async def play(request: Received) -> None:
        await asyncio.sleep(300.0)
        request.write(whole())

    async with stage(play) as here, here.client() as client:
        client.send(chat(stream=False) + chat(stream=False, pad="x" * 1_000_000))
        replies = [await read_reply(client.reader) for _ in range(2)]
        assert [reply.status for reply in replies] == [200, 200]


@simulated
async def test_pipelined_requests_wait_outside_while_one_is_in_flight() -> None:
    async def play(request: Received) -> None:
        await asyncio.sleep(0.1)
        request.write(whole())

    async with stage(play) as here, here.client() as client:
        client.send(chat(stream=False) * 20_000)
        for _ in range(200):
            assert (await client.reply()).status == 200
            (connection,) = here.gateway.clients
            # What is waiting are whole requests and failures; each request here is more than 100 bytes.
            assert len(connection._intake.queue) < 3 * WINDOW / 100


@simulated
async def test_memory_is_taken_in_the_order_it_was_asked_for() -> None:
    limits = Limits(bodies_bytes=1000, body_bytes=1000)
    async with (
        stage(whole(), limits=limits) as here,
        here.client() as first,
        here.client() as second,
        here.client() as third,
    ):
        clients = (first, second, third)
        for client in clients:
            client.send(b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: 900\r\n\r\n{")
            client.send(b" " * 400)
            await asyncio.sleep(0.1)
            client.send(b" " * 300)
            await asyncio.sleep(0.1)
        for client in clients:
            await asyncio.sleep(0.1)
            assert here.gateway.memory.used == 900
            assert (await client.ask(b" " * 198 + b"}")).status == 200
