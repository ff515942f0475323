"""Kinds of clients for the soak: they come and go, leave in the middle, leave before a token, never read.

What must stay true: each client checks that it was what its kind says, and raises `FailedError` if not.
"""

import asyncio
import random
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from loadtests.kit.questions import Answer, End, Question, ask
from loadtests.wire.client import Connections
from loadtests.wire.messages import post
from loadtests.wire.raw import RECEIVE_BYTES, dial

STAY_S = 4.0
"""Longer than a wave of a thousand takes to start, so that all of them are there at the same time."""

UNREAD_S = 3 * STAY_S


class FailedError(Exception):
    """A client did not see what it should have."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the clients find the gate: its port, and a way to it that keeps no connection."""

    port: int
    gate: Connections


@dataclass(frozen=True, slots=True)
class Kind:
    """What a client asks for, and how it behaves: `behave` returns when it left, or None if it did not.

    `slow`: the factor on the units' steps of 0.1 s while such clients are there.
    """

    name: str
    behave: Callable[[Place, Question], Awaitable[float | None]]
    max_tokens: int
    slow: float = 1.0


async def come_and_go(place: Place, question: Question) -> None:
    """Read a whole answer; its text must be the unit's."""
    answer = Answer(question)
    await ask(place.gate, answer)
    if answer.end() is not End.WHOLE:
        raise FailedError(answer.why())


async def leave_in_the_middle(place: Place, question: Question) -> float:
    """Read for a while, and leave while the stream goes on."""
    loop = asyncio.get_running_loop()
    last = b""
    with await _sent(place, question) as sock:
        with suppress(TimeoutError):
            async with asyncio.timeout(STAY_S):
                while received := await loop.sock_recv(sock, 1 << 16):
                    last = last[-16:] + received
                raise FailedError("the stream ended before its client left")
        if b"\ndata: {" not in last:
            raise FailedError(f"no token within {STAY_S} s, only {last[:80]!r}")
        return time.monotonic()


async def leave_before_a_token(place: Place, question: Question) -> float:
    """Leave while the unit has nothing to say yet."""
    with await _sent(place, question) as sock:
        await asyncio.sleep(random.uniform(0.1, 0.3))
        with suppress(BlockingIOError):
            raise FailedError(f"there was something to read already: {sock.recv(80)!r}")
        return time.monotonic()


async def never_read(place: Place, question: Question) -> float:
    """Read nothing for far longer than any buffer lasts, then leave."""
    with await _sent(place, question, receive_bytes=RECEIVE_BYTES) as sock:
        await asyncio.sleep(UNREAD_S)
        head = sock.recv(12)
        if head != b"HTTP/1.1 200":
            raise FailedError(f"the answer began with {head!r}")
        return time.monotonic()


async def _sent(place: Place, question: Question, *, receive_bytes: int | None = None) -> socket.socket:
    """A connection on which the question has been sent."""
    request = post(question.body())
    return await asyncio.to_thread(dial, place.port, request, receive_bytes=receive_bytes)


KINDS = (
    Kind("come and go", come_and_go, max_tokens=32),
    Kind("leave in the middle", leave_in_the_middle, max_tokens=100, slow=4),
    Kind("leave before a token", leave_before_a_token, max_tokens=8, slow=6),
    Kind("never read", never_read, max_tokens=400),
)
