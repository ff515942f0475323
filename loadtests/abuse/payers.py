"""Abuses whose price others would pay: what a body makes the gate do, beside large bodies of a neighbour."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import suppress

from loadtests.abuse.bodies import MIB, OPEN, repeated
from loadtests.abuse.client import Client, ask_all
from loadtests.abuse.nouns import Abuse, Got, Place, Surroundings
from loadtests.wire.client import Connection
from loadtests.wire.messages import get, post
from loadtests.wire.raw import dial
from loadtests.wire.reply import Reply

BODIES = 150
DRIPS = 271
SLOTS = 128
ADMINISTRATION = (
    "/abort_requests",
    "/release_kv_cache_memory",
    "/start_weight_update",
    "/set_internal_state",
    "/load_lora_adapter_from_tensors",
    "/get_weights_by_name",
    "/v2/logging",
    "/v2/systemsharedmemory/region/a/register",
)
KEYS = 100_000
OTHER = "127.0.0.9"
"""The address of somebody who sends large bodies in good order."""
EVERY_S = 0.25
SLOW_S = 1.0
"""A large body of somebody else is not read for so long."""
_IMAGES = b'{"model":"sim","max_tokens":1,"messages":[{"role":"user","content":['


async def many_keys(place: Place) -> Got:
    """Bodies that take long to parse, many at once; beside them somebody with large bodies in good order."""
    body = post(OPEN + b",".join(b'"%06d":1' % n for n in range(KEYS)) + b"}")
    over = asyncio.Event()
    other = asyncio.create_task(_other(place, over))
    got = await ask_all(place.gate.port, [body] * BODIES, at_once=64)
    over.set()
    return got + await other


async def _other(place: Place, over: asyncio.Event, size: int = MIB + MIB // 4) -> Got:
    got: Got = Counter()
    body = post(OPEN + b'"pad":"' + b"a" * size + b'"}')
    while not over.is_set():
        begun_at, reply = time.monotonic(), Reply()
        connection = await Connection.open(place.gate.port, source=OTHER)
        await connection.send(body)
        await connection.read(reply)
        connection.close()
        waited_s = time.monotonic() - begun_at
        got[f"{reply.status}" if reply.status == 200 and waited_s < SLOW_S else f"other: {reply.status}"] += 1
        await asyncio.sleep(EVERY_S)
    return got


async def fake_images(place: Place) -> Got:
    """Small bodies of images that are none: each would be hashed as if it were one."""
    body = post(repeated(_IMAGES, b'{"image":1}', b"]}]}", 35_000))
    return await ask_all(place.gate.port, [body] * BODIES, at_once=8)


async def drips(place: Place) -> Got:
    """Bodies that hold memory and come byte by byte; beside them somebody with prompts of 150 kB."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % (8 * MIB)
    clients = [await Client.open(place.gate.port) for _ in range(DRIPS)]
    for client in clients:
        await client.send(head + b" " * (MIB // 16))
    over = asyncio.Event()
    other = asyncio.create_task(_other(place, over, 150_000))
    for _ in range(5):
        await asyncio.sleep(1.5)
        for client in clients:
            await client.send(b" ")
    over.set()
    got: Got = Counter()
    for client in clients:
        outcome = await client.answer(0.01)
        got["left" if outcome == "hang" else outcome] += 1
        await client.close()
    return got + await other


async def unread_slots(place: Place) -> Got:
    """All slots of the neighbour's units are asked for by streams of which a byte a second is read."""
    asked = {
        "model": "sim",
        "stream": True,
        "max_tokens": 20_000,
        "messages": [{"role": "user", "content": "a"}],
    }
    kept = [dial(place.gate.port, post(json.dumps(asked).encode())) for _ in range(SLOTS)]
    for _ in range(8):
        await asyncio.sleep(1.0)
        for raw in kept:
            with suppress(BlockingIOError):
                raw.recv(1)
    for raw in kept:
        raw.close()
    return Counter(left=SLOTS)


async def lies(place: Place) -> Got:
    """Words of balancers, routers and operators, from a client: none of them counts."""
    states = [
        f"X-Haproxy-Server-State: UP; name=b/e{n}; node=e{n}; weight=1/2; scur=0/1\r\n" for n in range(56)
    ]
    got = await ask_all(place.gate.port, [get("/readyz", state) for state in states], at_once=8)
    body = b'{"model":"sim","max_tokens":1,"messages":[{"role":"user","content":"a"}]}'
    lines = (
        "x-cellgate-explain: 1\r\n",
        "x-cellgate-unit: sim\r\n",
        "x-gateway-destination-endpoint: 127.0.0.1:1\r\n",
    )
    told = await ask_all(place.gate.port, [post(body, lines=each) for each in lines * 20], at_once=8)
    return got + Counter(
        {what if what.startswith("403") else f"believed: {what}": n for what, n in told.items()}
    )


async def administration(place: Place) -> Got:
    """Verbs of engines' administration, and transfers of KV blocks: refused, or stripped."""
    each = [post(b"{}", path=path) for path in ADMINISTRATION * 20]
    got = await ask_all(place.gate.port, each, at_once=8)
    return Counter({what if what.startswith("40") else f"passed: {what}": n for what, n in got.items()})


PAYERS = [
    Abuse("many-key-bodies", f"{BODIES} bodies of {KEYS:,} keys, 64 at once", many_keys, megabytes=BODIES),
    Abuse(
        "drips",
        f"{DRIPS} bodies that hold memory and come byte by byte",
        drips,
        megabytes=DRIPS / 16,
        requests=DRIPS,
        surroundings=Surroundings(bodies_bytes=256 * MIB),
    ),
    Abuse(
        "unread-slots",
        f"{SLOTS} streams of the neighbour's units, read at a byte a second",
        unread_slots,
        requests=SLOTS * 20,
    ),
    Abuse("lies", "headers by which others would be harmed", lies, requests=120),
    Abuse(
        "administration",
        "verbs of engines' administration",
        administration,
        requests=20 * len(ADMINISTRATION),
    ),
    Abuse("fake-images", f"{BODIES} bodies of 35 kB of fake images", fake_images, megabytes=BODIES * 0.035),
]
