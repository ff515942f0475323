"""What evil units do: replies that no engine should send."""

from __future__ import annotations

import asyncio
import gzip
import json
import random

from loadtests.abuse.evil import Misdeed
from loadtests.wire.messages import LAST_CHUNK, SSE_HEAD, chunk, whole
from loadtests.wire.scripted import Request

LINES_HEAD = (
    b"HTTP/1.1 200 OK\r\nConnection: "
    + b"a," * 7600
    + b"\r\n"
    + b"Upgrade: a\r\n" * 2700
    + b"Content-Length: 2\r\n\r\n{}"
)
INTERIM = b"HTTP/1.1 103 Early Hints\r\n\r\n"
EVENT_MB = 100
COMMENTS_MB = 10
INTERIMS = 100_000
TINY_CHUNKS = 200_000
FLOOD_S = 30.0
LARGE_EVENT = 20_000
FORBIDDEN = b"swordfish"
"""What the guardrail denies."""
_PIECE = 1 << 16


def event(text: str, finish: str | None = None) -> bytes:
    """One SSE event with a piece of text, as engines write it."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return (
        b"data: "
        + json.dumps({"id": "1", "object": "chat.completion.chunk", "choices": [choice]}).encode()
        + b"\n\n"
    )


END = chunk(event("", "stop")) + chunk(b"data: [DONE]\n\n") + LAST_CHUNK


async def cut(asked: Request) -> None:
    """It takes the request and closes."""
    asked.close()


async def hold(asked: Request) -> None:
    """It never answers."""
    await asked.until_gone()


async def head_lines(asked: Request) -> None:
    """60 kB of lines that each must be looked up."""
    await asked.send(LINES_HEAD)


async def head_endless(asked: Request) -> None:
    """A head without end."""
    await asked.send(b"HTTP/1.1 200 OK\r\n")
    for number in range(2_000_000):
        await asked.send(b"x-%d: a\r\n" % number)


async def interim(asked: Request) -> None:
    """1xx replies, then the true one."""
    for _ in range(INTERIMS // 1000):
        await asked.send(INTERIM * 1000)
    await asked.send(whole(b"{}"))


async def comments(asked: Request) -> None:
    """Comments in the place of tokens, then one."""
    await asked.send(SSE_HEAD)
    for _ in range(COMMENTS_MB * 16):
        await asked.send(chunk(b": a\n\n" * (_PIECE // 5)))
    await asked.send(chunk(event("a")) + END)


async def event_huge(asked: Request) -> None:
    """A token, and an event that does not end."""
    await asked.send(SSE_HEAD + chunk(event("a")) + chunk(b"data: "))
    for _ in range(EVENT_MB * 16):
        await asked.send(chunk(b"a" * _PIECE))
    await asked.send(chunk(b"\n\n") + END)


async def first_event_huge(asked: Request) -> None:
    """The same before any token."""
    await asked.send(SSE_HEAD + chunk(b"data: "))
    for _ in range(EVENT_MB * 16):
        await asked.send(chunk(b"a" * _PIECE))
    await asked.send(chunk(b"\n\n") + END)


async def tiny_chunks(asked: Request) -> None:
    """A token, then chunks of one byte."""
    await asked.send(SSE_HEAD + chunk(event("a")))
    for _ in range(TINY_CHUNKS // 1000):
        await asked.send(chunk(b":") + chunk(b"a") * 997 + chunk(b"\n") * 2)
    await asked.send(END)


async def flood(asked: Request) -> None:
    """Tokens as fast as they are taken, for some time."""
    piece = chunk(event("a" * 200)) * 200
    over_at = asyncio.get_running_loop().time() + FLOOD_S
    await asked.send(SSE_HEAD)
    while asyncio.get_running_loop().time() < over_at:
        await asked.send(piece)
        await asyncio.sleep(0)
    await asked.send(END)


async def short(asked: Request) -> None:
    """Fewer bytes than announced."""
    await asked.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{}")
    asked.close()


async def long(asked: Request) -> None:
    """More bytes than announced."""
    await asked.send(whole(b"{}") + b"a" * 1000)


async def gzipped(asked: Request) -> None:
    """A stream of events that is packed, as nobody asked for."""
    head = SSE_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
    await asked.send(head + chunk(gzip.compress(event("a") * 100_000)) + LAST_CHUNK)


async def garbage(asked: Request) -> None:
    """A megabyte that is no HTTP."""
    await asked.send(random.Random(1).randbytes(1 << 20))


async def carriage_returns(asked: Request) -> None:
    """Line ends that are CR alone, as the standard of server-sent events allows."""
    await asked.send(
        SSE_HEAD
        + (chunk(event("a")) + END.removesuffix(LAST_CHUNK)).replace(b"\n\n\r\n", b"\r\r\r\n")
        + LAST_CHUNK
    )


async def byte_order_mark(asked: Request) -> None:
    """A BOM before the first event, as the standard allows."""
    await asked.send(SSE_HEAD + chunk(b"\xef\xbb\xbf" + event("first")) + END)


async def forbidden(asked: Request) -> None:
    """A forbidden word, in one of the places in which an engine may write it."""
    word = FORBIDDEN.decode()
    places: tuple[object, ...] = (
        {"text_output": word},
        {"choices": [{"index": 0, "delta": {"content": word}}]},
        {"choices": [{"index": 0, "delta": {"reasoning_content": word}}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"name": word}}]}}]},
        {"choices": [{"index": 0, "delta": {"x": {"y": word}}}]},
    )
    number = int(asked.body.partition(b"evil:forbidden ")[2][:1])
    told = json.dumps(places[number % len(places)]).encode()
    await asked.send(SSE_HEAD + chunk(event("a")) + chunk(b"data: %b\n\n" % told) + END)


async def break_off(asked: Request) -> None:
    """A token, then the connection is lost; whoever is asked to go on does."""
    await _broken(asked, event("a"))


async def break_off_large(asked: Request) -> None:
    """The same after an event that is larger than any token."""
    await _broken(asked, event("a") + event("b" * LARGE_EVENT))


async def _broken(asked: Request, events: bytes) -> None:
    if b"continue_final_message" in asked.body:
        await asked.send(SSE_HEAD + chunk(event("c")) + END)
        return
    await asked.send(SSE_HEAD + chunk(events))
    await asyncio.sleep(0.2)
    asked.abort()


MISDEEDS: dict[bytes, Misdeed] = {
    act.__name__.replace("_", "-").encode(): act
    for act in (
        cut,
        hold,
        head_lines,
        head_endless,
        interim,
        comments,
        event_huge,
        first_event_huge,
        tiny_chunks,
        flood,
        short,
        long,
        gzipped,
        garbage,
        carriage_returns,
        byte_order_mark,
        forbidden,
        break_off,
        break_off_large,
    )
}
