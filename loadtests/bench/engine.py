"""The benchmark's engine: units in one process, the cheapest that answer as an inference server does.

A streamed answer sends its 200 head at once, its first token a millisecond later and then one each interval,
each as one SSE event in one HTTP chunk in one write. Every stream keeps the phase of its own start, so that
streams started at different times do not write in the same instant: the harder case for a proxy, as it cannot
serve many of them per wake-up.
"""

import argparse
import asyncio
import re

import uvloop

from loadtests.bench import payload
from loadtests.bench.engine_pages import PAGES, Counters
from loadtests.kit import processes
from loadtests.wire.messages import LAST_CHUNK, SSE_HEAD, chunk, whole
from loadtests.wire.scripted import Request, announce, listen, port_of

_SERVER = b"Server: engine\r\n"
"""A line more, as most servers send one: whoever relays a head pays for each."""
_STREAM_HEAD = SSE_HEAD.removesuffix(b"\r\n") + _SERVER + b"\r\n"
_PREFILL_MS = 1
"""From a request to its first token. Were it longer, a gate that reckons with prefill would let some wait."""
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens": ?(\d+)')
_AS_STREAM = re.compile(rb'"stream": ?true')


class Stream:
    """One streamed answer on its way."""

    __slots__ = ("counters", "index", "interval_ms", "request", "tokens", "user")

    def __init__(self, request: Request, counters: Counters, user: str, tokens: int) -> None:
        self.request = request
        self.counters = counters
        self.user = user
        self.tokens = tokens
        self.index = 0
        self.interval_ms = 0

    def send_token(self) -> bool:
        """Write the next token. False when it was the last one, or nobody listens any more."""
        if self.request.is_gone:
            self.counters.running -= 1
            return False
        self.counters.tokens += 1
        token = chunk(payload.event(self.user, self.index, self.tokens))
        self.request.write(token if self.index else chunk(payload.role(self.user)) + token)
        self.index += 1
        if self.index < self.tokens:
            return True
        self.counters.running -= 1
        end = chunk(payload.usage(self.user, self.tokens)) + chunk(payload.DONE)
        self.request.write(end + LAST_CHUNK)
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


class Unit:
    """One unit of the engine; `answer` is its script."""

    def __init__(self, ticks: Ticks, interval_ms: int) -> None:
        self._ticks = ticks
        self._interval_ms = interval_ms
        self._counters = Counters()

    def answer(self, request: Request) -> None:
        """A page, or what a model says."""
        page = PAGES.get(request.target)
        if request.target in (b"/v1/chat/completions", b"/v1/completions"):
            self._generate(request)
        elif page is not None:
            kind, body = page(self._counters, request.body)
            request.write(whole(body, kind=kind, lines=_SERVER))
        else:
            request.write(whole(b"", status=b"404 Not Found"))

    def _generate(self, request: Request) -> None:
        user, fields = payload.user_in(request.body), _without_messages(request.body)
        if not _AS_STREAM.search(fields):
            self._counters.tokens += 1
            request.write(whole(payload.reply(user), lines=_SERVER))
            return
        most = _MAX_TOKENS.search(fields)
        self._counters.running += 1
        request.write(_STREAM_HEAD)
        stream = Stream(request, self._counters, user, int(most[1]) if most else 1)
        stream.interval_ms = payload.User.of(user).interval_ms or self._interval_ms
        self._ticks.add(stream)


def _without_messages(body: bytes) -> bytes:
    """The other fields of a request. To read 200 kB as JSON would cost more than a proxy does."""
    return body[: body.find(b'"messages"')] + body[body.rfind(b"}]") :]


async def serve(interval_ms: int, units: int) -> None:
    """Listen on a free port for each unit, and say which they are."""
    ticks = Ticks(asyncio.get_running_loop())
    servers = [await listen(Unit(ticks, interval_ms).answer) for _ in range(units)]
    await announce([port_of(server) for server in servers])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interval-ms", type=float, default=20.0, help="for streams that say none")
    parser.add_argument("--units", type=int, default=2)
    args = parser.parse_args()
    processes.raise_files()
    uvloop.run(serve(max(1, round(args.interval_ms)), args.units))
