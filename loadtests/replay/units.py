"""The process of the simulated units: each an engine behind a port of its own, all on one clock.

What must stay true: an engine is advanced to the present before anything is asked of it or given to it, so
that its results are those of the model; only when they are written depends on this process. How late that is,
it counts.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from math import ceil
from typing import Any, cast

import httptools
import orjson
import uvloop

from loadtests.replay import shapes
from loadtests.replay.engine import Engine, Model, Output, Sequence, block_names

LATE_BINS_MS = (1, 2, 5, 10, 20, 50, 100, 1000)
"""Upper ends, in real milliseconds, of the histogram of how late results are written."""
SLOW_SPEED = 0.5
"""Of a unit that is slow: half of the model's."""
_DEFAULT_ANSWER_TOKENS = 16
_TICK_S = 0.001
"""The event loop's timers go by whole milliseconds."""


class Unit:
    """One engine, the connections that wait for its sequences, and the timer that moves it."""

    def __init__(self, name: str, model: Model, speed_up: float) -> None:
        self.name = name
        self.engine = Engine(model)
        self.born = time.time()
        self.late = [0] * (len(LATE_BINS_MS) + 1)
        self._speed_up = speed_up
        self._loop = asyncio.get_running_loop()
        self._owners: dict[Sequence, Connection] = {}
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """Virtual seconds."""
        return time.monotonic() * self._speed_up

    def add(self, sequence: Sequence, owner: "Connection") -> None:
        """A request has come."""
        self._advance()
        self._owners[sequence] = owner
        self.engine.add(sequence, self.now())
        self._wake_up()

    def abort(self, sequence: Sequence) -> None:
        """Its client left."""
        self._advance()
        if self._owners.pop(sequence, None) is not None:
            self.engine.abort(sequence)
        self._wake_up()

    def metrics(self) -> bytes:
        """The page of /metrics, of this moment."""
        self._advance()
        self._wake_up()
        return shapes.metrics(self.engine, self.born)

    def tell(self) -> bytes:
        """What the replay asks for at the end: the engine's counts and how late results were."""
        return shapes.plain(orjson.dumps({"counts": asdict(self.engine.counts), "late": self.late}))

    def _advance(self) -> None:
        for output in self.engine.advance(self.now()):
            self._show(output)

    def _show(self, output: Output) -> None:
        late_ms = (self.now() - output.at) / self._speed_up * 1000
        self.late[sum(late_ms > end for end in LATE_BINS_MS)] += 1
        owner = self._owners.get(output.sequence)
        if output.is_last:
            self._owners.pop(output.sequence, None)
        if owner is not None:
            owner.show(output)

    def _wake_up(self) -> None:
        """Set the timer anew: when something new came, the engine may have something to show earlier."""
        if self._timer is not None:
            self._timer.cancel()
        at = self.engine.next_at()
        if at is None:
            self._timer = None
            return
        ticks = max(ceil((at - self.now()) / self._speed_up / _TICK_S), 1)
        self._timer = self._loop.call_later(ticks * _TICK_S, self._move)

    def _move(self) -> None:
        self._advance()
        self._wake_up()


class Connection(asyncio.Protocol):
    """One client connection; answers its requests one at a time."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body: list[bytes] = []
        self._sequence: Sequence | None = None
        self._shown = 0
        self._chat = self._streams = self._tells_usage = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self._sequence is not None:
            self._unit.abort(self._sequence)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def on_url(self, url: bytes) -> None:
        self._path = url
        self._body = []

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        if self._path in (b"/v1/completions", b"/v1/chat/completions"):
            self._generate(b"".join(self._body))
        else:
            page = _PAGES.get(self._path)
            self._transport.write(
                page(self._unit) if page else shapes.refusal(b"404 Not Found", "no such path")
            )

    def show(self, output: Output) -> None:
        """So much of the answer is there."""
        sequence = output.sequence
        if self._streams:
            self._transport.write(
                shapes.event(self._unit.name, self._chat, output.tokens - self._shown, output.is_last)
            )
        self._shown = output.tokens
        if output.is_last:
            self._finish(sequence)

    def _generate(self, body: bytes) -> None:
        try:
            ask = orjson.loads(body)
            self._chat = self._path == b"/v1/chat/completions"
            sequence = _sequence(ask, chat=self._chat)
        except (ValueError, TypeError, KeyError) as error:
            self._transport.write(
                shapes.refusal(b"400 Bad Request", f"the request makes no sense: {error!r}")
            )
            return
        if not self._unit.engine.fits(sequence):
            self._transport.write(shapes.refusal(b"400 Bad Request", "the prompt does not fit the KV cache"))
            return
        self._streams = bool(ask.get("stream"))
        self._tells_usage = bool((ask.get("stream_options") or {}).get("include_usage"))
        self._sequence, self._shown = sequence, 0
        if self._streams:
            # As vLLM does: the head says nothing about the prefill.
            self._transport.write(shapes.STREAM_HEAD)
        self._unit.add(sequence, self)

    def _finish(self, sequence: Sequence) -> None:
        self._sequence = None
        name, chat = self._unit.name, self._chat
        if not self._streams:
            self._transport.write(shapes.whole(name, chat, sequence))
            return
        usage = shapes.usage_event(name, chat, sequence) if self._tells_usage else b""
        self._transport.write(usage + shapes.chunk(shapes.DONE) + shapes.END)


_PAGES: dict[bytes, Callable[[Unit], bytes]] = {
    b"/health": lambda _: shapes.plain(b"", b"text/plain"),
    b"/v1/models": lambda _: shapes.plain(shapes.MODELS),
    b"/metrics": Unit.metrics,
    b"/replay": Unit.tell,
}


def _sequence(ask: dict[str, Any], *, chat: bool) -> Sequence:
    """One byte of the prompt is one token."""
    if chat:
        text = "".join(f"{each['role']}\n{each['content']}\n" for each in ask["messages"])
    else:
        text = ask["prompt"]
    if not isinstance(text, str) or not text:
        raise ValueError("the prompt is no text")
    prompt = text.encode()
    answer_tokens = int(ask.get("max_tokens") or ask.get("max_completion_tokens") or _DEFAULT_ANSWER_TOKENS)
    return Sequence(len(prompt), max(answer_tokens, 1), block_names(prompt))


async def serve(units: int, speed_up: float, slow: int | None) -> None:
    """Listen on a free port for each unit, print the ports as a JSON list, and answer until killed."""
    loop = asyncio.get_running_loop()
    ports = []
    for index in range(units):
        model = replace(Model(), speed=SLOW_SPEED) if index == slow else Model()
        unit = Unit(f"unit-{index}", model, speed_up)
        server = await loop.create_server(partial(Connection, unit), "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    await loop.create_future()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, required=True)
    parser.add_argument("--speed-up", type=float, required=True)
    parser.add_argument("--slow", type=int, help="the number of a unit at half speed")
    args = parser.parse_args()
    uvloop.run(serve(args.units, args.speed_up, args.slow))
