"""The benchmark's engine: units in one process, the cheapest that answer as an inference server does.

A streamed answer sends its 200 head at once, its first token a millisecond later and then one each interval,
each as one SSE event in one HTTP chunk in one write. Every stream keeps the phase of its own start, so that
streams started at different times do not write in the same instant: the harder case for a proxy, as it cannot
serve many of them per wake-up.
"""

import argparse
import asyncio
import json
import re
from functools import partial
from typing import cast

import httptools
import uvloop

from loadtests import processes
from loadtests.bench import payload
from loadtests.bench.engine_pages import PAGES, Counters

_HEAD = b"HTTP/1.1 200 OK\r\nServer: engine\r\nContent-Type: %s\r\n"
_PLAIN = _HEAD + b"Content-Length: %d\r\n\r\n%s"
_STREAM_HEAD = _HEAD % b"text/event-stream; charset=utf-8" + b"Transfer-Encoding: chunked\r\n\r\n"
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"

_PREFILL_MS = 1
"""From a request to its first token. Were it longer, a gate that reckons with prefill would let some wait."""
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens": ?(\d+)')
_AS_STREAM = re.compile(rb'"stream": ?true')


class Stream:
    """One streamed answer on its way."""

    __slots__ = ("counters", "index", "interval_ms", "tokens", "transport", "user")

    def __init__(self, transport: asyncio.Transport, counters: Counters, user: str, tokens: int) -> None:
        self.transport = transport
        self.counters = counters
        self.user = user
        self.tokens = tokens
        self.index = 0
        self.interval_ms = 0

    def send_token(self) -> bool:
        """Write the next token. False when it was the last one, or nobody listens any more."""
        if self.transport.is_closing():
            self.counters.running -= 1
            return False
        self.counters.tokens += 1
        token = _chunk(payload.event(self.user, self.index, self.tokens))
        self.transport.write(token if self.index else _chunk(payload.role(self.user)) + token)
        self.index += 1
        if self.index < self.tokens:
            return True
        self.counters.running -= 1
        end = _chunk(payload.usage(self.user, self.tokens)) + _chunk(payload.DONE)
        self.transport.write(end + b"0\r\n\r\n")
        return False


class Ticks:
    """The one timer of all streams: a list of those that are due, for each millisecond that has some.

    Times are whole milliseconds, as those of uvloop's timers are.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: dict[int, list[Stream]] = {}
        self._wakes_ms = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: Stream) -> None:
        """Its first token is due after its prefill."""
        due_ms = round(self._loop.time() * 1000) + _PREFILL_MS
        self._due.setdefault(due_ms, []).append(stream)
        if self._timer is None or due_ms < self._wakes_ms:
            self._wake_at(due_ms)

    def _wake_at(self, due_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_ms = due_ms
        self._timer = self._loop.call_at(due_ms / 1000, self._tick)

    def _tick(self) -> None:
        for due_ms in range(self._wakes_ms, round(self._loop.time() * 1000) + 1):
            for stream in self._due.pop(due_ms, ()):
                if stream.send_token():
                    self._due.setdefault(due_ms + stream.interval_ms, []).append(stream)
        self._timer = None
        if self._due:
            self._wake_at(min(self._due))


class Connection(asyncio.Protocol):
    """One client connection; answers its requests one at a time."""

    def __init__(self, ticks: Ticks, interval_ms: int, counters: Counters) -> None:
        self._ticks = ticks
        self._interval_ms = interval_ms
        self._counters = counters
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            # Some routers try HTTP/2 first.
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._path = url
        self._body = []

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        page = PAGES.get(self._path)
        if self._path in (b"/v1/chat/completions", b"/v1/completions"):
            self._answer(b"".join(self._body))
        elif page is not None:
            self._transport.write(_plain(*page(self._counters, b"".join(self._body))))
        else:
            self._transport.write(_NOT_FOUND)

    def _answer(self, body: bytes) -> None:
        user, fields = payload.user_in(body), _without_messages(body)
        if not _AS_STREAM.search(fields):
            self._counters.tokens += 1
            self._transport.write(_plain(b"application/json", payload.reply(user)))
            return
        most = _MAX_TOKENS.search(fields)
        self._counters.running += 1
        self._transport.write(_STREAM_HEAD)
        stream = Stream(self._transport, self._counters, user, int(most[1]) if most else 1)
        stream.interval_ms = payload.User.of(user).interval_ms or self._interval_ms
        self._ticks.add(stream)


def _without_messages(body: bytes) -> bytes:
    """The other fields of a request. To read 200 kB as JSON would cost more than a proxy does."""
    return body[: body.find(b'"messages"')] + body[body.rfind(b"}]") :]


def _plain(content_type: bytes, body: bytes) -> bytes:
    return _PLAIN % (content_type, len(body), body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve(interval_ms: int, units: int) -> None:
    """Listen on a free port for each unit, print them as a JSON list, and answer until killed."""
    loop = asyncio.get_running_loop()
    ticks = Ticks(loop)
    ports = []
    for _ in range(units):
        connection = partial(Connection, ticks, interval_ms, Counters())
        server = await loop.create_server(connection, "127.0.0.1", 0, backlog=1024)
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    await loop.create_future()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interval-ms", type=float, default=20.0, help="for streams that say none")
    parser.add_argument("--units", type=int, default=2)
    args = parser.parse_args()
    processes.raise_files()
    uvloop.run(serve(max(1, round(args.interval_ms)), args.units))
