"""The floor for a proxy in Python: two asyncio protocols on uvloop with httptools, and nothing else.

It frames both directions with a parser, takes units in turn and keeps their connections. It rewrites no head,
checks no input, counts nothing, retries nothing: what it costs is what any Python proxy pays before its first
feature.
"""

import asyncio
import itertools
import sys
from collections.abc import Iterator
from typing import cast

import httptools
import uvloop


class Unit:
    """One unit's port and its idle connections."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.idle: list[Upstream] = []


class Downstream(asyncio.Protocol):
    """The client's side: gathers a request, sends it whole."""

    def __init__(self, turns: Iterator[Unit]) -> None:
        self._turns = turns
        self._parser = httptools.HttpRequestParser(self)
        self._request = b""
        self._complete = False
        self.upstream: Upstream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        self._request += data
        if self._complete:
            request, self._request, self._complete = self._request, b"", False
            self._send(next(self._turns), request)

    def on_message_complete(self) -> None:
        self._complete = True

    def _send(self, unit: Unit, request: bytes) -> None:
        if unit.idle:
            unit.idle.pop().carry(self, request)
        else:
            self._opening = asyncio.ensure_future(self._open(unit, request))

    async def _open(self, unit: Unit, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        _, upstream = await loop.create_connection(lambda: Upstream(unit), "127.0.0.1", unit.port)
        upstream.carry(self, request)

    def connection_lost(self, _exc: Exception | None) -> None:
        if self.upstream is not None:
            self.upstream.transport.abort()


class Upstream(asyncio.Protocol):
    """The unit's side: parses what comes, then passes it on as it came."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._parser = httptools.HttpResponseParser(self)
        self._downstream: Downstream | None = None
        self._complete = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def carry(self, downstream: Downstream, request: bytes) -> None:
        """Send `request` and pass its answer to `downstream`."""
        self._downstream = downstream
        downstream.upstream = self
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        assert self._downstream is not None
        self._downstream.transport.write(data)
        if self._complete:
            self._complete = False
            self._downstream.upstream = None
            self._downstream = None
            self._unit.idle.append(self)

    def on_message_complete(self) -> None:
        self._complete = True

    def connection_lost(self, _exc: Exception | None) -> None:
        if self in self._unit.idle:
            self._unit.idle.remove(self)
        if self._downstream is not None:
            self._downstream.transport.abort()


async def serve(port: int, unit_ports: list[int]) -> None:
    """Relay from `port` of 127.0.0.1 to the units until killed."""
    turns = itertools.cycle([Unit(each) for each in unit_ports])
    server = await asyncio.get_running_loop().create_server(lambda: Downstream(turns), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), [int(each) for each in sys.argv[2:]]))
