"""The benchmark's load generator: one process, raw protocols, every answer compared byte for byte.

It opens its connections, sends a warm-up that is thrown away, prints `ready`, waits for a line on standard
input, sends the load, prints one JSON object, and stays until its input ends. Its driver reads the CPU of all
processes between those two lines.
"""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import cast

import httptools
import uvloop

from loadtests.bench import payload

TIMEOUT_S = 120.0
LAG_PERIOD_S = 0.01


@dataclass(slots=True)
class Tally:
    """What one load came to. `answers` are requests or, for streams, tokens; times in seconds."""

    answers: int = 0
    reads: int = 0
    seconds: float = 0.0
    lags_s: list[float] = field(default_factory=list)
    stream_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Connection(asyncio.Protocol):
    """One keep-alive connection that carries one exchange at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._answered: asyncio.Future[None] | None = None
        self.body: list[bytes] = []
        self.first_body_at = 0.0
        self.reads = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def exchange(self, request: bytes) -> str | None:
        """Send `request` and wait for its answer, whose body then is `self.body`. Returns what went wrong."""
        if self._transport.is_closing():
            return "the connection was closed between two requests"
        self.body = []
        self.reads = 0
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._answered
        except (ConnectionError, httptools.HttpParserError) as failure:
            return repr(failure)
        status = self._parser.get_status_code()
        return None if status == 200 else f"status {status}: {b''.join(self.body)[:200]!r}"

    def data_received(self, data: bytes) -> None:
        self.reads += 1
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as failure:
            self._end(failure)

    def on_body(self, data: bytes) -> None:
        if not self.body:
            self.first_body_at = time.perf_counter()
        self.body.append(data)

    def on_message_complete(self) -> None:
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or ConnectionResetError("closed before the answer was complete"))

    def _end(self, failure: Exception | None) -> None:
        if self._answered is None or self._answered.done():
            return
        if failure is None:
            self._answered.set_result(None)
        else:
            self._answered.set_exception(failure)


class Load:
    """Both loads over one set of connections to one port."""

    def __init__(self, port: int, connections: list[Connection]) -> None:
        self._port = port
        self._connections = connections
        self._sent = 0
        self._tally = Tally()

    async def run(self, kind: str, count: int, tokens: int, spread_s: float) -> Tally:
        """Send `count` requests in a closed loop, or one stream of `tokens` tokens on each connection."""
        self._tally = Tally()
        watch = asyncio.create_task(self._watch_lag())
        started_at = time.perf_counter()
        if kind == "requests":
            self._left = count
            sends = [self._closed_loop(each) for each in self._connections]
        else:
            gap_s = spread_s / len(self._connections)
            sends = [self._stream(each, i * gap_s, tokens) for i, each in enumerate(self._connections)]
        try:
            await asyncio.wait_for(asyncio.gather(*sends), TIMEOUT_S)
        except TimeoutError:
            self._tally.errors.append(f"not all answered after {TIMEOUT_S:.0f} s")
        self._tally.seconds = time.perf_counter() - started_at
        watch.cancel()
        return self._tally

    async def _closed_loop(self, connection: Connection) -> None:
        while self._left > 0 and not self._tally.errors:
            self._left -= 1
            user = self._next_user()
            failure = await connection.exchange(payload.request(user, self._port, stream=False, tokens=1))
            self._judge(user, connection, failure, payload.reply(user), answers=1)

    async def _stream(self, connection: Connection, delay_s: float, tokens: int) -> None:
        await asyncio.sleep(delay_s)
        user = self._next_user()
        failure = await connection.exchange(payload.request(user, self._port, stream=True, tokens=tokens))
        self._tally.stream_s.append(time.perf_counter() - connection.first_body_at)
        self._judge(user, connection, failure, payload.stream(user, tokens), answers=tokens)

    def _next_user(self) -> str:
        self._sent += 1
        return f"user-{self._sent:06}"

    def _judge(
        self, user: str, connection: Connection, failure: str | None, want: bytes, answers: int
    ) -> None:
        got = b"".join(connection.body)
        self._tally.reads += connection.reads
        if failure is None and got != want:
            failure = (
                f"the body is not what the engine sent: {len(got)} bytes for {len(want)}, ends {got[-80:]!r}"
            )
        if failure is None:
            self._tally.answers += answers
        else:
            self._tally.errors.append(f"{user}: {failure}")

    async def _watch_lag(self) -> None:
        while True:
            slept_at = time.perf_counter()
            await asyncio.sleep(LAG_PERIOD_S)
            self._tally.lags_s.append(time.perf_counter() - slept_at - LAG_PERIOD_S)


async def main(args: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    connections = []
    for _ in range(args.connections):
        _, connection = await loop.create_connection(Connection, "127.0.0.1", args.port)
        connections.append(connection)
    load = Load(args.port, connections)
    warm_up = await load.run(args.kind, args.count // 10, max(1, args.tokens // 10), args.spread_s)
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    tally = await load.run(args.kind, args.count, args.tokens, args.spread_s)
    tally.errors[:0] = warm_up.errors
    print(json.dumps(asdict(tally)), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("requests", "streams"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--connections", type=int, required=True)
    parser.add_argument("--count", type=int, default=0, help="requests to send, all connections together")
    parser.add_argument("--tokens", type=int, default=0, help="tokens of each stream")
    parser.add_argument("--spread-s", type=float, default=0.0, help="time over which the streams start")
    return parser.parse_args()


if __name__ == "__main__":
    uvloop.run(main(_arguments()))
