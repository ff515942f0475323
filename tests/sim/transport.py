"""A transport over a simulated socket that behaves as uvloop 0.23's TCPTransport does, oddities included.

`tests/laws/test_transport_*.py` hold it to that. The oddities that bite: `pause_reading` does nothing
inside `connection_made`; `write` raises once `connection_lost` has run, and is dropped between `close` or
`abort` and then; bytes written after `close` still go out if the buffer was not empty; `abort` ends the
connection (FIN), and resets it only if bytes were left unread; a paused reader sees neither the end nor a
reset until it reads or writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextvars import Context
from typing import TYPE_CHECKING, Any

from tests.sim.tcp import Socket

if TYPE_CHECKING:
    from tests.sim.loop import SimLoop

HIGH_WATER = 64 * 1024
LOW_WATER = 16  # uvloop divides 64, not 64 KiB, by four.


class SimTransport(asyncio.Transport):
    """`waiter` is what `create_connection` awaits; `on_closed` is called once the handle is closed."""

    def __init__(
        self,
        loop: SimLoop,
        sock: Socket,
        protocol: asyncio.BaseProtocol,
        context: Context,
        on_closed: Callable[[SimTransport], None],
        waiter: asyncio.Future[None] | None = None,
    ) -> None:
        super().__init__({"peername": sock.remote, "sockname": sock.local, "socket": sock})
        self.sock = sock
        self._loop = loop
        self._protocol: Any = protocol
        self._context = context
        self._on_closed = on_closed
        self._waiter = waiter
        self._buffer = bytearray()
        self._high, self._low = HIGH_WATER, LOW_WATER
        self._connected = self._reading = self._read_scheduled = self._paused = False
        self._eof = self._closing = self._lost = self._closed = False
        sock.on_ready = self._sock_ready

    def __repr__(self) -> str:
        state = f"closed={self._closed} reading={self._reading}"
        return f"<SimTransport {self.sock.local} -> {self.sock.remote} {state}>"

    # The public interface

    def get_protocol(self) -> Any:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return self._reading

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading and not self._closing:
            self._ensure_alive()
            self._reading = True
            self._schedule_read()

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return len(self._buffer)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._ensure_alive()
        if high is None:
            high = 64 * 1024 if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self._high, self._low = high, low
        self._maybe_pause()

    def write(self, data: bytes | bytearray | memoryview[int]) -> None:
        self._ensure_alive()
        if self._eof:
            raise RuntimeError("Cannot call write() after write_eof()")
        if data and not self._lost:
            if not self._buffer:
                data = memoryview(data)[self._send(bytes(data)) :]
                if not data:
                    return
            self._buffer += memoryview(data)
            if not self._paused:
                self._flush()
                self._maybe_pause()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[int]]) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        self._ensure_alive()
        self._eof = True
        if not self._buffer:
            self.sock.shutdown()

    def close(self) -> None:
        if self._closing or self._closed:
            return
        self._closing = True
        self._reading = False
        if not self._buffer:
            self._lost = True
            self._schedule_lost(None)

    def abort(self) -> None:
        self._force_close(None)

    # From the socket

    def start(self) -> None:
        """The connection stands: tell the protocol, then read."""
        self._loop.call_soon(self._call_connection_made, context=self._context)

    def discard(self, error: Exception | None = None) -> None:
        """Close the handle without a word to the protocol, as uvloop does when a connect comes to nothing."""
        if self._waiter is not None and not self._waiter.done() and error is not None:
            self._waiter.set_exception(error)
        self._close_handle()

    def _sock_ready(self) -> None:
        self._schedule_read()
        if self._buffer:
            self._loop.call_soon(self._flush, context=self._context)

    def _schedule_read(self) -> None:
        if self._reading and not self._read_scheduled and self.sock.is_readable:
            self._read_scheduled = True
            self._loop.call_soon(self._read, context=self._context)

    def _read(self) -> None:
        self._read_scheduled = False
        if not self._reading:
            return
        try:
            data = self.sock.recv()
            if data:
                self._protocol.data_received(data)
            elif data is not None:
                self._end()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self._fatal(error)
        self._schedule_read()

    def _end(self) -> None:
        self._reading = False
        if not self._protocol.eof_received():
            self.close()

    def _flush(self) -> None:
        if self._closed or self._lost or not self._buffer:
            return
        del self._buffer[: self._send(bytes(self._buffer))]
        if self._paused and len(self._buffer) <= self._low:
            self._paused = False
            self._tell("resume_writing")
        if self._buffer or self._lost:
            return
        if self._closing:
            self._schedule_lost(None)
        elif self._eof:
            self.sock.shutdown()

    def _send(self, data: bytes) -> int:
        """How much of it the socket took."""
        try:
            return self.sock.send(data)
        except OSError as error:
            self._fatal(error)
            return 0

    def _maybe_pause(self) -> None:
        if len(self._buffer) > self._high and not self._paused:
            self._paused = True
            self._tell("pause_writing")

    def _tell(self, method: str) -> None:
        try:
            getattr(self._protocol, method)()
        except Exception as error:
            self._report(f"protocol.{method}() failed", error)

    # The end

    def _ensure_alive(self) -> None:
        if self._closed:
            raise RuntimeError(f"unable to perform operation on {self!r}; the handler is closed")

    def _fatal(self, error: BaseException) -> None:
        self._force_close(error)
        if not isinstance(error, OSError):
            self._report("Fatal error on transport SimTransport", error)

    def _report(self, message: str, error: BaseException) -> None:
        context = {"message": message, "exception": error, "transport": self, "protocol": self._protocol}
        self._loop.call_exception_handler(context)

    def _force_close(self, error: BaseException | None) -> None:
        if self._lost or self._closed:
            return
        self._closing = self._lost = True
        self._reading = False
        self._schedule_lost(error)

    def _schedule_lost(self, error: BaseException | None) -> None:
        self._loop.call_soon(self._call_connection_lost, error, context=self._context)

    def _call_connection_made(self) -> None:
        if self._closed:
            return
        self._connected = True
        try:
            self._protocol.connection_made(self)
            self._reading = not self._closing
            self._schedule_read()
        finally:
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    def _call_connection_lost(self, error: BaseException | None) -> None:
        if self._closed:
            return
        try:
            if self._connected:
                self._protocol.connection_lost(error)
        finally:
            self._close_handle()

    def _close_handle(self) -> None:
        if not self._closed:
            self._closed = True
            self._reading = False
            self._protocol = None
            self._buffer.clear()
            self.sock.close()
            self._on_closed(self)
