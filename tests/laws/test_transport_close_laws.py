"""What a transport promises of `close`, of `write_eof` and of the peer's end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.laws.transport import Recorder, calm, fill, joined

pytestmark = pytest.mark.usefixtures("play")


async def test_closing_sends_what_was_written_and_ends_the_peer_cleanly() -> None:
    client, server = Recorder(), Recorder()
    async with joined(client, server):
        server.transport.pause_reading()
        written = fill(client)
        client.transport.close()
        client.transport.write(b"late")  # The buffer was not empty, so even this goes out.
        assert client.transport.is_closing()
        await calm()
        assert "lost" not in client.log
        server.transport.resume_reading()
        await server.until_lost()
        await client.until_lost()
        assert (len(server.data), server.data[-4:]) == (written + 4, b"late")
        assert (client.error, server.error, server.story[-2:]) == (None, None, ["eof", "lost"])


async def test_no_data_is_delivered_after_close() -> None:
    client, server = Recorder(), Recorder()
    async with joined(client, server):
        server.transport.pause_reading()
        fill(client)
        client.transport.close()
        server.transport.write(b"too late")
        await calm()
        assert (client.data, client.transport.is_reading()) == (b"", False)


async def test_a_write_after_close_is_dropped_and_after_connection_lost_it_raises() -> None:
    class Writer(Recorder):
        def connection_lost(self, exc: Exception | None) -> None:
            self.transport.write(b"dropped too")
            super().connection_lost(exc)

    client, server = Writer(), Recorder()
    async with joined(client, server):
        client.transport.close()
        client.transport.write(b"dropped")
        client.transport.writelines([b"dropped"])
        assert client.transport.get_write_buffer_size() == 0
        await client.until_lost()
        await server.until_lost()
        assert server.data == b""
        dead = client.transport
        calls: list[Callable[[], object]] = [
            lambda: dead.write(b"x"),
            lambda: dead.write(b""),
            lambda: dead.writelines([b"x"]),
            dead.write_eof,
            lambda: dead.set_write_buffer_limits(100),
        ]
        for call in calls:
            with pytest.raises(RuntimeError, match="the handler is closed"):
                call()


async def test_a_closed_transport_bears_every_other_call_and_is_lost_once() -> None:
    client, server = Recorder(), Recorder()
    async with joined(client, server):
        transport = client.transport
        transport.close()
        transport.abort()
        transport.close()
        await client.until_lost()
        for call in (transport.close, transport.abort, transport.pause_reading, transport.resume_reading):
            call()
        await server.until_lost()
        await calm()
        assert (transport.is_closing(), transport.is_reading()) == (True, False)
        assert transport.get_write_buffer_size() == 0
        assert transport.get_protocol() is None
        assert (client.log, client.error) == (["made", "lost"], None)
        assert server.log == ["made", "eof", "lost"]


async def test_a_false_answer_to_the_end_closes_the_transport_after_flushing() -> None:
    client, server = Recorder(), Recorder()
    async with joined(client, server):
        client.transport.write(b"question")
        client.transport.write_eof()
        server.transport.write(b"answer")
        await server.until_lost()
        await client.until_lost()
        assert (server.data, server.story, server.error) == (
            b"question",
            ["made", "data", "eof", "lost"],
            None,
        )
        assert (client.data, client.error) == (b"answer", None)


async def test_a_true_answer_to_the_end_keeps_the_other_direction_open() -> None:
    client, server = Recorder(), Recorder(keep_open=True)
    async with joined(client, server):
        assert client.transport.can_write_eof()
        client.transport.write_eof()
        client.transport.write_eof()
        await server.until(lambda: "eof" in server.log)
        assert (server.transport.is_reading(), server.transport.is_closing()) == (False, False)
        server.transport.write(b"answer")
        await client.until(lambda: client.data == b"answer")
        server.transport.close()
        await client.until_lost()
        assert (client.story, client.error) == (["made", "data", "eof", "lost"], None)


async def test_reading_again_after_the_end_tells_the_end_again() -> None:
    client, server = Recorder(), Recorder(keep_open=True)
    async with joined(client, server):
        client.transport.write_eof()
        await server.until(lambda: "eof" in server.log)
        server.transport.resume_reading()
        await server.until(lambda: server.log.count("eof") == 2)


async def test_a_write_after_write_eof_raises() -> None:
    client, server = Recorder(), Recorder(keep_open=True)
    async with joined(client, server):
        client.transport.write_eof()
        with pytest.raises(RuntimeError, match="write_eof"):
            client.transport.write(b"x")


async def test_write_eof_comes_after_all_that_was_written() -> None:
    client, server = Recorder(), Recorder(keep_open=True)
    async with joined(client, server):
        server.transport.pause_reading()
        written = fill(client)
        client.transport.write_eof()
        server.transport.resume_reading()
        await server.until(lambda: "eof" in server.log)
        assert (len(server.data), server.story) == (written, ["made", "data", "eof"])


async def test_closing_inside_data_received_ends_it_there() -> None:
    class Brief(Recorder):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.transport.write(b"bye")
            self.transport.close()

    client, server = Recorder(), Brief()
    async with joined(client, server):
        client.transport.write(b"a")
        await server.until_lost()
        await client.until_lost()
        assert (server.log, server.error) == (["made", "data", "lost"], None)
        assert (client.data, client.error) == (b"bye", None)
