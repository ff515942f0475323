"""Clients that read slower than their unit writes: the slot is the engine's, and the bytes are the gate's."""

from __future__ import annotations

import asyncio
import socket

import pytest

from cellgate.proxy.config.limits import LIMITS, REACHED
from loadtests.wire.raw import dial
from tests.real.asking import until
from tests.wire.client import chat
from tests.wire.stage import Stage, live, stage
from tests.wire.unit import Received

EVENT = b'data: {"id":"1","choices":[{"delta":{"content":"%b"}}]}\n\n' % (b"a" * 900)


async def long_answer(request: Received) -> None:
    """300 kB of tokens, in the order of what an engine writes, and its end."""
    write = request.write
    write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(320):
        write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
        await asyncio.sleep(0)
    write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def reader(here: Stage) -> socket.socket:
    """A client that has asked and reads nothing."""
    return dial(here.gateway.port, chat(stream=True))


async def until_free(here: Stage) -> None:
    await until(lambda: here.received and not here.plane.board.in_flight)


@live
async def test_a_slot_ends_with_its_engine_and_the_rest_waits_in_the_gate() -> None:
    async with stage(long_answer) as here:
        raw = reader(here)
        await until_free(here)
        assert here.gateway.backlogs.held == LIMITS.unsent_bytes
        raw.setblocking(True)
        got = b""
        while b"[DONE]" not in got:
            got += await asyncio.to_thread(raw.recv, 65536)
        assert got.count(b'"id"') == 320
        raw.close()
        await until(lambda: not here.gateway.backlogs.held)


@live
async def test_without_memory_for_it_the_unit_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage(long_answer) as here:
        here.gateway.backlogs.held = LIMITS.unsent_total_bytes
        raw = reader(here)
        await until(lambda: any(lease.paused for lease in here.plane.board.units["u0"].leases))
        assert here.plane.board.in_flight == 1
        raw.close()


@live
async def test_who_reads_nothing_is_ended_by_a_named_limit() -> None:
    async with stage(long_answer) as here:
        before = REACHED["slow_reader_s"]
        raw = reader(here)
        await until_free(here)
        (client,) = here.gateway.clients
        # What the kernel takes at first is not read either.
        for windows in (1, 2):
            client.tick(here.gateway.now() + windows * (LIMITS.slow_reader_s + 1.0))
        assert REACHED["slow_reader_s"] > before
        client.tick(here.gateway.now() + 10 * LIMITS.slow_reader_s)
        await until(lambda: not here.gateway.clients)
        assert here.gateway.backlogs.held == 0
        raw.close()
