"""What a transport promises: connecting, data, errors, resets and closing."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

import pytest

from tests.laws.transport import (
    LOCALHOST,
    TIMEOUT_S,
    Recorder,
    acting,
    calm,
    failing,
    fill,
    joined,
    listening,
    problems,
)

pytestmark = pytest.mark.usefixtures("play")


async def test_connecting_tells_both_ends_before_the_caller_and_names_the_addresses() -> None:
    client, server = Recorder(), Recorder()
    async with listening(lambda: server) as port:
        made = asyncio.get_running_loop().create_connection(lambda: client, LOCALHOST, port)
        transport, protocol = await made
        assert (client.log, transport, protocol) == (["made"], client.transport, client)
        await server.until(lambda: server.log)
        near, far = client.transport.get_extra_info, server.transport.get_extra_info
        assert near("peername") == far("sockname") == (LOCALHOST, port)
        assert near("sockname") == far("peername")
        assert near("nothing", 7) == 7
        client.transport.close()
        await server.until_lost()
        assert far("peername") == near("sockname")


async def test_connecting_where_nobody_listens_and_listening_on_an_address_in_use_fail() -> None:
    loop = asyncio.get_running_loop()
    async with listening(Recorder) as port:
        with pytest.raises(OSError, match="in use") as in_use:
            await loop.create_server(Recorder, LOCALHOST, port)
        assert in_use.value.errno == errno.EADDRINUSE
    with pytest.raises(ConnectionRefusedError) as refused:
        await loop.create_connection(Recorder, LOCALHOST, port)
    assert refused.value.errno == errno.ECONNREFUSED


async def test_closing_a_server_leaves_its_connections_alone() -> None:
    async with joined() as (client, _):
        listener = await asyncio.get_running_loop().create_server(Recorder, LOCALHOST, 0)
        assert listener.is_serving()
        listener.close()
        await asyncio.wait_for(listener.wait_closed(), TIMEOUT_S)
        assert (list(listener.sockets), listener.is_serving()) == ([], False)
    spare = Recorder()
    async with listening(lambda: spare) as port:
        await asyncio.get_running_loop().create_connection(lambda: client, LOCALHOST, port)
        await spare.until(lambda: spare.log)
    spare.transport.write(b"still here")
    await client.until(lambda: client.data)
    spare.transport.close()
    await client.until_lost()


async def test_both_ends_may_write_as_soon_as_they_are_connected() -> None:
    greeters = [acting("connection_made", lambda one: one.transport.write(b"hello")) for _ in range(2)]
    async with joined(*greeters) as (client, server):
        await client.until(lambda: client.data == b"hello")
        await server.until(lambda: server.data == b"hello")


async def test_closing_or_aborting_inside_connection_made_still_returns_a_closing_transport() -> None:
    closes = acting("connection_made", lambda one: one.transport.close())
    aborts = acting("connection_made", lambda one: one.transport.abort())
    for brief in (closes, aborts):
        async with joined(brief) as (client, server):
            assert client.transport.is_closing()
            await client.until_lost()
            await server.until_lost()
            assert client.log == ["made", "lost"]


async def test_a_connect_cancelled_after_connection_made_is_closed_without_connection_lost() -> None:
    """A surprise: nor does is_closing() tell; only the caller of create_connection knows."""
    client, server = acting("connection_made", lambda _: task.cancel()), Recorder()
    async with listening(lambda: server) as port:
        connect = asyncio.get_running_loop().create_connection(lambda: client, LOCALHOST, port)
        task = asyncio.ensure_future(connect)
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.until_lost()
        await calm()
        assert (client.log, client.transport.is_closing()) == (["made"], False)
        with pytest.raises(RuntimeError, match="the handler is closed"):
            client.transport.write(b"x")


# What a transport promises of data: its order, pausing a reader, pausing a writer.


async def test_bytes_arrive_once_and_in_order() -> None:
    async with joined() as (client, server):
        pieces = [bytes([i % 251]) * (i * 37 % 5000) for i in range(300)]
        for piece in pieces[:200]:
            client.transport.write(piece)
        client.transport.writelines(pieces[200:])
        await server.until(lambda: len(server.data) == sum(map(len, pieces)))
        assert server.data == b"".join(pieces)


async def test_a_paused_reader_gets_nothing_until_it_resumes() -> None:
    async with joined() as (client, server):
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
    sipper = acting("data_received", lambda one: one.transport.pause_reading())
    async with joined(server=sipper) as (client, server):
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
    one = acting("data_received", lambda _: other.transport.pause_reading())
    other = acting("data_received", lambda _: one.transport.pause_reading())
    servers = (one, other)
    async with joined(server=one) as (near, _), joined(server=other) as (far, _):
        near.transport.write(b"x")
        far.transport.write(b"x")
        await calm()
        assert sorted(server.data for server in servers) == [b"", b"x"]


async def test_pausing_inside_connection_made_does_nothing() -> None:
    """A surprise: reading starts after connection_made, whatever was asked for in it."""
    shy = acting("connection_made", lambda one: one.transport.pause_reading())
    async with joined(server=shy) as (client, server):
        client.transport.write(b"read anyway")
        await server.until(lambda: server.data)
        assert server.transport.is_reading()


async def test_a_full_buffer_pauses_the_writer_at_once_and_a_drained_one_resumes_it() -> None:
    async with joined() as (client, server):
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
    async with joined() as (client, _):
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


# What a transport does with an exception that a protocol raises.


@pytest.mark.parametrize("told", ["data_received", "eof_received", "connection_lost"])
async def test_an_exception_of_a_protocol_is_reported_and_closes_the_connection_with_it(told: str) -> None:
    error = ValueError("cannot read this")
    with problems() as caught:
        async with joined(server=failing(told, error)) as (client, server):
            if told == "connection_lost":
                server.transport.close()
            elif told == "eof_received":
                client.transport.write_eof()
            else:
                client.transport.write(b"x")
            await client.until_lost()
            await server.until_lost()
    assert [problem["exception"] for problem in caught] == [error]
    assert server.error is (None if told == "connection_lost" else error)
    assert (server.log.count("lost"), client.log.count("lost")) == (1, 1)


async def test_an_os_error_in_data_received_closes_the_connection_in_silence() -> None:
    fragile = failing("data_received", OSError(errno.EIO, "disk"))
    async with joined(server=fragile) as (client, server):
        client.transport.write(b"x")
        await server.until_lost()
        assert (type(server.error), server.log) == (OSError, ["made", "data", "lost"])


async def test_writing_to_a_dead_transport_inside_data_received_closes_the_reading_one() -> None:
    async with joined() as (_, far):
        far.transport.close()
        await far.until_lost()
    onward = acting("data_received", lambda one: far.transport.write(one.data))
    with problems() as caught:
        async with joined(server=onward) as (client, relay):
            client.transport.write(b"x")
            await relay.until_lost()
    assert isinstance(relay.error, RuntimeError)
    assert len(caught) == 1


async def test_an_exception_in_connection_made_leaves_the_connection_open_and_deaf() -> None:
    fragile = failing("connection_made", ValueError("not ready"))
    with problems() as caught:
        async with joined(server=fragile) as (client, server):
            client.transport.write(b"x")
            await calm()
            assert (server.log, server.transport.is_reading()) == (["made"], False)
            assert not server.transport.is_closing()
    assert len(caught) == 1


# What a transport promises of `abort`, of resets, and of peers that have left.


async def test_aborting_drops_the_buffer_and_ends_the_connection() -> None:
    """A surprise: the peer of an abort sees a clean end, not a reset, when nothing was left unread."""
    async with joined() as (client, server):
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
    async with joined() as (client, server):
        client.transport.pause_reading()
        server.transport.write(b"never read")
        await calm()
        client.transport.abort()
        await server.until_lost()
        assert isinstance(server.error, ConnectionResetError)
        assert server.log == ["made", "lost"]


async def test_a_paused_reader_learns_of_a_reset_when_it_reads_on_with_the_data_first_or_writes() -> None:
    for writes in (False, True):
        async with joined() as (client, server):
            client.transport.pause_reading()
            server.transport.pause_reading()
            client.transport.write(b"last words")
            server.transport.write(b"never read")
            await calm()
            client.transport.abort()
            await calm()
            assert server.log == ["made"]
            if writes:
                server.transport.write(b"anybody?")
                assert server.transport.is_closing()
            else:
                server.transport.resume_reading()
            await server.until_lost()
            assert isinstance(server.error, ConnectionResetError)
            assert server.data == (b"" if writes else b"last words")


async def test_writing_to_a_peer_that_has_left_breaks_the_connection() -> None:
    async with joined(server=Recorder(keep_open=True)) as (client, server):
        client.transport.close()
        await server.until(lambda: "eof" in server.log)
        server.transport.write(b"the first one only provokes the reset")
        await calm()
        assert "lost" not in server.log
        server.transport.write(b"the second one meets it")
        await server.until_lost()
        assert isinstance(server.error, BrokenPipeError)


# What a transport promises of `close`, of `write_eof` and of the peer's end.


async def test_closing_sends_what_was_written_and_ends_the_peer_cleanly() -> None:
    async with joined() as (client, server):
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
    async with joined() as (client, server):
        server.transport.pause_reading()
        fill(client)
        client.transport.close()
        server.transport.write(b"too late")
        await calm()
        assert (client.data, client.transport.is_reading()) == (b"", False)


async def test_a_write_after_close_is_dropped_and_after_connection_lost_it_raises() -> None:
    writer = acting("connection_lost", lambda one: one.transport.write(b"dropped too"))
    async with joined(writer) as (client, server):
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
    async with joined() as (client, server):
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
    async with joined() as (client, server):
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
    async with joined(server=Recorder(keep_open=True)) as (client, server):
        assert client.transport.can_write_eof()
        client.transport.write_eof()
        client.transport.write_eof()
        with pytest.raises(RuntimeError, match="write_eof"):
            client.transport.write(b"x")
        await server.until(lambda: "eof" in server.log)
        # Reading again tells the end again.
        server.transport.resume_reading()
        await server.until(lambda: server.log.count("eof") == 2)
        assert (server.transport.is_reading(), server.transport.is_closing()) == (False, False)
        server.transport.write(b"answer")
        await client.until(lambda: client.data == b"answer")
        server.transport.close()
        await client.until_lost()
        assert (client.story, client.error) == (["made", "data", "eof", "lost"], None)


async def test_write_eof_comes_after_all_that_was_written() -> None:
    async with joined(server=Recorder(keep_open=True)) as (client, server):
        server.transport.pause_reading()
        written = fill(client)
        client.transport.write_eof()
        server.transport.resume_reading()
        await server.until(lambda: "eof" in server.log)
        assert (len(server.data), server.story) == (written, ["made", "data", "eof"])


async def test_closing_inside_data_received_ends_it_there() -> None:
    def leave(one: Recorder) -> None:
        one.transport.write(b"bye")
        one.transport.close()

    async with joined(server=acting("data_received", leave)) as (client, server):
        client.transport.write(b"a")
        await server.until_lost()
        await client.until_lost()
        assert (server.log, server.error) == (["made", "data", "lost"], None)
        assert (client.data, client.error) == (b"bye", None)
