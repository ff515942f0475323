"""Abuses whose price others would pay: what a body makes the gate do, beside large bodies of a neighbour."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from loadtests.abuse.bodies import MIB, OPEN, repeated
from loadtests.abuse.client import ask_all
from loadtests.abuse.nouns import Abuse, Got, Place
from loadtests.wire.client import Connection
from loadtests.wire.messages import post
from loadtests.wire.reply import Reply

BODIES = 150
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


async def _other(place: Place, over: asyncio.Event) -> Got:
    got: Got = Counter()
    body = post(OPEN + b'"pad":"' + b"a" * (MIB + MIB // 4) + b'"}')
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


PAYERS = [
    Abuse("many-key-bodies", f"{BODIES} bodies of {KEYS:,} keys, 64 at once", many_keys, megabytes=BODIES),
    Abuse("fake-images", f"{BODIES} bodies of 35 kB of fake images", fake_images, megabytes=BODIES * 0.035),
]
