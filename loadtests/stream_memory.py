"""What a live stream costs the gate in memory: thousands are held open and grow token by token, in step.

`python -m loadtests.stream_memory` starts a gate before a mock engine of its own, and reads the gate's RSS
after so many tokens of each stream. Beyond its request's body and the text that was said a stream may take
30 KiB, with continuation on; the exit code is 1 when it takes more.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import uvloop

from loadtests.kit import processes, progress
from loadtests.kit.gate import GateProcess, Named
from loadtests.wire.client import Connection
from loadtests.wire.messages import SSE_HEAD, chunk, post, whole
from loadtests.wire.reply import Reply
from loadtests.wire.scripted import Request, listen, port_of

LIMIT_KIB = 30.0
CHECKPOINTS = (1, 16, 64, 128, 256, 512)
"""Tokens of each stream after which memory is read: before, around and long after anything is folded."""
WORD = " word%d"
CONNECTS_AT_ONCE = 100
_SETTLE_S = 1.0
_PATIENCE_S = 120.0
_FILES = 16384
_CANARY = b'{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"a"}}]}'
_MODELS = b'{"object":"list","data":[{"id":"mock","object":"model","owned_by":"vllm"}]}'


def token_chunk(stream: int, delta: dict[str, str]) -> bytes:
    """One chunk with one event, as vLLM writes it."""
    frame = {"id": f"chatcmpl-{stream:032x}", "object": "chat.completion.chunk", "created": 1790000000}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None}
    document = json.dumps(frame | {"model": "mock", "choices": [choice]}, separators=(",", ":"))
    return chunk(f"data: {document}\n\n".encode())


class Engine:
    """The unit. `streams` are the requests that are to be spoken on."""

    def __init__(self) -> None:
        self.streams: list[Request] = []

    def answer(self, request: Request) -> None:
        """Begin a stream, or answer a probe."""
        if b'"stream":true' in request.body:
            request.write(SSE_HEAD + token_chunk(len(self.streams), {"role": "assistant", "content": ""}))
            self.streams.append(request)
        elif request.body:
            request.write(whole(_CANARY))
        else:
            request.write(whole(_MODELS if request.target == b"/v1/models" else b""))

    async def say(self, token: int) -> None:
        """One token on each stream."""
        for number, request in enumerate(self.streams):
            request.write(token_chunk(number, {"content": WORD % token}))
            if number % CONNECTS_AT_ONCE == 0:
                await asyncio.sleep(0)


class Readers:
    """Users who read. `events` are those that all of them together have seen."""

    def __init__(self, port: int) -> None:
        self.events = 0
        self._port = port
        self._reading: list[asyncio.Task[None]] = []

    async def come(self, request: bytes, count: int) -> None:
        """So many more of them ask, each on a connection of its own."""
        for _ in range(count):
            connection = await Connection.open(self._port)
            self._reading.append(asyncio.create_task(connection.exchange(request, Reply(self._take))))

    async def until_seen(self, events: int) -> None:
        """Wait until they have seen so many."""
        async with asyncio.timeout(_PATIENCE_S):
            while self.events < events:  # noqa: ASYNC110 - what comes is only counted.
                await asyncio.sleep(0.002)

    async def leave(self) -> None:
        """All of them, at once."""
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)

    def _take(self, data: bytes) -> None:
        self.events += data.count(b"\n\n")


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


async def measure(streams: int, body_bytes: int, lines: str) -> list[Reading]:
    """Hold streams open at a fresh gate; `lines` are more header lines of each request."""
    engine = Engine()
    server = await listen(engine.answer)
    unit = Named("a", f"http://127.0.0.1:{port_of(server)}")
    gate = GateProcess([unit], max_in_flight=2 * streams)
    await asyncio.to_thread(gate.__enter__)
    readers = Readers(gate.port)
    try:
        before = await _resident(gate)
        request = _request(body_bytes, lines)
        for begin in range(0, streams, CONNECTS_AT_ONCE):
            end = min(begin + CONNECTS_AT_ONCE, streams)
            await readers.come(request, end - begin)
            await readers.until_seen(end)
        readings = []
        text = said = 0
        for tokens in CHECKPOINTS:
            while said < tokens:
                said += 1
                text += len(WORD % said)
                await engine.say(said)
                # All users have seen it before the next one, so that no two of them ever come together.
                await readers.until_seen(streams * (said + 1))
            await asyncio.sleep(_SETTLE_S)
            grown = await _resident(gate) - before
            readings.append(Reading(tokens, grown / streams, body_bytes, text))
        return readings
    finally:
        await readers.leave()
        server.close()
        await asyncio.to_thread(gate.__exit__, None, None, None)


async def _resident(gate: GateProcess) -> float:
    vitals = await asyncio.to_thread(gate.vitals)
    return vitals.rss_mb * (1 << 20)


def _request(body_bytes: int, lines: str) -> bytes:
    body = '{"model":"mock","stream":true,"max_tokens":100000,"messages":[{"role":"user","content":"%s"}]}'
    filled = (body % ("x" * (body_bytes - len(body) + 2))).encode()
    assert len(filled) == body_bytes
    return post(filled, lines=lines)


def _table(readings: Sequence[Reading]) -> Iterator[str]:
    yield "  tokens | RSS, KiB a stream | body | text | the rest"
    for one in readings:
        resident, body, text = (size / 1024 for size in (one.resident, one.body, one.text))
        yield f"  {one.tokens:6} | {resident:17.1f} | {body:4.1f} | {text:4.1f} | {one.rest_kib:8.1f}"


@progress.shown("stream-memory")
def main() -> int:
    """Measure with continuation and without. 1 when the limit does not hold with it."""
    parser = argparse.ArgumentParser(description="Memory of the gate for each live stream.")
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--body-bytes", type=int, default=1024)
    asked = parser.parse_args()
    processes.raise_files(_FILES)
    most = 0.0
    for name, lines in (("continuation on", ""), ("continuation off", "x-cellgate-continue: off\r\n")):
        progress.phase(name)
        readings = uvloop.run(measure(asked.streams, asked.body_bytes, lines))
        print(f"{asked.streams} streams, {name}", *_table(readings), sep="\n", flush=True)
        most = most or max(one.rest_kib for one in readings)
    print(f"at most {most:.1f} KiB a stream besides body and text; {LIMIT_KIB:g} are allowed")
    return 1 if most > LIMIT_KIB else 0


if __name__ == "__main__":
    sys.exit(main())
