"""A client that is back at another worker than the one that has its stream: its bytes are passed through."""

from __future__ import annotations

import asyncio
from typing import cast

from cellgate.proxy.reconnect.refused import Refused
from cellgate.proxy.reconnect.resumable_stream import credentials_of
from cellgate.proxy.wire.client import ResponseClient
from cellgate.proxy.wire.failure import Failure
from cellgate.proxy.wire.heads import RESUME_FIELD
from cellgate.proxy.wire.request import Request

LOOPBACK = "127.0.0.1"
"""Where workers take clients of each other."""


class OtherWorker(asyncio.Protocol):
    """An exchange whose answer comes from the worker at `port`; `refused` answers when that one is gone."""

    def __init__(
        self, client: ResponseClient, request: Request, last_id: bytes, port: int, refused: Refused
    ) -> None:
        self._client = client
        self._request = request
        self._last_id = last_id
        self._port = port
        self._refused = refused
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._is_over = False

    # -- the exchange --------------------------------------------------------------------------------------

    def start(self) -> None:
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def crashed(self, _error: Exception) -> None:
        self._end()
        self._client.give_up(self, self._request)

    def client_left(self) -> None:
        self._end()

    def client_paused(self, paused: bool) -> None:
        if self._transport is not None:
            (self._transport.pause_reading if paused else self._transport.resume_reading)()

    def stop(self, _failure: Failure) -> None:
        """This connection ends; its client may come back for the rest."""
        self._end()
        self._client.give_up(self, self._request)

    def tick(self, _now: float) -> None:
        """The other worker has the clocks."""

    # -- the other worker ----------------------------------------------------------------------------------

    async def _connect(self) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: self, LOOPBACK, self._port)
        except OSError:
            self._is_over = True
            self._refused.start()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._is_over:
            self._transport.abort()
        else:
            self._transport.write(self._question())

    def data_received(self, data: bytes) -> None:
        if not self._is_over:
            self._client.send(data)

    def connection_lost(self, _exc: Exception | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._client.finish(self._request, keep_alive=False)

    def _question(self) -> bytes:
        request = self._request
        lines = b"%b: on\r\nlast-event-id: %b\r\n%b" % (RESUME_FIELD, self._last_id, credentials_of(request))
        return b"%b %b HTTP/1.1\r\nhost: %b\r\nconnection: close\r\ncontent-length: 0\r\n%b\r\n" % (
            request.method,
            request.target,
            LOOPBACK.encode(),
            lines,
        )

    def _end(self) -> None:
        self._is_over = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()
