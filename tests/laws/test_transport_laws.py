"""What a transport promises, held against the simulated loop and against uvloop with real sockets.

The program is written against these laws, so the simulation is only as good as they are: whatever the program
relies on must be a law here, oddities of uvloop included. No law sleeps; each waits for events, at most
`TIMEOUT_S`.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

import pytest
import uvloop

from tests.sim.tcp import Link
from tests.sim.world import World

TIMEOUT_S = 10.0
LOCALHOST = "127.0.0.1"
MOST_WRITES = 1000
EXCHANGES = 30  # More than enough for whatever is on its way to have arrived.

Law = Callable[[], Awaitable[None]]
Problems = list[dict[str, Any]]


class Recorder(asyncio.Protocol):
    """Writes down what the transport tells it. `keep_open` is its answer to the peer's end."""

    transport: asyncio.Transport

    def __init__(self, *, keep_open: bool = False) -> None:
        self.keep_open = keep_open
        self.log: list[str] = []
        self.data = b""
        self.error: Exception | None = None
        self._changed = asyncio.Event()

    def _note(self, what: str) -> None:
        self.log.append(what)
        self._changed.set()

    async def until(self, is_so: Callable[[], object]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not is_so():
                self._changed.clear()
                await self._changed.wait()

    async def until_lost(self) -> None:
        await self.until(lambda: "lost" in self.log)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._note("made")

    def data_received(self, data: bytes) -> None:
        self.data += data
        self._note("data")

    def eof_received(self) -> bool:
        self._note("eof")
        return self.keep_open

    def pause_writing(self) -> None:
        self._note("pause")

    def resume_writing(self) -> None:
        self._note("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.error = exc
        self._note("lost")

    @property
    def story(self) -> list[str]:
        """The log with runs of equal entries told once."""
        return [what for what, before in zip(self.log, [None, *self.log], strict=False) if what != before]


@asynccontextmanager
async def listening(factory: Callable[[], asyncio.Protocol]) -> AsyncIterator[int]:
    server = await asyncio.get_running_loop().create_server(factory, LOCALHOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@asynccontextmanager
async def joined(client: Recorder, server: Recorder) -> AsyncIterator[None]:
    """Connect the two; abort what is left of them at the end."""
    async with listening(lambda: server) as port:
        await asyncio.get_running_loop().create_connection(lambda: client, LOCALHOST, port)
        await server.until(lambda: "made" in server.log)
        try:
            yield
        finally:
            for end in (client, server):
                end.transport.abort()
                await end.until_lost()


async def calm() -> None:
    """Wait until what other connections have on the way must have arrived."""
    near, far = Recorder(), Recorder()
    async with joined(near, far):
        for _ in range(EXCHANGES):
            near.transport.write(b".")
            await far.until(lambda: far.data)
            far.transport.write(b".")
            await near.until(lambda: near.data)
            near.data = far.data = b""


@contextmanager
def problems() -> Iterator[Problems]:
    """Take what reaches the exception handler."""
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    caught: Problems = []
    loop.set_exception_handler(lambda _, context: caught.append(context))
    try:
        yield caught
    finally:
        loop.set_exception_handler(before)


def fill(writer: Recorder) -> int:
    """Write until the transport asks to stop; the bytes written."""
    for count in range(MOST_WRITES):
        if "pause" in writer.log:
            return count * 65_536
        writer.transport.write(b"x" * 65_536)
    raise AssertionError("the transport never asks to stop")


def simulated(seed: int, link: Link) -> asyncio.AbstractEventLoop:
    world = World(seed)
    world.net.default_link = link
    return world.loop


EVEN = Link(latency_s=(0.001, 0.001), split=0.0, hiccup=0.0)  # What is sent together arrives together.
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "simulated, uneven": lambda: simulated(1, Link()),
    "simulated, rough": lambda: simulated(2, Link(split=0.5, hiccup=0.3)),
    "simulated, even": lambda: simulated(3, EVEN),
    "uvloop": uvloop.new_event_loop,
}


@pytest.fixture(params=LOOPS)
def play(request: pytest.FixtureRequest) -> Iterator[Callable[[Law], None]]:
    """Runs a law on one kind of loop."""
    loop = LOOPS[request.param]()
    unexpected: Problems = []
    loop.set_exception_handler(lambda _, context: unexpected.append(context))

    def run(law: Law) -> None:
        loop.run_until_complete(asyncio.wait_for(law(), 2 * TIMEOUT_S))
        assert unexpected == []

    try:
        yield run
    finally:
        loop.close()


Play = Callable[[Law], None]


def test_connecting_tells_both_ends_before_the_caller_and_names_the_addresses(play: Play) -> None:
    async def law() -> None:
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

    play(law)


def test_connecting_where_nobody_listens_is_refused(play: Play) -> None:
    async def law() -> None:
        async with listening(Recorder) as port:
            pass
        with pytest.raises(ConnectionRefusedError) as refused:
            await asyncio.get_running_loop().create_connection(Recorder, LOCALHOST, port)
        assert refused.value.errno == errno.ECONNREFUSED

    play(law)


def test_listening_on_an_address_in_use_fails(play: Play) -> None:
    async def law() -> None:
        async with listening(Recorder) as port:
            with pytest.raises(OSError, match="in use") as in_use:
                await asyncio.get_running_loop().create_server(Recorder, LOCALHOST, port)
            assert in_use.value.errno == errno.EADDRINUSE

    play(law)


def test_closing_a_server_leaves_its_connections_alone(play: Play) -> None:
    async def law() -> None:
        client, server = Recorder(), Recorder()
        async with joined(client, server):
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

    play(law)


def test_bytes_arrive_once_and_in_order(play: Play) -> None:
    async def law() -> None:
        client, server = Recorder(), Recorder()
        async with joined(client, server):
            pieces = [bytes([i % 251]) * (i * 37 % 5000) for i in range(300)]
            for piece in pieces[:200]:
                client.transport.write(piece)
            client.transport.writelines(pieces[200:])
            await server.until(lambda: len(server.data) == sum(map(len, pieces)))
            assert server.data == b"".join(pieces)

    play(law)


def test_both_ends_may_write_as_soon_as_they_are_connected(play: Play) -> None:
    class Greeter(Recorder):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.transport.write(b"hello")

    async def law() -> None:
        client, server = Greeter(), Greeter()
        async with joined(client, server):
            await client.until(lambda: client.data == b"hello")
            await server.until(lambda: server.data == b"hello")

    play(law)


def test_closing_sends_what_was_written_and_ends_the_peer_cleanly(play: Play) -> None:
    async def law() -> None:
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

    play(law)


def test_no_data_is_delivered_after_close(play: Play) -> None:
    async def law() -> None:
        client, server = Recorder(), Recorder()
        async with joined(client, server):
            server.transport.pause_reading()
            fill(client)
            client.transport.close()
            server.transport.write(b"too late")
            await calm()
            assert (client.data, client.transport.is_reading()) == (b"", False)

    play(law)


def test_a_write_after_close_is_dropped_and_after_connection_lost_it_raises(play: Play) -> None:
    class Writer(Recorder):
        def connection_lost(self, exc: Exception | None) -> None:
            self.transport.write(b"dropped too")
            super().connection_lost(exc)

    async def law() -> None:
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

    play(law)


def test_a_closed_transport_bears_every_other_call_and_is_lost_once(play: Play) -> None:
    async def law() -> None:
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

    play(law)


def test_a_false_answer_to_the_end_closes_the_transport_after_flushing(play: Play) -> None:
    async def law() -> None:
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

    play(law)


def test_a_true_answer_to_the_end_keeps_the_other_direction_open(play: Play) -> None:
    async def law() -> None:
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

    play(law)


def test_reading_again_after_the_end_tells_the_end_again(play: Play) -> None:
    async def law() -> None:
        client, server = Recorder(), Recorder(keep_open=True)
        async with joined(client, server):
            client.transport.write_eof()
            await server.until(lambda: "eof" in server.log)
            server.transport.resume_reading()
            await server.until(lambda: server.log.count("eof") == 2)

    play(law)


def test_a_write_after_write_eof_raises(play: Play) -> None:
    async def law() -> None:
        client, server = Recorder(), Recorder(keep_open=True)
        async with joined(client, server):
            client.transport.write_eof()
            with pytest.raises(RuntimeError, match="write_eof"):
                client.transport.write(b"x")

    play(law)


def test_write_eof_comes_after_all_that_was_written(play: Play) -> None:
    async def law() -> None:
        client, server = Recorder(), Recorder(keep_open=True)
        async with joined(client, server):
            server.transport.pause_reading()
            written = fill(client)
            client.transport.write_eof()
            server.transport.resume_reading()
            await server.until(lambda: "eof" in server.log)
            assert (len(server.data), server.story) == (written, ["made", "data", "eof"])

    play(law)


def test_aborting_drops_the_buffer_and_ends_the_connection(play: Play) -> None:
    """A surprise: the peer of an abort sees a clean end, not a reset, when nothing was left unread."""

    async def law() -> None:
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

    play(law)


def test_aborting_with_bytes_unread_resets_the_peer(play: Play) -> None:
    async def law() -> None:
        client, server = Recorder(), Recorder()
        async with joined(client, server):
            client.transport.pause_reading()
            server.transport.write(b"never read")
            await calm()
            client.transport.abort()
            await server.until_lost()
            assert isinstance(server.error, ConnectionResetError)
            assert server.log == ["made", "lost"]

    play(law)


def test_a_paused_reader_learns_of_a_reset_only_when_it_reads_on_and_reads_the_data_first(play: Play) -> None:
    async def law() -> None:
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

    play(law)


def test_a_paused_reader_learns_of_a_reset_when_it_writes(play: Play) -> None:
    async def law() -> None:
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

    play(law)


def test_writing_to_a_peer_that_has_left_breaks_the_connection(play: Play) -> None:
    async def law() -> None:
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

    play(law)


def test_a_paused_reader_gets_nothing_until_it_resumes(play: Play) -> None:
    async def law() -> None:
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

    play(law)


def test_pausing_inside_data_received_stops_the_next_one(play: Play) -> None:
    class Sipper(Recorder):
        def data_received(self, data: bytes) -> None:
            self.transport.pause_reading()
            super().data_received(data)

    async def law() -> None:
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

    play(law)


def test_pausing_a_reader_holds_even_when_its_bytes_are_there_already(play: Play) -> None:
    class Jealous(Recorder):
        other: Jealous

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.other.transport.pause_reading()

    async def law() -> None:
        clients, servers = (Recorder(), Recorder()), (Jealous(), Jealous())
        servers[0].other, servers[1].other = servers[1], servers[0]
        async with joined(clients[0], servers[0]), joined(clients[1], servers[1]):
            for client in clients:
                client.transport.write(b"x")
            await calm()
            assert sorted(server.data for server in servers) == [b"", b"x"]

    play(law)


def test_pausing_inside_connection_made_does_nothing(play: Play) -> None:
    """A surprise: reading starts after connection_made, whatever was asked for in it."""

    class Shy(Recorder):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.transport.pause_reading()

    async def law() -> None:
        client, server = Recorder(), Shy()
        async with joined(client, server):
            client.transport.write(b"read anyway")
            await server.until(lambda: server.data)
            assert server.transport.is_reading()

    play(law)


def test_a_full_buffer_pauses_the_writer_at_once_and_a_drained_one_resumes_it(play: Play) -> None:
    async def law() -> None:
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

    play(law)


def test_the_water_marks_have_uvloops_defaults_and_rules(play: Play) -> None:
    async def law() -> None:
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

    play(law)


def test_an_exception_in_data_received_closes_the_connection_with_it(play: Play) -> None:
    class Fragile(Recorder):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            raise ValueError("cannot read this")

    async def law() -> None:
        client, server = Recorder(), Fragile()
        with problems() as caught:
            async with joined(client, server):
                client.transport.write(b"x")
                await server.until_lost()
                await client.until_lost()
        assert repr(server.error) == "ValueError('cannot read this')"
        assert [problem["exception"] for problem in caught] == [server.error]
        assert (server.story, client.story) == (["made", "data", "lost"], ["made", "eof", "lost"])

    play(law)


def test_an_os_error_in_data_received_closes_the_connection_in_silence(play: Play) -> None:
    class Fragile(Recorder):
        def data_received(self, data: bytes) -> None:
            raise OSError(errno.EIO, "disk")

    async def law() -> None:
        client, server = Recorder(), Fragile()
        async with joined(client, server):
            client.transport.write(b"x")
            await server.until_lost()
            assert (type(server.error), server.log) == (OSError, ["made", "lost"])

    play(law)


def test_writing_to_a_dead_transport_inside_data_received_closes_the_reading_one(play: Play) -> None:
    class Relay(Recorder):
        def __init__(self, onward: Recorder) -> None:
            super().__init__()
            self.onward = onward

        def data_received(self, data: bytes) -> None:
            self.onward.transport.write(data)

    async def law() -> None:
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

    play(law)


def test_an_exception_in_connection_made_leaves_the_connection_open_and_deaf(play: Play) -> None:
    class Fragile(Recorder):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            raise ValueError("not ready")

    async def law() -> None:
        client, server = Recorder(), Fragile()
        with problems() as caught:
            async with joined(client, server):
                client.transport.write(b"x")
                await calm()
                assert (server.log, server.transport.is_reading()) == (["made"], False)
                assert not server.transport.is_closing()
        assert len(caught) == 1

    play(law)


def test_an_exception_in_eof_received_closes_the_connection_with_it(play: Play) -> None:
    class Fragile(Recorder):
        def eof_received(self) -> bool:
            raise ValueError("no end")

    async def law() -> None:
        client, server = Recorder(), Fragile()
        with problems() as caught:
            async with joined(client, server):
                client.transport.write_eof()
                await server.until_lost()
        assert repr(server.error) == "ValueError('no end')"
        assert len(caught) == 1

    play(law)


def test_an_exception_in_connection_lost_is_reported_and_the_connection_is_closed(play: Play) -> None:
    class Fragile(Recorder):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            raise ValueError("bad end")

    async def law() -> None:
        client, server = Recorder(), Fragile()
        with problems() as caught:
            async with joined(client, server):
                server.transport.close()
                await client.until_lost()
        assert (len(caught), server.log.count("lost")) == (1, 1)

    play(law)


def test_closing_inside_data_received_ends_it_there(play: Play) -> None:
    class Brief(Recorder):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.transport.write(b"bye")
            self.transport.close()

    async def law() -> None:
        client, server = Recorder(), Brief()
        async with joined(client, server):
            client.transport.write(b"a")
            await server.until_lost()
            await client.until_lost()
            assert (server.log, server.error) == (["made", "data", "lost"], None)
            assert (client.data, client.error) == (b"bye", None)

    play(law)


def test_closing_or_aborting_inside_connection_made_still_returns_a_closing_transport(play: Play) -> None:
    class Brief(Recorder):
        def __init__(self, method: str) -> None:
            super().__init__()
            self.method = method

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            getattr(transport, self.method)()

    async def law() -> None:
        for method in ("close", "abort"):
            client, server = Brief(method), Recorder()
            async with joined(client, server):
                assert client.transport.is_closing()
                await client.until_lost()
                await server.until_lost()
                assert client.log == ["made", "lost"]

    play(law)


def test_a_connect_cancelled_after_connection_made_is_closed_without_connection_lost(play: Play) -> None:
    """A surprise: nor does is_closing() tell; only the caller of create_connection knows."""

    class Impatient(Recorder):
        task: asyncio.Task[Any]

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.task.cancel()

    async def law() -> None:
        client, server = Impatient(), Recorder()
        async with listening(lambda: server) as port:
            connect = asyncio.get_running_loop().create_connection(lambda: client, LOCALHOST, port)
            client.task = asyncio.ensure_future(connect)
            with pytest.raises(asyncio.CancelledError):
                await client.task
            await server.until_lost()
            await calm()
            assert (client.log, client.transport.is_closing()) == (["made"], False)
            with pytest.raises(RuntimeError, match="the handler is closed"):
                client.transport.write(b"x")

    play(law)
