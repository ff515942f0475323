"""What a live stream costs the gate in memory: thousands are held open and grow token by token, in step.

`python -m loadtests.stream_memory` starts a gate before a mock engine of its own, and reads the gate's RSS
after so many tokens of each stream. Beyond its request's body and the text that was said a stream may take
30 KiB, with continuation on; the exit code is 1 when it takes more.
"""

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import uvloop

from loadtests import processes
from loadtests.gate import GateProcess

LIMIT_KIB = 30.0
CHECKPOINTS = (1, 16, 64, 128, 256, 512)
"""Tokens of each stream after which memory is read: before, around and long after anything is folded."""
WORD = " word%d"
CONNECTS_AT_ONCE = 100
_SETTLE_S = 1.0
_PATIENCE_S = 120.0
_FILES = 16384
_LENGTH = re.compile(rb"(?i)content-length: (\d+)")
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_CANARY = b'{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"a"}}]}'
_MODELS = b'{"object":"list","data":[{"id":"mock","object":"model","owned_by":"vllm"}]}'


def chunk(stream: int, delta: dict[str, str]) -> bytes:
    """One chunk with one event, as vLLM writes it."""
    frame = {"id": f"chatcmpl-{stream:032x}", "object": "chat.completion.chunk", "created": 1790000000}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None}
    document = json.dumps(frame | {"model": "mock", "choices": [choice]}, separators=(",", ":"))
    event = f"data: {document}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


class Engine(asyncio.Protocol):
    """One connection of the gate's. `streams` are those of all connections that are to be spoken on."""

    streams: list[asyncio.Transport] = []  # noqa: RUF012 - one for all connections, on purpose

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._buffer, 0, end)
            size = end + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < size:
                return
            request, self._buffer = self._buffer[:size], self._buffer[size:]
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        if b'"stream":true' in request:
            self._transport.write(_HEAD + chunk(len(self.streams), {"role": "assistant", "content": ""}))
            self.streams.append(self._transport)
            return
        body = _CANARY if request.startswith(b"POST") else _MODELS if b"/v1/models" in request[:20] else b""
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


class Client(asyncio.Protocol):
    """One user, who reads. `events` are those that all users together have seen."""

    events = 0

    def __init__(self, request: bytes) -> None:
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        Client.events += data.count(b"\n\n")


@dataclass(frozen=True, slots=True)
class Reading:
    """What one stream takes after so many tokens, in bytes."""

    tokens: int
    resident: float
    body: int
    text: int

    @property
    def rest_kib(self) -> float:
        """Beyond body and text."""
        return (self.resident - self.body - self.text) / 1024


@dataclass(frozen=True, slots=True)
class _Unit:
    name: str
    url: str


async def measure(streams: int, body_bytes: int, lines: str) -> list[Reading]:
    """Hold streams open at a fresh gate; `lines` are more header lines of each request."""
    loop = asyncio.get_running_loop()
    Engine.streams.clear()
    Client.events = 0
    server = await loop.create_server(Engine, "127.0.0.1", 0, backlog=4096)
    unit = _Unit("a", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    gate = GateProcess([unit], max_in_flight=2 * streams)
    await asyncio.to_thread(gate.__enter__)
    transports: list[asyncio.Transport] = []
    try:
        before = await _resident(gate)
        request = _request(body_bytes, lines)
        for begin in range(0, streams, CONNECTS_AT_ONCE):
            for _ in range(begin, min(begin + CONNECTS_AT_ONCE, streams)):
                transport, _ = await loop.create_connection(lambda: Client(request), "127.0.0.1", gate.port)
                transports.append(transport)
            await _until_seen(len(transports))
        readings = []
        text = said = 0
        for tokens in CHECKPOINTS:
            while said < tokens:
                said += 1
                text += len(WORD % said)
                await _say(said, streams)
            await asyncio.sleep(_SETTLE_S)
            grown = await _resident(gate) - before
            readings.append(Reading(tokens, grown / streams, body_bytes, text))
        return readings
    finally:
        for transport in transports:
            transport.abort()
        server.close()
        await asyncio.to_thread(gate.__exit__, None, None, None)


async def _resident(gate: GateProcess) -> float:
    vitals = await asyncio.to_thread(gate.vitals)
    return vitals.rss_mb * (1 << 20)


def _request(body_bytes: int, lines: str) -> bytes:
    body = '{"model":"mock","stream":true,"max_tokens":100000,"messages":[{"role":"user","content":"%s"}]}'
    filled = (body % ("x" * (body_bytes - len(body) + 2))).encode()
    assert len(filled) == body_bytes
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: gate\r\ncontent-length: {body_bytes}\r\n{lines}\r\n"
    return head.encode() + filled


async def _say(token: int, streams: int) -> None:
    """One token on each stream; until all users have seen it, so that no two of them ever come together."""
    for number, transport in enumerate(Engine.streams):
        transport.write(chunk(number, {"content": WORD % token}))
        if number % CONNECTS_AT_ONCE == 0:
            await asyncio.sleep(0)
    await _until_seen(streams * (token + 1))


async def _until_seen(events: int) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while Client.events < events:  # noqa: ASYNC110 - what comes is only counted.
            await asyncio.sleep(0.002)


def _table(readings: Sequence[Reading]) -> Iterator[str]:
    yield "  tokens | RSS, KiB a stream | body | text | the rest"
    for one in readings:
        resident, body, text = (size / 1024 for size in (one.resident, one.body, one.text))
        yield f"  {one.tokens:6} | {resident:17.1f} | {body:4.1f} | {text:4.1f} | {one.rest_kib:8.1f}"


def main() -> int:
    """Measure with continuation and without. 1 when the limit does not hold with it."""
    parser = argparse.ArgumentParser(description="Memory of the gate for each live stream.")
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--body-bytes", type=int, default=1024)
    asked = parser.parse_args()
    processes.raise_files(_FILES)
    most = 0.0
    for name, lines in (("continuation on", ""), ("continuation off", "x-cellgate-continue: off\r\n")):
        readings = uvloop.run(measure(asked.streams, asked.body_bytes, lines))
        print(f"{asked.streams} streams, {name}", *_table(readings), sep="\n", flush=True)
        most = most or max(one.rest_kib for one in readings)
    print(f"at most {most:.1f} KiB a stream besides body and text; {LIMIT_KIB:g} are allowed")
    return 1 if most > LIMIT_KIB else 0


if __name__ == "__main__":
    sys.exit(main())
