"""Abuses of the admin port by whoever reaches it, and of what the gate prints."""

from __future__ import annotations

import asyncio
from collections import Counter

from loadtests.abuse.client import ask, ask_all, ask_on, held, one
from loadtests.abuse.heads import SMALL
from loadtests.abuse.nouns import NO_ANSWER_POSSIBLE, Abuse, Got, Place, Surroundings
from loadtests.wire.messages import get, post
from loadtests.wire.raw import dial

PAGES = 300
HEALTH = 3000
LOGGED = 25_000
"""More than it takes to fill a pipe."""


async def open_pages(place: Place) -> Got:
    """The pages that everyone may have, from many at once."""
    paths = ("/metrics", "/", "/readyz", "/livez", "/status")
    each = (get(paths[n % len(paths)], "x-forwarded-for: 8.8.8.8\r\n") for n in range(PAGES))
    return await ask_all(place.gate.admin_port, each, at_once=50)


async def health(place: Place) -> Got:
    """Health checks without end."""
    each = [get(("/livez", "/readyz")[n % 2]) for n in range(HEALTH)]
    return await ask_on(place.gate.admin_port, each, at_once=8)


async def health_of_gate(place: Place) -> Got:
    """The same at the port for users."""
    each = [get(("/livez", "/readyz", "/health", "/v1/models")[n % 4]) for n in range(HEALTH)]
    return await ask_on(place.gate.port, each, at_once=8)


async def wrong_token(place: Place) -> Got:
    """A token that is shown and wrong, from this machine."""
    wrong = post(b"", path="/units/sim/drain", lines="authorization: Bearer wrong\r\n")
    got = await one(ask(place.gate.admin_port, wrong.replace(b"host: gate", b"host: 127.0.0.1")))
    drained = any(unit["drained"] for unit in await asyncio.to_thread(place.gate.units))
    if drained:
        await asyncio.to_thread(lambda: place.gate.drain("sim", undo=True))
    return got + Counter({"drained": 1} if drained else {})


async def garbage(place: Place) -> Got:
    """What the port for users gets, at the admin port: large heads, large bodies, noise."""
    each = [
        get("/" + "a" * 100_000),
        get("/metrics", "a: b\r\n" * 10_000),
        get("/units/" + "%2e%2e/" * 100),
        post(b"a" * 20_000_000, path="/explain", lines="x-forwarded-for: 8.8.8.8\r\n"),
        b"\xff" * 1_000_000,
        b"\x16\x03\x01\x02\x00\x01",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /explain HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5;" + b"a" * 1_000_000,
    ]
    return await ask_all(place.gate.admin_port, each, at_once=2)


async def idle(place: Place) -> Got:
    """Silent connections to the admin port, while the operator asks."""
    kept = [dial(place.gate.admin_port) for _ in range(1000)]
    got = Counter([await ask(place.gate.admin_port, get("/readyz"), patience_s=5.0) for _ in range(5)])
    return got + await held(kept, 1.0)


async def unread_pages(place: Place) -> Got:
    """Pages of metrics that nobody reads, asked for again and again."""
    kept = [dial(place.gate.admin_port, get("/metrics") * 200) for _ in range(20)]
    return await held(kept, 2.0)


async def unread_log(place: Place) -> Got:
    """A log that nobody reads, while requests come: they are answered."""
    each = (post(SMALL.replace(b'"sim"', b'"none"')) for _ in range(LOGGED))
    return await ask_on(place.gate.port, each, at_once=8)


ADMIN = [
    Abuse("admin-pages", f"{PAGES} pages of the admin port", open_pages, requests=PAGES * 3),
    Abuse("admin-health", f"{HEALTH} health checks at the admin port", health, requests=HEALTH),
    Abuse("health", f"{HEALTH} health checks at the port for users", health_of_gate, requests=HEALTH),
    Abuse("wrong-token", "a wrong token from this machine", wrong_token, answers="401"),
    Abuse(
        "admin-garbage",
        "large heads, bodies and noise at the admin port",
        garbage,
        megabytes=20,
        answers=NO_ANSWER_POSSIBLE,
    ),
    Abuse("admin-idle", "1,000 silent connections to the admin port", idle, requests=1000),
    Abuse("admin-unread", "pages of metrics that nobody reads", unread_pages, requests=400),
    Abuse(
        "unread-log",
        f"{LOGGED} requests, and nobody reads the log",
        unread_log,
        requests=LOGGED,
        surroundings=Surroundings(unread_log=True),
    ),
]
