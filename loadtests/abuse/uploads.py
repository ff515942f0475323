"""Abuses by how a body is sent: in crumbs, in part, by many at once, by clients that leave."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

from loadtests.abuse.bodies import MIB, OPEN, image, repeated
from loadtests.abuse.client import Client, ask, ask_all, held, one
from loadtests.abuse.nouns import NO_ANSWER_POSSIBLE, Abuse, Got, Place, Surroundings
from loadtests.kit import processes
from loadtests.wire.messages import post
from loadtests.wire.raw import dial, reset

_AT_WORK_S = 0.03
"""By then a parser has begun with a large body."""
_CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: gate\r\ntransfer-encoding: chunked\r\n\r\n"


async def abandoned(place: Place) -> Got:
    """40 bodies of 20 MB; each client leaves when it has sent the last byte."""
    body = post(repeated(OPEN + b'"a":[', b"1", b"]}", 20 * MIB))

    async def leave() -> None:
        client = await Client.open(place.gate.port)
        await client.send(body)
        await client.close()

    for _ in range(10):
        await asyncio.gather(*(leave() for _ in range(4)))
    return Counter(left=40)


async def parser_killed(place: Place) -> Got:
    """A body of arrays, and the process that parses it is killed meanwhile, by whatever kills large ones."""
    (parser,) = (pid for pid in processes.children(place.gate.pid) if b"large_body" in _command(pid))
    before_s = processes.cpu_s(parser)
    asking = asyncio.create_task(
        ask(place.gate.port, post(repeated(OPEN + b'"a":[', b"[]", b"]}", 40 * MIB)))
    )
    await asyncio.to_thread(_kill_at, parser, before_s + _AT_WORK_S)
    return Counter([await asking])


def _kill_at(pid: int, cpu_s: float) -> None:
    """Kill a process that has had so much CPU time."""
    while processes.cpu_s(pid) < cpu_s:
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


async def tiny_chunks(place: Place) -> Got:
    """20 MB on the wire, in chunks of 2 bytes."""
    body = b'{"model":"sim","pad":"' + b"a" * (20 * MIB // 7 * 2) + b'"}'
    body += b" " * (len(body) % 2)
    chunks = b"".join(b"2\r\n%b\r\n" % body[at : at + 2] for at in range(0, len(body), 2))
    return await one(ask(place.gate.port, _CHUNKED + chunks + b"0\r\n\r\n"))


async def chunk_extension(place: Place) -> Got:
    """A chunk with an extension of a megabyte."""
    return await one(ask(place.gate.port, _CHUNKED + b"5;" + b"a" * MIB + b"\r\nhello\r\n0\r\n\r\n"))


async def trailers(place: Place) -> Got:
    """A megabyte of trailers."""
    return await one(
        ask(place.gate.port, _CHUNKED + b"2\r\n{}\r\n0\r\n" + b"a: b\r\n" * (MIB // 6) + b"\r\n")
    )


async def declared_only(place: Place) -> Got:
    """Clients that announce 64 MiB and send nothing; beside them one that sends a small body."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % (64 * MIB)
    idle = [dial(place.gate.port, head) for _ in range(8)]
    await asyncio.sleep(0.2)
    small = post(b'{"model":"sim","messages":[{"role":"user","content":"Why?"}],"max_tokens":1}')
    client = await Client.open(place.gate.port)
    for at in range(0, len(small), 60):
        # Body and head come apart, as most clients send them.
        await client.send(small[at : at + 60])
        await asyncio.sleep(0.1)
    got = Counter([await client.answer(patience_s=35.0)])
    await client.close()
    for raw in idle:
        raw.close()
    return got


async def continue_without_body(place: Place) -> Got:
    """200 clients that ask whether they may send, and do not."""
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n"
    )
    return await held((dial(place.gate.port, head) for _ in range(200)), 2.0)


async def several_large(place: Place) -> Got:
    """16 bodies of 1.2 MB at the same time."""
    body = post(image(1_200_000))
    return await ask_all(place.gate.port, [body] * 16, at_once=16)


async def multipart(place: Place) -> Got:
    """A recording of 20 MB with a thousand parts, on a path whose bodies are not read."""
    part = b'--a\r\ncontent-disposition: form-data; name="file"\r\n\r\n' + b"a" * 20_000 + b"\r\n"
    body = post(part * 1000 + b"--a--\r\n", path="/v1/audio/transcriptions")
    return await one(
        ask(place.gate.port, body.replace(b"application/json", b"multipart/form-data; boundary=a"))
    )


async def reset_at_every_phase(place: Place) -> Got:
    """500 clients that reset: at once, in the head, after it, in the body, after it, in the stream."""
    rng = random.Random(3)
    whole = post(
        b'{"model":"sim","stream":true,"messages":[{"role":"user","content":"Why?"}],"max_tokens":200}'
    )
    for _ in range(500):
        raw = dial(place.gate.port, whole[: rng.randrange(len(whole) + 40)])
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.01)))
        reset(raw)
    return Counter(left=500)


UPLOADS = [
    Abuse("abandoned", "40 bodies of 20 MB whose clients leave", abandoned, megabytes=200),
    Abuse("parser-killed", "the process that parses is killed", parser_killed, megabytes=40, answers="503"),
    Abuse("tiny-chunks", "20 MB in chunks of 2 bytes", tiny_chunks, megabytes=20),
    Abuse("chunk-extension", "a chunk extension of 1 MB", chunk_extension),
    Abuse("trailers", "1 MB of trailers", trailers),
    Abuse(
        "declared-only",
        "64 MiB announced, nothing sent",
        declared_only,
        answers="200",
        surroundings=Surroundings(bodies_bytes=256 * MIB),
    ),
    Abuse("continue-no-body", "200 clients that expect 100-continue and send no body", continue_without_body),
    Abuse("multipart", "a recording of 20 MB in a thousand parts", multipart, megabytes=20),
    Abuse("several-large", "16 bodies of 1.2 MB at once", several_large, megabytes=20),
    Abuse(
        "resets",
        "500 clients that reset, in every phase",
        reset_at_every_phase,
        requests=500,
        answers=NO_ANSWER_POSSIBLE,
    ),
]
