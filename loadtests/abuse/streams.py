"""Abuses by streams: clients that read nothing or little of them, units that break or bend them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable

from loadtests.abuse.client import PATIENCE_S, Client, ask, held, one
from loadtests.abuse.evil import prompt
from loadtests.abuse.misdeeds import COMMENTS_MB, EVENT_MB, LARGE_EVENT, TINY_CHUNKS
from loadtests.abuse.nouns import UNIT_ANSWERED, Abuse, Got, Place
from loadtests.wire.messages import get, post, whole
from loadtests.wire.raw import dial

UNREAD = 256
STOPS = 300_000
DEATHS = 3
"""So many units may a request lose, and never one more."""


def does(misdeed: str, times: int = 1, **more: object) -> Callable[[Place], Awaitable[Got]]:
    """An abuse that has a unit do something `times` times, one after the other."""

    async def act(place: Place) -> Got:
        got: Got = Counter()
        for number in range(times):
            got[await ask(place.gate.port, post(prompt(misdeed, number, **more)))] += 1
        return got

    return act


async def unread(place: Place) -> Got:
    """Streams that flow as fast as they are taken, and are not."""
    kept = (dial(place.gate.port, post(prompt("flood", n, stream=True))) for n in range(UNREAD))
    return await held(kept, 4.0)


async def read_slowly(place: Place) -> Got:
    """A byte a second of such a stream."""
    kept = [dial(place.gate.port, post(prompt("flood", n, stream=True))) for n in range(16)]
    for _ in range(4):
        await asyncio.sleep(1.0)
        for raw in kept:
            raw.recv(1)
    for raw in kept:
        raw.close()
    return Counter(left=16)


async def read_and_leave(place: Place) -> Got:
    """Clients that leave in the middle of a stream; 64 KiB of each are read before its unit is held back."""
    for n in range(100):
        raw = dial(place.gate.port, post(prompt("flood", n, stream=True)))
        await asyncio.sleep(0.01)
        raw.close()
    return Counter(left=100)


async def dying_prompt(place: Place) -> Got:
    """A prompt on which units drop the connection."""
    before = place.evil.done["cut"]
    got = await one(ask(place.gate.port, post(prompt("cut", 1))))
    tries = place.evil.done["cut"] - before
    return got + Counter({f"sent to units {tries} times": 1} if tries > DEATHS else {})


async def stop_strings(place: Place) -> Got:
    """Very many stop strings on a stream that breaks, and is continued where it may be."""
    return await one(
        ask(place.gate.port, post(prompt("break-off", 1, stream=True, max_tokens=50, stop=["Z"] * STOPS)))
    )


async def large_event(place: Place) -> Got:
    """A stream with an event larger than any token breaks: its text is whole, or the client is told."""
    client = await Client.open(place.gate.port)
    await client.send(post(prompt("break-off-large", 1, stream=True, max_tokens=50_000)))
    outcome = await client.answer(PATIENCE_S)
    await client.close()
    seen = client.body.count(b"b" * LARGE_EVENT)
    is_told = b'"error"' in client.body or outcome.startswith("cut")
    return Counter([outcome]) + Counter({} if seen or is_told else {"text vanished without an error": 1})


def shows(misdeed: str, text: bytes) -> Callable[[Place], Awaitable[Got]]:
    """An abuse whose stream is in order by the standard: its text must come through."""

    async def act(place: Place) -> Got:
        client = await Client.open(place.gate.port)
        await client.send(post(prompt(misdeed, 1, stream=True)))
        outcome = await client.answer()
        await client.close()
        is_there = text in client.body
        return Counter([outcome]) + Counter({} if is_there else {"text is missing": 1})

    return act


_PROBED_WITHIN_S = 35
"""A list of models is read every 30 s."""
_PAGE_FOR_S = 4.0
_METRICS_LINE = b'vllm:num_requests_running{engine="0",model_name="%d"} %b\n'


def page(path: bytes, body: Callable[[], bytes]) -> Callable[[Place], Awaitable[Got]]:
    """An abuse by what a unit shows to probes, from when it is read first, for some seconds."""

    async def act(place: Place) -> Got:
        evil, log = place.evil, place.gate.log
        evil.pages[path] = whole(body())
        asked, logged = evil.targets[path], len(log.read_bytes())
        for _ in range(_PROBED_WITHIN_S * 5):
            if evil.targets[path] > asked:
                break
            await asyncio.sleep(0.2)
        got = Counter({"never read": 1} if evil.targets[path] == asked else {})
        await asyncio.sleep(_PAGE_FOR_S)
        # The list that the gate gives is made of those of its units.
        got += Counter([await ask(place.gate.port, get("/v1/models"), patience_s=5.0) for _ in range(10)])
        evil.pages.clear()
        lines = log.read_bytes()[logged:].splitlines()
        errors = sum(b'"error"' in line or b"Traceback" in line for line in lines)
        return got + Counter({f"{errors} error lines": 1} if errors > _PAGE_FOR_S / 2 else {})

    return act


def _many_metrics() -> bytes:
    return b"".join(_METRICS_LINE % (n, b"1.0") for n in range(50_000_000 // 55))


def _infinite_metrics() -> bytes:
    return _METRICS_LINE % (1, b"1e308") + _METRICS_LINE % (2, b"1e308") + _METRICS_LINE % (3, b"nan")


def _models(count: int, length: int) -> Callable[[], bytes]:
    def body() -> bytes:
        entries = [
            {"id": f"{n}".rjust(length, "a"), "object": "model", "owned_by": "vllm"} for n in range(count)
        ]
        return json.dumps({"object": "list", "data": [{"id": "evil", "owned_by": "vllm"}, *entries]}).encode()

    return body


STREAMS = [
    Abuse(
        "unread-streams",
        f"{UNREAD} streams that nobody reads",
        unread,
        # As much as the gate keeps for each, and the kernel; of half of them the gate keeps nothing more.
        megabytes=UNREAD * 0.6,
        requests=UNREAD * 4,
    ),
    Abuse("slow-readers", "streams read at a byte a second", read_slowly),
    Abuse("leave-in-stream", "100 clients leave in the middle of a stream", read_and_leave, megabytes=6.4),
    Abuse("dying-prompt", "a prompt on which units drop the connection", dying_prompt, answers=UNIT_ANSWERED),
    Abuse(
        "stop-strings",
        f"{STOPS} stop strings on a stream that breaks",
        stop_strings,
        megabytes=2,
        answers=UNIT_ANSWERED,
    ),
    Abuse("large-event", "an event of 20 kB in a stream that breaks", large_event, answers=UNIT_ANSWERED),
    Abuse("cr-only", "a stream whose line ends are CR", shows("carriage-returns", b'"a"')),
    Abuse("bom", "a BOM before the first event", shows("byte-order-mark", b"first")),
]

REPLIES = [
    Abuse(
        "reply-head-lines", "a reply's head of 60 kB of names", does("head-lines", 2), answers=UNIT_ANSWERED
    ),
    Abuse("reply-head-endless", "a reply's head without end", does("head-endless", 2), answers=UNIT_ANSWERED),
    Abuse("reply-interim", "100,000 replies of 1xx", does("interim", 2), answers=UNIT_ANSWERED),
    Abuse("reply-short", "fewer bytes than announced", does("short", 4), answers=UNIT_ANSWERED),
    Abuse("reply-long", "more bytes than announced", does("long", 4), answers=UNIT_ANSWERED),
    Abuse("reply-garbage", "a megabyte that is no HTTP", does("garbage", 2), answers=UNIT_ANSWERED),
    Abuse("reply-gzip", "a stream that is packed", does("gzipped", 2, stream=True), answers=UNIT_ANSWERED),
    Abuse(
        "reply-comments",
        f"{COMMENTS_MB} MB of comments before a token",
        does("comments", stream=True),
        megabytes=COMMENTS_MB,
        answers=UNIT_ANSWERED,
    ),
    Abuse(
        "reply-event",
        f"an event of {EVENT_MB} MB",
        does("event-huge", stream=True),
        megabytes=EVENT_MB,
        answers=UNIT_ANSWERED,
    ),
    Abuse(
        "reply-first-event",
        f"a first event of {EVENT_MB} MB",
        does("first-event-huge", stream=True),
        megabytes=EVENT_MB,
        answers=UNIT_ANSWERED,
    ),
    Abuse(
        "reply-tiny-chunks",
        f"{TINY_CHUNKS} chunks of a byte",
        does("tiny-chunks", stream=True),
        megabytes=6,
        answers=UNIT_ANSWERED,
    ),
    Abuse("page-metrics-50mb", "a page of metrics of 50 MB", page(b"/metrics", _many_metrics), megabytes=50),
    Abuse("page-metrics-inf", "gauges that sum to infinity", page(b"/metrics", _infinite_metrics)),
    Abuse(
        "page-models-10mb",
        "a list of 10 MB of long names",
        page(b"/v1/models", _models(1000, 10_000)),
        megabytes=10,
    ),
    Abuse(
        "page-models-million",
        "a list of a million models",
        page(b"/v1/models", _models(1_000_000, 8)),
        megabytes=60,
    ),
    Abuse(
        "page-models-short",
        "a list of 70,000 models in less than 1 MB",
        page(
            b"/v1/models", lambda: b'{"data":[' + b",".join(b'{"id":"%d"}' % n for n in range(70_000)) + b"]}"
        ),
        requests=1000,
    ),
    Abuse(
        "page-models-deep",
        "a list of models that is deep",
        page(b"/v1/models", lambda: b'{"data":' + b"[" * 1000 + b"]" * 1000 + b"}"),
    ),
]
