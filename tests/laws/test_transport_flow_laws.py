"""What a transport promises of data: its order, pausing a reader, pausing a writer."""

from __future__ import annotations

import asyncio

import pytest

from tests.laws.transport import Recorder, calm, fill, joined

pytestmark = pytest.mark.usefixtures("play")


async def test_bytes_arrive_once_and_in_order() -> None:
    client, server = Recorder(), Recorder()
    async with joined(client, server):
        pieces = [bytes([i % 251]) * (i * 37 % 5000) for i in range(300)]
        for piece in pieces[:200]:
            client.transport.write(piece)
        client.transport.writelines(pieces[200:])
        await server.until(lambda: len(server.data) == sum(map(len, pieces)))
        assert server.data == b"".join(pieces)


async def test_a_paused_reader_gets_nothing_until_it_resumes() -> None:
    client, server = Recorder(), Recorder()
    async with joined(client, server):
        server.transport.pause_reading()
        server.transport.pause_reading()
        client.transport.write(b"wait")
        client.transport.write_eof()
        await calm()
        assert (server.log, server.transport.is_reading()) == (["made"], False)
        server.transport.resume_reading()
        server.transport.resume_reading()
        assert server.transport.is_reading()
        await server.until_lost()
        assert (server.data, server.story) == (b"wait", ["made", "data", "eof", "lost"])


async def test_pausing_inside_data_received_stops_the_next_one() -> None:
    class Sipper(Recorder):
        def data_received(self, data: bytes) -> None:
            self.transport.pause_reading()
            super().data_received(data)

    client, server = Recorder(), Sipper()
    async with joined(client, server):
        client.transport.write(b"a" * 500_000)
        await server.until(lambda: server.data)
        await calm()
        assert server.log.count("data") == 1
        while len(server.data) < 500_000:
            server.log.clear()
            server.transport.resume_reading()
            await server.until(lambda: server.log == ["data"])
        assert server.data == b"a" * 500_000


async def test_pausing_a_reader_holds_even_when_its_bytes_are_there_already() -> None:
    class Jealous(Recorder):
        other: Jealous

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.other.transport.pause_reading()

    clients, servers = (Recorder(), Recorder()), (Jealous(), Jealous())
    servers[0].other, servers[1].other = servers[1], servers[0]
    async with joined(clients[0], servers[0]), joined(clients[1], servers[1]):
        for client in clients:
            client.transport.write(b"x")
        await calm()
        assert sorted(server.data for server in servers) == [b"", b"x"]


async def test_pausing_inside_connection_made_does_nothing() -> None:
    """A surprise: reading starts after connection_made, whatever was asked for in it."""

    class Shy(Recorder):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.transport.pause_reading()

    client, server = Recorder(), Shy()
    async with joined(client, server):
        client.transport.write(b"read anyway")
        await server.until(lambda: server.data)
        assert server.transport.is_reading()


async def test_a_full_buffer_pauses_the_writer_at_once_and_a_drained_one_resumes_it() -> None:
    client, server = Recorder(), Recorder()
    async with joined(client, server):
        server.transport.pause_reading()
        for _ in range(2):
            client.log.clear()
            fill(client)
            assert client.log == ["pause"]
            assert client.transport.get_write_buffer_size() > 0
            client.transport.write(b"more is kept")
            await calm()
            assert client.log == ["pause"]
            server.transport.resume_reading()
            await client.until(lambda: "resume" in client.log)
            assert client.log == ["pause", "resume"]
            assert client.transport.get_write_buffer_size() <= 16
            server.transport.pause_reading()


async def test_the_water_marks_have_uvloops_defaults_and_rules() -> None:
    client, server = Recorder(), Recorder()
    async with joined(client, server):
        transport = client.transport
        assert transport.get_write_buffer_limits() == (16, 65_536)
        for arguments, limits in (
            ({"high": 100}, (25, 100)),
            ({"low": 100}, (100, 400)),
            ({"high": 9, "low": 3}, (3, 9)),
        ):
            transport.set_write_buffer_limits(**arguments)
            assert transport.get_write_buffer_limits() == limits
        with pytest.raises(ValueError, match="must be >= low"):
            transport.set_write_buffer_limits(high=1, low=2)
