"""What a transport promises of connecting and of `connection_made`."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from tests.laws.transport import LOCALHOST, TIMEOUT_S, Recorder, calm, joined, listening

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


async def test_connecting_where_nobody_listens_is_refused() -> None:
    async with listening(Recorder) as port:
        pass
    with pytest.raises(ConnectionRefusedError) as refused:
        await asyncio.get_running_loop().create_connection(Recorder, LOCALHOST, port)
    assert refused.value.errno == errno.ECONNREFUSED


async def test_listening_on_an_address_in_use_fails() -> None:
    async with listening(Recorder) as port:
        with pytest.raises(OSError, match="in use") as in_use:
            await asyncio.get_running_loop().create_server(Recorder, LOCALHOST, port)
        assert in_use.value.errno == errno.EADDRINUSE


async def test_closing_a_server_leaves_its_connections_alone() -> None:
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


async def test_both_ends_may_write_as_soon_as_they_are_connected() -> None:
    class Greeter(Recorder):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.transport.write(b"hello")

    client, server = Greeter(), Greeter()
    async with joined(client, server):
        await client.until(lambda: client.data == b"hello")
        await server.until(lambda: server.data == b"hello")


async def test_closing_or_aborting_inside_connection_made_still_returns_a_closing_transport() -> None:
    class Brief(Recorder):
        def __init__(self, method: str) -> None:
            super().__init__()
            self.method = method

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            getattr(transport, self.method)()

    for method in ("close", "abort"):
        client, server = Brief(method), Recorder()
        async with joined(client, server):
            assert client.transport.is_closing()
            await client.until_lost()
            await server.until_lost()
            assert client.log == ["made", "lost"]


async def test_a_connect_cancelled_after_connection_made_is_closed_without_connection_lost() -> None:
    """A surprise: nor does is_closing() tell; only the caller of create_connection knows."""

    class Impatient(Recorder):
        task: asyncio.Task[Any]

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.task.cancel()

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
