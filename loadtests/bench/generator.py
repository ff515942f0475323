"""The benchmark's load generator: one process, raw protocols, every answer compared byte for byte.

It opens its connections, warms up, prints `ready`, waits for a line on standard input, sends the load, prints
one JSON object, and stays until its input ends. Its driver reads the CPU of all processes between those two
lines. Streams are all open by then and stay so: when the process ends, its clients leave in mid-stream.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
from dataclasses import asdict

import uvloop

from loadtests.bench import payload
from loadtests.bench.tally import MeasuredConnection, Tally
from loadtests.kit import processes

TIMEOUT_S = 120.0
LAG_PERIOD_S = 0.01
_MADE_BYTES = 128_000_000
"""As many requests are made beforehand as fit; behind the last one the first comes again."""


class Load:
    """What all loads are: exchanges over one set of connections, which are watched and compared."""

    def __init__(self, args: argparse.Namespace, connections: list[MeasuredConnection]) -> None:
        self.args = args
        self.connections = connections
        self.tally = Tally()
        self._numbers = itertools.count(1)
        self._begin()

    def _begin(self) -> None:
        """Count again; what went wrong before stays."""
        self.tally = Tally(errors=self.tally.errors)
        self._reads_before = self._reads()
        for connection in self.connections:
            connection.tally = self.tally

    def _reads(self) -> int:
        return sum(connection.reads for connection in self.connections)

    async def warm_up(self) -> None:
        """What comes before the measurement."""
        raise NotImplementedError

    async def run(self) -> Tally:
        """The measurement."""
        self._begin()
        watch = asyncio.create_task(self._watch_lag())
        started_at = time.perf_counter()
        try:
            await asyncio.wait_for(self._send(), TIMEOUT_S)
        except TimeoutError:
            self.tally.errors.append(f"not all answered after {TIMEOUT_S:.0f} s")
        self.tally.seconds = time.perf_counter() - started_at
        self.tally.reads = self._reads() - self._reads_before
        watch.cancel()
        return self.tally

    async def _send(self) -> None:
        raise NotImplementedError

    def _next_user(self) -> str:
        return str(payload.User(next(self._numbers), self.args.interval_ms, self.args.bytes))

    def _judge(self, user: str, connection: MeasuredConnection, failure: str | None, want: bytes) -> None:
        """The answer must be what the engine sends."""
        got = b"".join(connection.body)
        if failure is None and not self._is_right(got, want):
            failure = f"the body is not what the engine sent: {len(got)} bytes, they end in {got[-80:]!r}"
        if failure is not None:
            self.tally.errors.append(f"{user}: {failure}")

    def _is_right(self, got: bytes, want: bytes) -> bool:
        return got == want or (self.args.text_only and payload.said(got) == payload.said(want))

    async def _watch_lag(self) -> None:
        while True:
            slept_at = time.perf_counter()
            await asyncio.sleep(LAG_PERIOD_S)
            self.tally.lags_s.append(time.perf_counter() - slept_at - LAG_PERIOD_S)


class Requests(Load):
    """Requests that do not stream, in a closed loop, made beforehand. The warm-up is a tenth of them."""

    async def warm_up(self) -> None:
        count, port = self.args.count, self.args.port
        users = [self._next_user() for _ in range(min(count + count // 10, _MADE_BYTES // self.args.bytes))]
        made = [(user, payload.request(user, port, stream=False, tokens=1)) for user in users]
        self._made = itertools.cycle(made)
        await self._all(count // 10)

    async def _send(self) -> None:
        await self._all(self.args.count)

    async def _all(self, count: int) -> None:
        self._left = count
        await asyncio.gather(*(self._closed_loop(each) for each in self.connections))

    async def _closed_loop(self, connection: MeasuredConnection) -> None:
        while self._left > 0 and not self.tally.errors:
            self._left -= 1
            user, request = next(self._made)
            failure = await connection.exchange(request)
            self._judge(user, connection, failure, payload.reply(user))


class Agents(Load):
    """Sessions in a closed loop, one on each connection. The warm-up is the first turn of each."""

    async def warm_up(self) -> None:
        sessions = range(1, len(self.connections) + 1)
        self._turns = self.args.count // len(self.connections)
        begin = self.args.bytes - payload.TURN_BYTES * self._turns // 2
        self._sessions = [payload.Agent(number, begin) for number in sessions]
        await self._all(1)

    async def _send(self) -> None:
        await self._all(self._turns)

    async def _all(self, turns: int) -> None:
        talks = zip(self._sessions, self.connections, strict=True)
        await asyncio.gather(*(self._talk(*each, turns) for each in talks))

    async def _talk(self, session: payload.Agent, connection: MeasuredConnection, turns: int) -> None:
        for _ in range(turns):
            user = self._next_user()
            failure = await connection.exchange(session.request(user, self.args.port))
            self._judge(user, connection, failure, payload.reply(user))


class Streams(Load):
    """A stream on each connection, and another one whenever it has ended.

    The first ones are of all lengths, so that from then on streams end, and begin, evenly over time.
    """

    async def warm_up(self) -> None:
        gap_s = self.args.spread_s / len(self.connections)
        self._streams = [
            asyncio.create_task(self._stream_after(number * gap_s, number))
            for number in range(len(self.connections))
        ]
        await asyncio.sleep(self.args.spread_s)
        give_up_at = time.monotonic() + TIMEOUT_S
        while not all(each.first_body_at for each in self.connections) and not self.tally.errors:
            if time.monotonic() > give_up_at:
                self.tally.errors.append(f"not all streams had begun after {TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.05)

    async def _send(self) -> None:
        await asyncio.sleep(self.args.seconds)

    async def _stream_after(self, delay_s: float, number: int) -> None:
        await asyncio.sleep(delay_s)
        tokens = self.args.tokens
        first = 1 + tokens * number // len(self.connections)
        while not self.tally.errors:
            await self._stream(self.connections[number], first)
            first = tokens

    async def _stream(self, connection: MeasuredConnection, tokens: int) -> None:
        user = self._next_user()
        failure = await connection.exchange(payload.request(user, self.args.port, stream=True, tokens=tokens))
        self._judge(user, connection, failure, payload.stream(user, tokens))


class Bursts(Load):
    """New clients that connect and ask at once, and leave after their answer. The warm-up is one burst.

    An answer is a stream here, and its time to the first token counts from before the client connects.
    """

    async def warm_up(self) -> None:
        await self._burst()

    async def _send(self) -> None:
        for _ in range(self.args.count):
            await asyncio.sleep(self.args.seconds)
            if not self.tally.errors:
                await self._burst()

    async def _burst(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(self.args.clients)))
        self.tally.answers = len(self.tally.ttfts_s)

    async def _client(self) -> None:
        user, tokens = self._next_user(), self.args.tokens
        request = payload.request(user, self.args.port, stream=True, tokens=tokens)
        began_at = time.perf_counter()
        try:
            connection = await MeasuredConnection.open(self.args.port)
        except OSError as error:
            self.tally.errors.append(f"{user}: {error!r}")
            return
        connection.tally = self.tally
        failure = await connection.exchange(request, began_at)
        connection.close()
        self._judge(user, connection, failure, payload.stream(user, tokens))


LOADS: dict[str, type[Load]] = {"requests": Requests, "agents": Agents, "streams": Streams, "bursts": Bursts}


async def main(args: argparse.Namespace) -> None:
    """All of it, as the module says."""
    connections = [await MeasuredConnection.open(args.port) for _ in range(args.connections)]
    load = LOADS[args.kind](args, connections)
    await load.warm_up()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print(json.dumps(asdict(await load.run())), flush=True)
    await asyncio.to_thread(sys.stdin.read)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("kind", choices=LOADS)
    add("--port", type=int, required=True)
    add("--connections", type=int, required=True)
    add("--bytes", type=int, default=payload.ASK_BYTES, help="size of a request's body")
    add("--count", type=int, default=0, help="requests to send, all connections together; or bursts")
    add("--clients", type=int, default=0, help="of each burst")
    add("--tokens", type=int, default=0, help="tokens of each stream")
    add(
        "--interval-ms", type=int, default=0, help="time between the tokens of a stream (0: the engine's own)"
    )
    add("--spread-s", type=float, default=0.0, help="time over which the streams start")
    add("--seconds", type=float, default=60.0, help="for how long streams are measured; between bursts")
    add("--text-only", action="store_true", help="answers may be rewritten, as long as they say the same")
    return parser.parse_args()


if __name__ == "__main__":
    processes.raise_files()
    uvloop.run(main(_arguments()))
