"""The benchmark's engine: two units in one process, the cheapest that answer as an inference server does.

A streamed answer sends its 200 head at once and then one token each interval, each as one SSE event in one
HTTP chunk in one write. Every stream keeps the phase of its own start, so streams started at different times
do not write in the same instant: the harder case for a proxy, which cannot serve many streams per wake-up.
"""

import argparse
import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import httptools
import orjson
import uvloop

from loadtests.bench import payload

_HEAD = b"HTTP/1.1 200 OK\r\nServer: engine\r\nContent-Type: %s\r\n"
_PLAIN = _HEAD + b"Content-Length: %d\r\n\r\n%s"
_STREAM_HEAD = _HEAD % b"text/event-stream; charset=utf-8" + b"Transfer-Encoding: chunked\r\n\r\n"
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
_MODELS = json.dumps({"object": "list", "data": [{"id": payload.MODEL, "object": "model"}]}).encode()
_METRICS = """\
vllm:num_requests_running{{model_name="bench"}} {running}
vllm:num_requests_waiting{{model_name="bench"}} 0
vllm:kv_cache_usage_perc{{model_name="bench"}} 0
vllm:generation_tokens_total{{model_name="bench"}} {tokens}
"""


class Counters:
    """What one unit of the engine reports about itself."""

    def __init__(self) -> None:
        self.running = 0
        self.tokens = 0


class Connection(asyncio.Protocol):
    """One client connection; answers its requests one at a time."""

    def __init__(self, interval_s: float, counters: Counters) -> None:
        self._loop = asyncio.get_running_loop()
        self._interval_s = interval_s
        self._counters = counters
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url
        self._body = b""

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        own = _PAGES.get(self._path)
        if own is not None:
            self._transport.write(_plain(*own(self._counters)))
        elif self._path in (b"/v1/chat/completions", b"/v1/completions"):
            self._answer(orjson.loads(self._body))
        else:
            self._transport.write(_NOT_FOUND)

    def _answer(self, ask: dict[str, Any]) -> None:
        user = ask.get("user", "nobody")
        if not ask.get("stream"):
            self._counters.tokens += 1
            self._transport.write(_plain(b"application/json", payload.reply(user)))
            return
        self._counters.running += 1
        self._transport.write(_STREAM_HEAD)
        self._await_token(user, 0, ask.get("max_tokens", 1), self._loop.time() + self._interval_s)

    def _await_token(self, user: str, index: int, tokens: int, at_s: float) -> None:
        self._loop.call_at(at_s, self._send_token, user, index, tokens, at_s)

    def _send_token(self, user: str, index: int, tokens: int, at_s: float) -> None:
        if self._transport.is_closing():
            self._counters.running -= 1
            return
        self._counters.tokens += 1
        self._transport.write(_chunk(payload.event(user, index, tokens)))
        if index + 1 < tokens:
            self._await_token(user, index + 1, tokens, at_s + self._interval_s)
        else:
            self._counters.running -= 1
            self._transport.write(_chunk(payload.DONE))
            self._transport.write(b"0\r\n\r\n")


def _plain(content_type: bytes, body: bytes) -> bytes:
    return _PLAIN % (content_type, len(body), body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _metrics(counters: Counters) -> tuple[bytes, bytes]:
    return b"text/plain", _METRICS.format(running=counters.running, tokens=counters.tokens).encode()


_PAGES: dict[bytes, Callable[[Counters], tuple[bytes, bytes]]] = {
    b"/health": lambda _: (b"text/plain", b""),
    b"/v1/models": lambda _: (b"application/json", _MODELS),
    b"/metrics": _metrics,
}


async def serve(interval_s: float) -> None:
    """Listen on two free ports, print them as a JSON list, and answer until killed."""
    loop = asyncio.get_running_loop()
    ports = []
    for counters in (Counters(), Counters()):
        server = await loop.create_server(partial(Connection, interval_s, counters), "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    await loop.create_future()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interval-ms", type=float, required=True)
    uvloop.run(serve(parser.parse_args().interval_ms / 1000))
