"""Abuses of what is off by default, and by units that are ill: agents, KV events, guardrail, transfers of KV
blocks, WebSockets, health. Also bodies of every shape.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter

import msgpack
import zmq
import zmq.asyncio

from loadtests.abuse.client import Client, ask_all, ask_on
from loadtests.abuse.evil import FOREIGN, prompt
from loadtests.abuse.misdeeds import FORBIDDEN
from loadtests.abuse.nouns import Abuse, Got, Place, Surroundings
from loadtests.kit.gate import metric_sum
from loadtests.wire.messages import get, post, whole

ILL_FOR_S = 8.0
FLIPS_MOST = 4
SOCKETS = 400
KV_MESSAGES, KV_EVENTS = 300, 60_000
KV_CONNECTED_S = 3.0
"""A gate that found nobody there tries again after so long."""
ASKED_FOR = 40
SIZES = (35_000, 100_000, 300_000, 900_000)
SMALL, SMALL_BODIES = 16_000, 2000
_ASKED = b'{"model":"none","max_tokens":1,'
"""Of a model that nobody serves: reading it is the work of the gate alone."""
_REALTIME = "/v1/realtime?model=evil"
_A = b'"messages":[{"role":"user","content":"a"}],'
_SHAPES: tuple[tuple[bytes, bytes, bytes], ...] = (
    (_ASKED + b'"messages":[', b'{"a":1},', b"{}]}"),
    (_ASKED + b'"messages":[', b'{"role":"a","content":"b","tool_calls":[{"function":{}}]},', b"{}]}"),
    (_ASKED + b'"messages":[{"role":"user","content":[', b"{},", b"{}]}]}"),
    (_ASKED + b'"messages":[{"role":"user","content":[', b'{"image":1},', b"{}]}]}"),
    (_ASKED + b'"messages":[{"role":"user","content":', b"[", b"1"),
    (_ASKED + b'"prompt":[', b"[-1],", b"[-1]]}"),
    (_ASKED + _A + b'"tools":[', b'{"type":"function","function":{"name":"a"}},', b"{}]}"),
    (_ASKED + _A + b'"stop":[', b'"a",', b'"a"]}'),
    (_ASKED + _A + b'"logit_bias":{"1":1', b',"%d":1', b"}}"),
    (_ASKED + _A + b'"z":NaN', b',"%d":1', b"}"),
)


async def shapes(place: Place) -> Got:
    """Bodies of every shape and size: many messages, parts, tools, stop strings, names, levels."""
    each = [post(_body(shape, size)) for size in SIZES for shape in _SHAPES]
    return await ask_all(place.gate.port, each, at_once=8)


async def small_bodies(place: Place) -> Got:
    """The same as bodies that are read at once, from many connections."""
    each = [post(_body(shape, SMALL)) for shape in _SHAPES]
    return await ask_on(place.gate.port, each * (SMALL_BODIES // len(each)), at_once=256)


def _body(shape: tuple[bytes, bytes, bytes], size: int) -> bytes:
    begin, piece, end = shape
    if b"%d" in piece:
        return begin + b"".join(piece % (10**6 + n) for n in range(size // (len(piece) + 5))) + end
    return begin + piece * (size // len(piece)) + end


async def flipping(place: Place) -> Got:
    """A unit of the neighbour's, and two others, whose /health is an error, while they answer."""
    since = time.time()
    place.evil.pages[b"/health"] = whole(b"", status=b"503 Service Unavailable")
    await asyncio.to_thread(place.units[0].fault, "sick_health")
    await asyncio.sleep(ILL_FOR_S)
    await asyncio.to_thread(place.units[0].fault, "heal")
    place.evil.pages.clear()
    flips = await asyncio.to_thread(place.gate.flips, since)
    most = max(Counter(flip["unit"] for flip in flips).values(), default=0)
    return Counter({"left" if 0 < most <= FLIPS_MOST else f"{most} flips of a unit": 1})


async def heartbeats(place: Place) -> Got:
    """Agents that send heartbeats as fast as they are read."""
    place.evil.floods = True
    await asyncio.sleep(ILL_FOR_S)
    place.evil.floods = False
    return Counter(left=1)


async def kv_events(place: Place) -> Got:
    """A unit that publishes as many events in a message as are looked at, many times; then messages of
    16 MB.
    """
    known = [["BlockStored", [number], None, [1] * 16, 16, None] for number in range(KV_EVENTS // 2)]
    full, unknown, large = (
        msgpack.packb([0.0, events, None]) for events in (known, [0] * KV_EVENTS, [0] * (16 << 20))
    )
    with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.setsockopt(zmq.LINGER, 0)
        publisher.bind(f"tcp://127.0.0.1:{place.kv_port}")
        await asyncio.sleep(KV_CONNECTED_S)
        for number in range(KV_MESSAGES):
            payload = large if number > KV_MESSAGES * 0.9 else (full, unknown)[number % 2]
            await publisher.send_multipart([b"kv", number.to_bytes(8, "big"), payload])
            await asyncio.sleep(0.02)
    page = await asyncio.to_thread(place.gate.metrics)
    return Counter({"left" if metric_sum(page, "cellgate_kv_events_messages_total") else "never read": 1})


async def unseen_by_guardrail(place: Place) -> Got:
    """Forbidden words in every place in which an engine may write: none comes through."""
    got: Got = Counter()
    for number in range(ASKED_FOR):
        client = await Client.open(place.gate.port)
        await client.send(post(prompt("forbidden", number % 5, stream=True)))
        outcome = await client.answer()
        got["unseen text came through" if FORBIDDEN in client.body else outcome] += 1
        await client.close()
    return got


async def transfers(place: Place) -> Got:
    """Clients that say from where a unit is to fetch KV blocks."""
    said = {"do_remote_prefill": True, "remote_host": FOREIGN.decode(), "remote_port": 1}
    before, each = place.evil.done["foreign"], []
    chat = {"model": "evil", "messages": [{"role": "user", "content": "a"}]}
    generate = {"model": "evil", "token_ids": [1]}
    for _ in range(ASKED_FOR):
        for name in ("kv_transfer_params", "blocks"):
            options = {"sampling_params": {"extra_args": {name: said}}}
            each.append(post(json.dumps(generate | options).encode(), path="/inference/v1/generate"))
        each.append(post(json.dumps(chat | {"kv_transfer_params": said}).encode()))
        each.append(post(json.dumps(chat | {"vllm_xargs": {"kv_transfer_params": said}}).encode()))
    got = await ask_all(place.gate.port, each, at_once=8)
    passed = place.evil.done["foreign"] - before
    return got + Counter({"transfers reached a unit": passed} if passed else {})


async def silent_sockets(place: Place) -> Got:
    """WebSockets on which nobody says anything."""
    lines = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    asked = get(_REALTIME, lines + "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n")
    before = place.evil.targets[_REALTIME.encode()]
    clients = [await Client.open(place.gate.port) for _ in range(SOCKETS)]
    for client in clients:
        await client.send(asked)
    await asyncio.sleep(ILL_FOR_S)
    for client in clients:
        await client.close()
    opened = place.evil.targets[_REALTIME.encode()] - before
    return Counter({"left" if opened else "none was opened": SOCKETS})


EXTRAS = [
    Abuse(
        "shapes",
        f"bodies of {len(_SHAPES)} shapes and {len(SIZES)} sizes",
        shapes,
        megabytes=sum(SIZES) * len(_SHAPES) / 1e6,
    ),
    Abuse(
        "small-bodies",
        f"{SMALL_BODIES} bodies of the same shapes, of {SMALL // 1000} kB, on 256 connections",
        small_bodies,
        megabytes=SMALL_BODIES * SMALL / 1e6,
    ),
    Abuse("health-flips", "units whose /health is an error, while they answer", flipping),
    Abuse(
        "heartbeats",
        "agents that flood the gate with heartbeats",
        heartbeats,
        surroundings=Surroundings(uses="agents"),
    ),
    Abuse(
        "kv-events",
        f"{KV_MESSAGES} messages of {KV_EVENTS:,} KV events, or of 16 MB",
        kv_events,
        megabytes=KV_MESSAGES / 10,
        surroundings=Surroundings(uses="kv_events"),
    ),
    Abuse(
        "guardrail-unseen",
        "forbidden words in odd places of answers",
        unseen_by_guardrail,
        answers=r"200|4\d\d|503|cut",
        surroundings=Surroundings(uses="guardrail", beside_evil=True),
    ),
    Abuse(
        "transfers",
        "addresses of KV blocks that a client names",
        transfers,
        requests=4 * ASKED_FOR,
        surroundings=Surroundings(uses="roles", beside_evil=True),
    ),
    Abuse(
        "silent-sockets",
        f"{SOCKETS} WebSockets without a word",
        silent_sockets,
        requests=SOCKETS,
        surroundings=Surroundings(uses="realtime", beside_evil=True),
    ),
]
