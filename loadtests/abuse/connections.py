"""Abuses by connections: many of them, silent ones, slow ones, ones that read nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

from loadtests.abuse.client import Client, ask, held
from loadtests.abuse.heads import SMALL
from loadtests.abuse.nouns import NO_ANSWER_POSSIBLE, Abuse, Got, Place, Surroundings
from loadtests.wire.messages import get, post
from loadtests.wire.raw import dial, reset

FILES = 256
SLOW = 500
SLOW_FOR_S = 12.0
"""Longer than `head_timeout_s`."""
BODY_FOR_S = 4.0
IDLE = 4000
CHURN = 3000


async def slow_heads(place: Place) -> Got:
    """Heads that come a byte at a time, and never end; the gate's last word is awaited."""

    async def drip() -> str:
        client = await Client.open(place.gate.port)
        await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: gate\r\n")
        dripping = asyncio.create_task(_drip(client, b"x", SLOW_FOR_S))
        try:
            return await client.answer()
        finally:
            dripping.cancel()
            await client.close()

    return Counter(await asyncio.gather(*(drip() for _ in range(SLOW))))


async def slow_bodies(place: Place) -> Got:
    """Bodies that come a byte at a time; their clients leave."""
    clients = [await Client.open(place.gate.port) for _ in range(SLOW)]
    for client in clients:
        await client.send(post(b"")[:-5].replace(b"content-length: ", b"content-length: 1000") + b"\r\n\r\n")
    await asyncio.gather(*(_drip(client, b" ", BODY_FOR_S) for client in clients))
    for client in clients:
        await client.close()
    return Counter(left=SLOW)


async def _drip(client: Client, byte: bytes, seconds: float) -> None:
    over_at = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < over_at:
        await client.send(byte)
        await asyncio.sleep(0.5)


async def idle(place: Place) -> Got:
    """Thousands of connections that say nothing."""
    kept = []
    for number in range(IDLE):
        kept.append(dial(place.gate.port))
        if number % 100 == 0:
            await asyncio.sleep(0.01)
    return await held(kept, 3.0)


async def silent_few_files(place: Place) -> Got:
    """600 silent connections to a gate that has few descriptors; another client must be served."""
    kept = []
    for _ in range(600):
        kept.append(dial(place.gate.port))
        await asyncio.sleep(0.002)
    got = Counter([await ask(place.gate.port, post(SMALL), patience_s=5.0) for _ in range(5)])
    for raw in kept:
        raw.close()
    return got


async def churn(place: Place) -> Got:
    """Connections that come and go without a word."""
    for number in range(CHURN):
        raw = dial(place.gate.port)
        if number % 2:
            reset(raw)
        else:
            raw.close()
        if number % 50 == 0:
            await asyncio.sleep(0.001)
    return Counter(left=CHURN)


async def pipelined_unread(place: Place) -> Got:
    """Requests without end on connections whose answers are not read."""
    request = get("/v1/models") * 1000
    clients = [dial(place.gate.port) for _ in range(16)]
    for _ in range(100):
        for raw in clients:
            try:
                raw.send(request)
            except OSError:
                continue
        await asyncio.sleep(0.02)
    for raw in clients:
        raw.close()
    return Counter(left=len(clients))


async def pipelined_posts(place: Place) -> Got:
    """A megabyte of generations on one connection, and the client leaves with a reset."""
    raw = dial(place.gate.port)
    data = post(SMALL) * 5000
    over_at = asyncio.get_running_loop().time() + 2.0
    while data and asyncio.get_running_loop().time() < over_at:
        with suppress(BlockingIOError):
            data = data[raw.send(data[:65536]) :]
        await asyncio.sleep(0.01)
    reset(raw)
    await asyncio.sleep(1.0)
    # The neighbour has one or two open.
    left = sum(unit["in_flight"] for unit in await asyncio.to_thread(place.gate.units)) // 8
    return Counter({"left": 1}) + Counter({"leases left open": left})


async def half_closed(place: Place) -> Got:
    """Clients that close their half after a request."""
    for _ in range(200):
        raw = dial(place.gate.port, post(SMALL))
        raw.shutdown(1)
        await asyncio.sleep(0.002)
        raw.close()
    return Counter(left=200)


async def sparing(place: Place) -> Got:
    """A request a byte at a time, each in a packet of its own, many at once: it is answered."""

    async def spell() -> str:
        client = await Client.open(place.gate.port)
        for byte in post(SMALL):
            await client.send(bytes([byte]))
            await asyncio.sleep(0.001)
        outcome = await client.answer()
        await client.close()
        return outcome

    return Counter(await asyncio.gather(*(spell() for _ in range(50))))


CONNECTIONS = [
    Abuse("slow-heads", f"{SLOW} heads that come a byte at a time", slow_heads, requests=SLOW * 3),
    Abuse("slow-bodies", f"{SLOW} bodies that come a byte at a time", slow_bodies, requests=SLOW * 2),
    Abuse("idle", f"{IDLE} silent connections", idle, requests=IDLE),
    Abuse(
        "few-files",
        f"600 silent connections to a gate with {FILES} descriptors",
        silent_few_files,
        requests=600,
        surroundings=Surroundings(files=FILES),
    ),
    Abuse("churn", f"{CHURN} connections that come and go", churn, requests=CHURN),
    Abuse(
        "pipelined-unread", "pipelined requests whose answers nobody reads", pipelined_unread, requests=2000
    ),
    Abuse("pipelined-posts", "5,000 pipelined generations, then a reset", pipelined_posts, requests=2000),
    Abuse(
        "half-closed",
        "200 clients that close their half",
        half_closed,
        requests=200,
        answers=NO_ANSWER_POSSIBLE,
    ),
    Abuse("sparing", "50 requests a byte at a time", sparing, requests=50 * 20),
]
