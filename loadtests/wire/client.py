"""The client of the load tools on an event loop: connections that carry one exchange at a time."""

import asyncio
from typing import Self, cast
from urllib.parse import urlsplit

from loadtests.wire.reply import Reply


class Connection(asyncio.Protocol):
    """One connection. `reads` counts how often bytes have come."""

    def __init__(self) -> None:
        self.reads = 0
        self._loop = asyncio.get_running_loop()
        self._unread = b""
        self._reply: Reply | None = None
        self._answered: asyncio.Future[None]
        self._heard_at = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_lost = False
        self._error: Exception | None = None

    @classmethod
    async def open(cls, port: int, host: str = "127.0.0.1", source: str | None = None) -> Self:
        """Connect, from an address of this machine, if one is named. Raises OSError."""
        own = None if source is None else (source, 0)
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port, local_addr=own)
        return connection

    @property
    def is_usable(self) -> bool:
        """Whether it can carry another exchange: it is open, and nothing came that was not asked for."""
        return not (self._is_lost or self._transport.is_closing() or self._unread)

    async def exchange(self, request: bytes, reply: Reply, *, silence_s: float | None = None) -> None:
        """Send a request, and read its reply as `read` does."""
        self._transport.write(request)
        await self.read(reply, silence_s=silence_s)

    async def send(self, data: bytes) -> None:
        """Send, and wait until there is room for more; harmless when the other side has closed."""
        self._transport.write(data)
        await self._has_room.wait()

    async def read(self, reply: Reply, *, silence_s: float | None = None) -> None:
        """Fill in the next reply. Raises ConnectionError when it does not come whole, and TimeoutError
        when no byte comes for `silence_s`. After either, or when cancelled, the connection is closed.
        """
        self._reply, self._answered = reply, self._loop.create_future()
        self._heard_at = self._loop.time()
        if silence_s is not None:
            self._watch = self._loop.call_later(silence_s, self._look, silence_s)
        try:
            if self._unread:
                data, self._unread = self._unread, b""
                self._feed(reply, data)
            if self._is_lost:
                self._feed_end(reply)
            await self._answered
        except BaseException:
            self.abort()
            raise
        finally:
            self._reply = None
            if self._watch is not None:
                self._watch.cancel()

    def close(self) -> None:
        """Leave in good order: what has been sent arrives."""
        self._transport.close()

    def abort(self) -> None:
        """Leave at once."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop, as the methods below."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Bytes of the reply that is awaited, or of the next one."""
        self.reads += 1
        self._heard_at = self._loop.time()
        if self._reply is None:
            self._unread += data
        else:
            self._feed(self._reply, data)

    def connection_lost(self, error: Exception | None) -> None:
        """The end, of whichever kind."""
        self._is_lost, self._error = True, error
        self._has_room.set()
        if self._reply is not None:
            self._feed_end(self._reply)

    def pause_writing(self) -> None:
        """What has been sent waits in memory."""
        self._has_room.clear()

    def resume_writing(self) -> None:
        """There is room for more."""
        self._has_room.set()

    def _feed(self, reply: Reply, data: bytes) -> None:
        try:
            if reply.feed(data):
                self._end(None)
        except ConnectionError as error:
            self._end(error)

    def _feed_end(self, reply: Reply) -> None:
        try:
            reply.feed_end()
        except ConnectionError as error:
            self._end(self._error or error)
        else:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._answered.done():
            return
        if error is None:
            self._answered.set_result(None)
        else:
            self._answered.set_exception(error)

    def _look(self, silence_s: float) -> None:
        left_s = self._heard_at + silence_s - self._loop.time()
        if left_s > 0:
            self._watch = self._loop.call_later(left_s, self._look, silence_s)
        else:
            self._end(TimeoutError(f"no byte for {silence_s:g} s"))


class Connections:
    """Connections to one server, as many as there are exchanges at the same time. Each is kept for the next
    one, or (`keep` False) closed behind its reply. `source` is the address that they come from.
    """

    def __init__(self, url: str, *, keep: bool = True, source: str | None = None) -> None:
        place = urlsplit(url)
        self._host, self._port = place.hostname or "127.0.0.1", place.port or 80
        self._keep, self._source = keep, source
        self._idle: list[Connection] = []

    async def exchange(self, request: bytes, reply: Reply, *, silence_s: float | None = None) -> None:
        """Send a request, and fill in its reply. Raises OSError, as `Connection.open` and `read` do."""
        async with asyncio.timeout(silence_s):
            connection = self._kept() or await Connection.open(self._port, self._host, self._source)
        await connection.exchange(request, reply, silence_s=silence_s)
        if self._keep and reply.keeps_connection:
            self._idle.append(connection)
        else:
            connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close those that are idle."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _kept(self) -> Connection | None:
        while self._idle:
            if (connection := self._idle.pop()).is_usable:
                return connection
            connection.close()
        return None
