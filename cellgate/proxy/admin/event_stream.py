"""A live stream of events, as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import orjson

from cellgate.proxy.logs.events import EventLog, EventRecord

HEARTBEAT_S = 10.0


async def followed(events: EventLog) -> AsyncGenerator[bytes, None]:
    """New events, and a heartbeat comment when there are none."""
    follower = events.subscribe()
    try:
        yield b": what happens from now on; what happened before is in GET /events\n\n"
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    event = await anext(follower)
            except TimeoutError:
                yield b": heartbeat\n\n"
            except StopAsyncIteration:
                return
            else:
                yield _sse(event)
    finally:
        events.unsubscribe(follower)


def _sse(event: EventRecord) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event["id"], event["kind"].encode(), orjson.dumps(event))
