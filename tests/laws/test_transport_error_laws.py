"""What a transport does with an exception that a protocol raises."""

from __future__ import annotations

import asyncio
import errno

import pytest

from tests.laws.transport import Recorder, calm, joined, problems

pytestmark = pytest.mark.usefixtures("play")


async def test_an_exception_in_data_received_closes_the_connection_with_it() -> None:
    class Fragile(Recorder):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            raise ValueError("cannot read this")

    client, server = Recorder(), Fragile()
    with problems() as caught:
        async with joined(client, server):
            client.transport.write(b"x")
            await server.until_lost()
            await client.until_lost()
    assert repr(server.error) == "ValueError('cannot read this')"
    assert [problem["exception"] for problem in caught] == [server.error]
    assert (server.story, client.story) == (["made", "data", "lost"], ["made", "eof", "lost"])


async def test_an_os_error_in_data_received_closes_the_connection_in_silence() -> None:
    class Fragile(Recorder):
        def data_received(self, data: bytes) -> None:
            raise OSError(errno.EIO, "disk")

    client, server = Recorder(), Fragile()
    async with joined(client, server):
        client.transport.write(b"x")
        await server.until_lost()
        assert (type(server.error), server.log) == (OSError, ["made", "lost"])


async def test_writing_to_a_dead_transport_inside_data_received_closes_the_reading_one() -> None:
    class Relay(Recorder):
        def __init__(self, onward: Recorder) -> None:
            super().__init__()
            self.onward = onward

        def data_received(self, data: bytes) -> None:
            self.onward.transport.write(data)

    near, far = Recorder(), Recorder()
    async with joined(near, far):
        far.transport.close()
        await far.until_lost()
    client, relay = Recorder(), Relay(far)
    with problems() as caught:
        async with joined(client, relay):
            client.transport.write(b"x")
            await relay.until_lost()
    assert isinstance(relay.error, RuntimeError)
    assert len(caught) == 1


async def test_an_exception_in_connection_made_leaves_the_connection_open_and_deaf() -> None:
    class Fragile(Recorder):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            raise ValueError("not ready")

    client, server = Recorder(), Fragile()
    with problems() as caught:
        async with joined(client, server):
            client.transport.write(b"x")
            await calm()
            assert (server.log, server.transport.is_reading()) == (["made"], False)
            assert not server.transport.is_closing()
    assert len(caught) == 1


async def test_an_exception_in_eof_received_closes_the_connection_with_it() -> None:
    class Fragile(Recorder):
        def eof_received(self) -> bool:
            raise ValueError("no end")

    client, server = Recorder(), Fragile()
    with problems() as caught:
        async with joined(client, server):
            client.transport.write_eof()
            await server.until_lost()
    assert repr(server.error) == "ValueError('no end')"
    assert len(caught) == 1


async def test_an_exception_in_connection_lost_is_reported_and_the_connection_is_closed() -> None:
    class Fragile(Recorder):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            raise ValueError("bad end")

    client, server = Recorder(), Fragile()
    with problems() as caught:
        async with joined(client, server):
            server.transport.close()
            await client.until_lost()
    assert (len(caught), server.log.count("lost")) == (1, 1)
