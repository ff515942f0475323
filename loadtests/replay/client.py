"""The open-loop client: every request is sent when the trace says, whatever became of those before.

What must stay true: times count from the moment a request was due, so that a client that sends late makes
figures worse, never better.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from loadtests.gym.nouns import Request
from loadtests.replay.shapes import DONE, MODEL
from loadtests.replay.texts import ANSWER_WORD, Words, own_words, written
from loadtests.wire.client import Connection
from loadtests.wire.messages import post
from loadtests.wire.reply import Reply


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request. Times in virtual seconds; `ttft_s` and `e2e_s` count from when it was due.

    `trouble` is empty for an answer that is whole, else what happened; `is_refused`: by a status, not broken.
    """

    due_s: float
    late_s: float
    ttft_s: float
    e2e_s: float
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int
    unit: str
    trouble: str = ""
    is_refused: bool = False

    @property
    def tpot_s(self) -> float:
        """Seconds for each token after the first."""
        return (self.e2e_s - self.ttft_s) / max(self.answer_tokens - 1, 1)


Read = Callable[[bytes, Request], tuple[str, dict[str, Any], str]]
"""What is wrong with an answer (empty: nothing), its usage if it tells it, and the unit that gave it."""


def bodies_of(
    requests: Iterable[Request], *, words: Words = own_words, more: Mapping[str, object] | None = None
) -> dict[Request, bytes]:
    """What is asked for, follow-ups included: in those stands what units answer; `more` is asked as well."""
    everyone = [each for first in requests for each in _followed(first)]
    answers = {each.context for each in everyone}
    return {each: _body_of(each, written(each.prompt, answers, words), more or {}) for each in everyone}


def _followed(request: Request | None) -> Iterator[Request]:
    while request is not None:
        yield request
        request = request.then


def _body_of(request: Request, prompt: bytes, more: Mapping[str, object]) -> bytes:
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompt.decode(),
        "max_tokens": request.answer_tokens,
        "ignore_eos": True,
        "stream": request.stream,
    }
    if request.stream and request.usage:
        body["stream_options"] = {"include_usage": True}
    return orjson.dumps(body | dict(more))


async def replay(
    requests: Sequence[Request],
    bodies: Mapping[Request, bytes],
    ports: Sequence[int],
    *,
    speed_up: float,
    patience_s: float,
    read: Read,
) -> list[Answer]:
    """Send `requests` when they are due, and who follows up when its client has read the answer before; all
    time `speed_up` times as fast.

    With several ports the client itself takes the one with the fewest open requests, in turn where there are
    several. When nothing has ended for `patience_s` real seconds and nothing more is due, what is open is
    given up.
    """
    play = _Play(bodies, ports, _Clock(time.monotonic() + 0.1, speed_up))
    for request in requests:
        play.expect(request, request.at)
    await play.until_over(patience_s)
    return [each.answer(read) for each in play.exchanges]


class _Play:
    """All exchanges of a replay, those that begin because others have ended included."""

    def __init__(self, bodies: Mapping[Request, bytes], ports: Sequence[int], clock: "_Clock") -> None:
        self.exchanges: list[_Exchange] = []
        self._bodies, self._clock, self._doors = bodies, clock, _Doors(ports)
        self._loop = asyncio.get_running_loop()
        self._open: set[asyncio.Task[None]] = set()
        self._ended = 0
        self._last_due_s = 0.0
        self._over = asyncio.Event()

    def expect(self, request: Request, due_s: float) -> None:
        """A request will come."""
        exchange = _Exchange(request, due_s, self._clock)
        self.exchanges.append(exchange)
        self._last_due_s = max(self._last_due_s, due_s)
        self._loop.call_later(self._clock.real_s_until(due_s), self._begin, exchange)

    async def until_over(self, patience_s: float) -> None:
        """Return when all have ended, or have been given up."""
        ended = -1
        while ended < self._ended or self._clock.now() < self._last_due_s:
            ended = self._ended
            try:
                await asyncio.wait_for(self._over.wait(), patience_s)
            except TimeoutError:
                continue
            return
        left = list(self._open)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _begin(self, exchange: "_Exchange") -> None:
        task = self._loop.create_task(self._carry_out(exchange))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _carry_out(self, exchange: "_Exchange") -> None:
        port = self._doors.enter()
        try:
            await exchange.run(self._bodies[exchange.request], port)
        finally:
            self._doors.leave(port)
        self._ended += 1
        following = exchange.request.then
        if following is not None:
            self.expect(following, exchange.end_s + following.at)
        if self._ended == len(self.exchanges):
            self._over.set()


class _Clock:
    """Virtual seconds since the start."""

    def __init__(self, starts_at: float, speed_up: float) -> None:
        self._starts_at, self._speed_up = starts_at, speed_up

    def now(self) -> float:
        return (time.monotonic() - self._starts_at) * self._speed_up

    def real_s_until(self, at: float) -> float:
        return (at - self.now()) / self._speed_up


class _Doors:
    """Where requests go."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._open = dict.fromkeys(ports, 0)

    def enter(self) -> int:
        port = min(self._open, key=self._open.__getitem__)
        # To the end of the dict: of equals the one that was chosen longest ago is the first.
        self._open[port] = self._open.pop(port) + 1
        return port

    def leave(self, port: int) -> None:
        self._open[port] -= 1


class _Exchange:
    """One request on a connection of its own. Who does not come to an end of `run` was given up."""

    def __init__(self, request: Request, due_s: float, clock: _Clock) -> None:
        self.request, self.due_s = request, due_s
        self._clock = clock
        self._reply = Reply(self._take)
        self._received: list[bytes] = []
        self._sent_s = self._first_s = self.end_s = 0.0
        self._trouble = "no whole answer in time"

    async def run(self, body: bytes, port: int) -> None:
        """Connect, send, read to the end."""
        self._sent_s = self._clock.now()
        request = post(body, path="/v1/completions", host=f"127.0.0.1:{port}")
        try:
            connection = await Connection.open(port)
            await connection.exchange(request, self._reply)
            connection.close()
            self._trouble = ""
        except OSError as error:
            self._trouble = f"cut off: {error}"
        finally:
            self.end_s = self._clock.now()

    def answer(self, read: Read) -> Answer:
        """What became of it, once all is over."""
        body, status = b"".join(self._received) or self._reply.body, self._reply.status
        trouble, usage, unit = self._trouble, dict[str, Any](), ""
        if not trouble and status != 200:
            trouble = f"status {status}: {body[:120]!r}"
        elif not trouble:
            trouble, usage, unit = read(body, self.request)
        return Answer(
            due_s=self.due_s,
            late_s=self._sent_s - self.due_s,
            ttft_s=self._first_s - self.due_s,
            e2e_s=self.end_s - self.due_s,
            prompt_tokens=self.request.prompt.tokens,
            answer_tokens=self.request.answer_tokens,
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            unit=unit,
            trouble=trouble,
            is_refused=status not in (0, 200),
        )

    def _take(self, data: bytes) -> None:
        # Comments keep a connection warm, and are no token.
        if not self._first_s and not data.startswith(b":"):
            self._first_s = self._clock.now()
        self._received.append(data)


def read_answer(body: bytes, request: Request, token: bytes = ANSWER_WORD) -> tuple[str, dict[str, Any], str]:
    """As `Read` says, for answers in which every token, and nothing else, has a `token` in its text."""
    if request.stream and not body.endswith(DONE):
        return f"broken off: ends in {body[-80:]!r}", {}, ""
    events = [each[6:] for each in body.split(b"\n\n") if each.startswith(b"data: {")]
    last = orjson.loads(events[-1] if request.stream else body)
    if "error" in last or "choices" not in last:
        return f"broken off: ends in {body[-80:]!r}", {}, ""
    if (found := body.count(token)) != request.answer_tokens:
        return f"{found} tokens for {request.answer_tokens}", {}, ""
    usage = last.get("usage") or {}
    if (asked := usage.get("prompt_tokens", request.prompt.tokens)) != request.prompt.tokens:
        return f"a prompt of {asked} tokens for {request.prompt.tokens}", {}, ""
    return "", usage, last.get("system_fingerprint") or ""
