"""What a transport promises of `abort`, of resets, and of peers that have left."""

from __future__ import annotations

import pytest

from tests.laws.transport import Recorder, calm, fill, joined

pytestmark = pytest.mark.usefixtures("play")


async def test_aborting_drops_the_buffer_and_ends_the_connection() -> None:
    """A surprise: the peer of an abort sees a clean end, not a reset, when nothing was left unread."""
    client, server = Recorder(), Recorder()
    async with joined(client, server):
        server.transport.pause_reading()
        written = fill(client)
        client.transport.abort()
        client.transport.write(b"dropped")
        await client.until_lost()
        server.transport.resume_reading()
        await server.until_lost()
        assert len(server.data) < written
        assert (client.error, server.error, server.story[-2:]) == (None, None, ["eof", "lost"])


async def test_aborting_with_bytes_unread_resets_the_peer() -> None:
    client, server = Recorder(), Recorder()
    async with joined(client, server):
        client.transport.pause_reading()
        server.transport.write(b"never read")
        await calm()
        client.transport.abort()
        await server.until_lost()
        assert isinstance(server.error, ConnectionResetError)
        assert server.log == ["made", "lost"]


async def test_a_paused_reader_learns_of_a_reset_only_when_it_reads_on_and_reads_the_data_first() -> None:
    client, server = Recorder(), Recorder()
    async with joined(client, server):
        client.transport.pause_reading()
        server.transport.pause_reading()
        client.transport.write(b"last words")
        server.transport.write(b"never read")
        await calm()
        client.transport.abort()
        await calm()
        assert server.log == ["made"]
        server.transport.resume_reading()
        await server.until_lost()
        assert (server.data, type(server.error)) == (b"last words", ConnectionResetError)


async def test_a_paused_reader_learns_of_a_reset_when_it_writes() -> None:
    client, server = Recorder(), Recorder()
    async with joined(client, server):
        client.transport.pause_reading()
        server.transport.pause_reading()
        server.transport.write(b"never read")
        await calm()
        client.transport.abort()
        await calm()
        server.transport.write(b"anybody?")
        assert server.transport.is_closing()
        await server.until_lost()
        assert isinstance(server.error, ConnectionResetError)


async def test_writing_to_a_peer_that_has_left_breaks_the_connection() -> None:
    client, server = Recorder(), Recorder(keep_open=True)
    async with joined(client, server):
        client.transport.close()
        await server.until(lambda: "eof" in server.log)
        server.transport.write(b"the first one only provokes the reset")
        await calm()
        assert "lost" not in server.log
        server.transport.write(b"the second one meets it")
        await server.until_lost()
        assert isinstance(server.error, BrokenPipeError)
