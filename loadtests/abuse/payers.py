"""Abuses whose price others would pay: what a body makes the gate do, beside large bodies of a neighbour."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from loadtests.abuse.bodies import MIB, OPEN, repeated
from loadtests.abuse.client import PATIENCE_S, Client, ask_all
from loadtests.abuse.nouns import KEYS, USAGE_LOG, Abuse, Got, Place, Surroundings
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
MANY_KEYS = 100_000
OTHER = "127.0.0.9"
"""The address of somebody who sends large bodies in good order."""
BILLED, TOKENS = 600, 40
LEAVE_S = 0.025
"""In which a unit computes about half of an answer."""
WRITTEN_S = 5.0
_CHAT = {"messages": [{"role": "user", "content": "usage"}]}
FORMS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", "max_tokens", _CHAT),
    ("/v1/chat/completions", "max_completion_tokens", _CHAT | {"stream_options": {"include_usage": True}}),
    ("/v1/completions", "max_tokens", {"prompt": '"usage":{"completion_tokens":0}'}),
    ("/v1/messages", "max_tokens", _CHAT),
    ("/v1/responses", "max_output_tokens", {"input": '"usage"'}),
)
_SHOWN = re.compile(rb'"(?:content|text|delta)": ?" ')
EVERY_S = 0.25
SLOW_S = 1.0
"""A large body of somebody else is not read for so long."""
_IMAGES = b'{"model":"sim","max_tokens":1,"messages":[{"role":"user","content":['


async def many_keys(place: Place) -> Got:
    """Bodies that take long to parse, many at once; beside them somebody with large bodies in good order."""
    body = post(OPEN + b",".join(b'"%06d":1' % n for n in range(MANY_KEYS)) + b"}")
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


def unread_slots(*max_tokens: int) -> Callable[[Place], Awaitable[Got]]:
    """All slots of the neighbour's units are asked for by streams of these lengths, of which a byte a second
    is read. A token is some 200 bytes.
    """

    async def act(place: Place) -> Got:
        kept = []
        for number in range(SLOTS):
            asked = {"model": "sim", "stream": True, "max_tokens": max_tokens[number % len(max_tokens)]}
            asked["messages"] = [{"role": "user", "content": "a"}]
            kept.append(dial(place.gate.port, post(json.dumps(asked).encode())))
        for _ in range(8):
            await asyncio.sleep(1.0)
            for raw in kept:
                with suppress(BlockingIOError, ConnectionResetError):
                    raw.recv(1)
        for raw in kept:
            raw.close()
        return Counter(left=SLOTS)

    return act


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


async def free_tokens(place: Place) -> Got:
    """A key by which tokens are to be had for nothing: words that look like usage, answers in every form,
    left at any moment. Each is in the usage log: with what its unit computed, or if that is an estimate, with
    at least half of what was shown.
    """
    got: Got = Counter()
    shown: dict[str, int] = {}
    numbers = iter(range(BILLED))

    async def some() -> None:
        for number in numbers:
            got[await _billed(place, number, shown)] += 1

    await asyncio.gather(*(some() for _ in range(16)))
    assert place.keys is not None
    log, bills = place.keys.with_name(USAGE_LOG), dict[str, dict[str, Any]]()
    give_up_at = time.monotonic() + WRITTEN_S
    while shown.keys() - bills.keys() and time.monotonic() < give_up_at:
        await asyncio.sleep(EVERY_S)
        bills = {bill["request_id"]: bill for bill in map(json.loads, log.read_bytes().splitlines())}
    for name, least in shown.items():
        bill = bills.get(name, {"completion_tokens": 0, "is_estimated": True})
        tokens, is_told = bill["completion_tokens"], not bill["is_estimated"]
        if not (tokens == TOKENS if is_told else TOKENS >= tokens >= max(1, least / 2)):
            got[f"billed {tokens} of {least}: {name}"] += 1
    return got


async def _billed(place: Place, number: int, shown: dict[str, int]) -> str:
    """What came of one request; at least how many tokens its unit has computed for it is in `shown`."""
    path, limit, asked = FORMS[number % len(FORMS)]
    stream, leaves = number % 2 == 0, number % 3 == 0
    name = f"{path.rpartition('/')[2]}-{number}{'-stream' * stream}{'-left' * leaves}"
    body = asked | {
        "model": "sim",
        limit: TOKENS,
        "stream": stream,
        "user": "usage",
        "metadata": {"usage": "0"},
    }
    lines = f"authorization: Bearer {KEYS['abuser'].decode()}\r\nx-request-id: {name}\r\n"
    client = await Client.open(place.gate.port)
    await client.send(post(json.dumps(body).encode(), path=path, lines=lines))
    outcome = await client.answer(LEAVE_S if leaves else PATIENCE_S)
    await client.close()
    if outcome == "hang" and leaves:
        shown[name] = len(_SHOWN.findall(client.body))
        return "left"
    if outcome == "200":
        shown[name] = TOKENS
    return outcome


async def administration(place: Place) -> Got:
    """Verbs of engines' administration, and transfers of KV blocks: refused, or stripped."""
    each = [post(b"{}", path=path) for path in ADMINISTRATION * 20]
    got = await ask_all(place.gate.port, each, at_once=8)
    return Counter({what if what.startswith("40") else f"passed: {what}": n for what, n in got.items()})


PAYERS = [
    Abuse(
        "free-tokens",
        f"{BILLED} answers in every form, many of them left, and words that look like usage",
        free_tokens,
        requests=5 * BILLED,
        surroundings=Surroundings(uses="keys"),
    ),
    Abuse(
        "many-key-bodies",
        f"{BODIES} bodies of {MANY_KEYS:,} keys, 64 at once",
        many_keys,
        megabytes=BODIES,
    ),
    Abuse(
        "drips",
        f"{DRIPS} bodies that hold memory and come byte by byte",
        drips,
        megabytes=DRIPS / 16,
        requests=DRIPS,
        surroundings=Surroundings(bodies_bytes=256 * MIB),
    ),
    *(
        Abuse(
            name,
            f"{SLOTS} streams of the neighbour's units, read at a byte a second{where}",
            unread_slots(*max_tokens),
            # As much as the gate keeps for each, and the kernel.
            megabytes=SLOTS * 0.6,
            requests=SLOTS * 20,
            surroundings=Surroundings(same_address=where != ""),
        )
        for name, where, max_tokens in (
            ("unread-slots", "", (20_000,)),
            ("unread-slots-same", ", from its own address", (20_000,)),
            ("unread-slots-lengths", ", from its own address, of 1 kB to 4 MB", (5, 100, 1000, 5000, 20_000)),
        )
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
