"""Abuses by many names: models, tenants, sessions, prompts, ids. What is kept of each must be bounded."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

from loadtests.abuse.client import ask as ask_once
from loadtests.abuse.client import ask_all, ask_on, one
from loadtests.abuse.evil import MODEL, prompt
from loadtests.abuse.nouns import Abuse, Got, Place
from loadtests.wire.messages import get, post
from loadtests.wire.raw import dial

MODELS = 5000
TENANTS = 20_000
PROMPTS = 100
PROMPT_BYTES = 200_000
QUEUE = 2000
"""More than there is room for: 128 at the units, 1,024 in the queue."""


async def unknown_models(place: Place) -> Got:
    """Each request asks for another model that nobody serves."""
    each = (post(json.dumps({"model": f"m{n}" * 40, "messages": []}).encode()) for n in range(MODELS))
    return await ask_on(place.gate.port, each, at_once=8)


async def long_model(place: Place) -> Got:
    """The name of a model that fills the body."""
    return await one(
        ask_once(place.gate.port, post(json.dumps({"model": "m" * 1_000_000, "messages": []}).encode()))
    )


async def tenants(place: Place) -> Got:
    """Each request is of another tenant, session, user, credential and priority."""

    def each(n: int) -> bytes:
        lines = (
            f"x-session-id: s{n}\r\nx-request-id: r{n}\r\nx-priority: {n}\r\nauthorization: Bearer {n}\r\n"
        )
        if n % 2:
            lines += f"x-gateway-inference-fairness-id: t{n}\r\n"
        return post(
            json.dumps({"model": MODEL, "user": f"u{n}", "prompt": "a"}).encode(),
            path="/v1/completions",
            lines=lines,
        )

    return await ask_on(place.gate.port, (each(n) for n in range(TENANTS)), at_once=16)


async def prompts(place: Place) -> Got:
    """Long prompts of which no two share a block."""
    rng = random.Random(4)

    def each() -> bytes:
        return post(
            json.dumps({"model": MODEL, "prompt": rng.randbytes(PROMPT_BYTES // 2).hex()}).encode(),
            path="/v1/completions",
        )

    return await ask_all(place.gate.port, [each() for _ in range(PROMPTS)], at_once=4)


async def response_ids(place: Place) -> Got:
    """Things that no unit has made, each by another name."""
    each = (get(f"/v1/responses/resp_{n}" + "a" * 200) for n in range(2000))
    return await ask_on(place.gate.port, each, at_once=8)


async def unit_names(place: Place) -> Got:
    """Health of units that do not exist, and addressed units from outside."""
    each = [get(f"/healthz/unit/{n}" + "a" * 200) for n in range(1000)]
    each += [post(b"{}", lines=f"x-cellgate-unit: u{n}\r\nx-forwarded-for: 8.8.8.8\r\n") for n in range(1000)]
    each += [post(b"{}", lines="x-cellgate-explain: 1\r\nx-forwarded-for: 8.8.8.8\r\n") for _ in range(100)]
    return await ask_on(place.gate.port, each, at_once=8)


async def queue_full(place: Place) -> Got:
    """Far more requests than there is room for, each of another tenant; then all who wait leave at once."""
    kept = []
    for n in range(QUEUE):
        body = prompt("hold", n, stream=True)
        kept.append(dial(place.gate.port, post(body, lines=f"x-gateway-inference-fairness-id: q{n}\r\n")))
        if n % 20 == 0:
            await asyncio.sleep(0.01)
    await asyncio.sleep(1.0)
    for raw in kept:
        raw.close()
    for _ in range(30):
        await asyncio.sleep(0.1)
        left = await asyncio.to_thread(_left, place)
        if not left:
            break
    return Counter(left=QUEUE) + Counter({"leases or places left behind": left})


def _left(place: Place) -> int:
    vitals = place.gate.vitals()
    # The neighbour's, and probes.
    return max(0, vitals.in_flight + vitals.waiting - 8)


async def metrics_labels(place: Place) -> Got:
    """After many names the page of metrics must be no longer than before."""
    before = len(await asyncio.to_thread(place.gate.metrics))
    each = (
        post(
            json.dumps({"model": f"x{n}", "messages": []}).encode(),
            lines=f"x-gateway-inference-fairness-id: l{n}\r\n",
        )
        for n in range(500)
    )
    got = await ask_on(place.gate.port, each, at_once=8)
    odd = [get(f"/{n}") for n in range(100)]
    odd += [b"M%d / HTTP/1.1\r\nhost: a\r\n\r\n" % n for n in range(20)]
    got += await ask_all(place.gate.port, odd, at_once=4)
    longer = len(await asyncio.to_thread(place.gate.metrics)) - before
    return got + Counter({f"{longer} bytes more of metrics": 1} if longer > 4096 else {})


NAMES = [
    Abuse("unknown-models", f"{MODELS} models that nobody serves", unknown_models, requests=MODELS),
    Abuse("long-model", "a model's name of 1 MB", long_model),
    Abuse("tenants", f"{TENANTS} tenants, sessions, users, credentials", tenants, requests=TENANTS),
    Abuse("prompts", f"{PROMPTS} prompts of 200 kB that share nothing", prompts, megabytes=20),
    Abuse("response-ids", "2,000 responses that nobody made", response_ids, requests=2000),
    Abuse("unit-names", "units and explanations asked for from outside", unit_names, requests=2100),
    Abuse(
        "queue-full",
        f"{QUEUE} requests for units that do not answer; they leave at once",
        queue_full,
        requests=QUEUE,
    ),
    Abuse("metrics-labels", "names in labels of metrics", metrics_labels, requests=620),
]
